"""Reads operator schemas out of torch_npu wheels without importing them, into the file that the contract goes by.

    python -m glmv.verify.wheel.schemas --out spec/npu_ops/schemas.json WHEEL...

A schema is handed to torch's dispatcher as a C string, so it stands in the library's string table as it was written.
"""

from __future__ import annotations

import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Annotated

import typer

from glmv.errors import GlmvError

# What the contract describes, and the gradients that the wheel computes for it. A name covers its overloads.
OPERATORS = (
    "npu_alltoallv_gmm",
    "npu_fusion_attention",
    "npu_fusion_attention_grad",
    "npu_gmm_alltoallv",
    "npu_grouped_matmul",
    "npu_moe_gating_top_k",
    "npu_moe_gating_top_k_backward",
    "npu_moe_token_permute",
    "npu_moe_token_permute_grad",
    "npu_moe_token_permute_grad_v2",
    "npu_moe_token_unpermute",
    "npu_moe_token_unpermute_grad",
    "npu_moe_token_unpermute_grad_v2",
    "npu_ring_attention_update",
    "npu_rms_norm",
    "npu_rms_norm_backward",
    "npu_rotary_mul",
    "npu_rotary_mul_backward",
    "npu_swiglu",
    "npu_swiglu_backward",
)
_STRING = re.compile(rb"[\x20-\x7e]{12,}")
_SCHEMA = re.compile(r"(?:npu::)?((_?npu_\w+)(?:\.\w+)?)\(.*\) ?-> ?.+")


class SchemaError(GlmvError):
    """A wheel that is no torch_npu wheel, or whose schemas cannot be told apart."""


def read_wheel(wheel: Path) -> tuple[str, dict[str, str]]:
    """(torch_npu's version, schema by operator name) of one wheel; a name is `operator` or `operator.overload`.

    Raises:
        SchemaError: not a torch_npu wheel, or two different schemas of one name.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            library = archive.read("torch_npu/lib/libtorch_npu.so")
            metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            version = re.search(r"^Version: (\S+)", archive.read(metadata).decode(), re.MULTILINE)
    except (OSError, KeyError, StopIteration, zipfile.BadZipFile) as error:
        raise SchemaError(f"{wheel} is not a torch_npu wheel: {error}") from error
    if version is None:
        raise SchemaError(f"{wheel} does not tell its version.")
    return version[1], schemas_in(library)


def schemas_in(library: bytes) -> dict[str, str]:
    """Schemas of OPERATORS among the printable strings of a binary, sorted by name.

    Raises:
        SchemaError: two different schemas of one name.
    """
    found: dict[str, str] = {}
    for string in sorted({match.decode() for match in _STRING.findall(library)}):
        match = _SCHEMA.fullmatch(string)
        if match is None or match[2] not in OPERATORS:
            continue
        schema = string.removeprefix("npu::")
        if found.setdefault(match[1], schema) != schema:
            raise SchemaError(f"two schemas of {match[1]}:\n  {found[match[1]]}\n  {schema}")
    return dict(sorted(found.items()))


def extract(
    wheels: Annotated[list[Path], typer.Argument(help="torch_npu wheels, one a version.")],
    out: Annotated[Path, typer.Option(help="The version-keyed JSON file to write.")],
) -> None:
    """Write the schemas of every wheel into one file."""
    versions = dict(map(read_wheel, wheels))
    ordered = sorted(versions, key=lambda version: [int(part) for part in version.split(".")])
    out.write_text(json.dumps({version: versions[version] for version in ordered}, indent=1) + "\n", encoding="utf-8")
    for version in ordered:
        print(f"torch_npu {version}: {len(versions[version])} schemas")


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(extract)
    try:
        app()
    except GlmvError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
