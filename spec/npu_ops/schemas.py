"""The public signatures of torch_npu's operators, by release.

Source: the string tables of the torch_npu wheels (`python -m glmv.verify.wheel.schemas` writes the data file).
"""

import functools
import json
from pathlib import Path

PINNED = "2.13.0"  # the release that the contract describes


@functools.cache
def versions() -> dict[str, dict[str, str]]:
    """Schema by operator name (`npu_swiglu`, `npu_grouped_matmul.List`), by torch_npu release; oldest first."""
    data: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("schemas.json").read_text(encoding="utf-8"))
    return data


def schema(name: str, version: str = PINNED) -> str:
    """The schema of one operator, in the language of `torch.library`, without namespace.

    Raises:
        KeyError: no such release in the data file, or the release has no such operator.
    """
    return versions()[version][name]
