"""Judge both ends of the way from and to the hub's format: what training started from, what it left, what HF reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from glmv.verify.judge import Finding, judge
from spec.config import Config
from spec.layout import per_expert
from spec.model import Batch, forward
from spec.numerics import Policy


def hub_tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of a directory in Hugging Face format, as stored."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    return tensors


def judge_bits(candidate: dict[str, Tensor], truth: dict[str, Tensor]) -> Iterator[Finding]:
    """Names, shapes, dtypes and values must agree to the bit; one finding a tensor."""
    for name in sorted(candidate.keys() | truth.keys()):
        found, said = candidate.get(name), truth.get(name)
        if found is None or said is None:
            yield Finding(name, "missing" if found is None else "unexpected", 1.0, 0.0)
        elif (found.dtype, found.shape) != (said.dtype, said.shape):
            yield Finding(name, f"is {found.dtype} {list(found.shape)}, not {said.dtype} {list(said.shape)}", 1.0, 0.0)
        else:
            yield Finding(name, "bit-equal", float((found != said).sum()), 0.0)


def judge_start(weights: dict[str, Tensor], hub: Path) -> list[Finding]:
    """The first step's weights are the hub's, widened to the dtype of the masters."""
    published = per_expert(weights)
    truth = {name: t.to(published[name].dtype) if name in published else t for name, t in hub_tensors(hub).items()}
    return list(judge_bits(published, truth))


def judge_export(weights: dict[str, Tensor], hub: Path, export: Path) -> list[Finding]:
    """The exported tensors are the trained ones, rounded once to the dtype that the hub's directory has."""
    published, reference = per_expert(weights), hub_tensors(hub)
    truth = {name: t.to(reference[name].dtype) if name in reference else t for name, t in published.items()}
    return list(judge_bits(hub_tensors(export), truth))


def judge_hf_logits(export: Path, batch: Batch) -> list[Finding]:
    """HF transformers loads the export and computes the law's logits of one batch, in float32.

    Raises:
        ValueError: HF found missing or unexpected weights.
    """
    from transformers import AutoModelForImageTextToText
    from transformers.utils import logging

    logging.disable_progress_bar()
    model, report = AutoModelForImageTextToText.from_pretrained(
        export, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    strange = {kind: sorted(report[kind]) for kind in ("missing_keys", "unexpected_keys") if report[kind]}
    if strange:
        raise ValueError(f"HF transformers does not take the export as it is: {strange}")
    chosen = _watch_routers(model)
    inputs = {name: value for name, value in vars(batch).items() if value is not None and name != "labels"}
    with torch.no_grad():
        logits = model(**inputs, use_cache=False).logits
    config = Config.from_hf(json.loads((export / "config.json").read_text(encoding="utf-8")))
    weights, real = hub_tensors(export), batch.attention_mask.bool()

    def law(policy: Policy) -> dict[str, Tensor]:
        wide = {name: policy.widen(t) for name, t in weights.items()}
        return {"logits": forward(wide, config, batch, policy, chosen).logits[real]}

    return judge({"logits": logits[real]}, law, torch.float32)


def _watch_routers(model: torch.nn.Module) -> dict[int, Tensor]:
    chosen: dict[int, Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith(".mlp.gate"):
            layer = int(name.split(".layers.")[1].split(".")[0])

            def keep(_: object, __: object, output: tuple[Tensor, ...], layer: int = layer) -> None:
                chosen[layer] = output[2]

            module.register_forward_hook(keep)
    return chosen
