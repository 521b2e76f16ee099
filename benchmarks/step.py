"""A training step (forward, loss, backward, clip, AdamW) of a small model: glmv, and transformers on the same weights.

python benchmarks/step.py --out step.json
"""
# Shapes: B batch, S sequence, V vocab.

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from measure import DTYPES, Candidate, Watch, interleave, machine, relative_l2, save, summarise, table
from rich.console import Console
from torch import Tensor, nn
from transformers.models.glm4v_moe.configuration_glm4v_moe import Glm4vMoeConfig
from transformers.models.glm4v_moe.modeling_glm4v_moe import Glm4vMoeForConditionalGeneration as HFModel

from glmv.model import Glm4vMoeForConditionalGeneration, ModelConfig
from glmv.ops.loss import Objective, count_targets, cross_entropy, shares
from glmv.parallel.grad_norm import clip_grad_norm
from glmv.tiny.config import hub_config
from glmv.tiny.tokenizer import special_token_ids, train_tokenizer

PEER = "HF grouped_mm"
PHASES = ("forward", "backward", "clip", "optimizer")
STACKED = ("experts.gate_up_proj", "experts.down_proj")
MAX_NORM, LR = 1.0, 1e-4


def sizes(layers: int, hidden: int, experts: int) -> dict[str, Any]:
    """config.json of the tiny model, at the size that is timed."""
    return {
        "text_config": {
            "vocab_size": 4096,
            "hidden_size": hidden,
            "intermediate_size": 3 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": hidden // 64,
            "num_key_value_heads": max(hidden // 256, 1),
            "head_dim": 64,
            "rope_scaling": {"rope_type": "default", "mrope_section": [4, 6, 6]},
            "n_routed_experts": experts,
            "num_experts_per_tok": min(8, experts),
            "moe_intermediate_size": 176,
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 128,
            "num_heads": 4,
            "out_hidden_size": hidden,
            "intermediate_size": 256,
        },
    }


def draw_batch(config: dict[str, Any], tokens: int, side: int, seed: int) -> dict[str, Tensor]:
    """One row: text, an image of side x side patches, text; nothing padded. Image tokens are not learned."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(100, 500, (1, tokens), generator=random)
    start, count = tokens // 4, (side // 2) ** 2
    ids[0, start - 1], ids[0, start + count] = config["image_start_token_id"], config["image_end_token_id"]
    ids[0, start : start + count] = config["image_token_id"]
    types = (ids == config["image_token_id"]).long()
    return {
        "input_ids": ids,
        "mm_token_type_ids": types,
        "labels": ids.masked_fill(types == 1, -100),
        "pixel_values": torch.randn(side * side, 3 * 2 * 14 * 14, generator=random),
        "image_grid_thw": torch.tensor([[1, side, side]]),
    }


def draw_weights(model: nn.Module, seed: int) -> None:
    """Random numbers of the size that training starts from."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            scale = tensor.shape[-2] if name.endswith(STACKED) else tensor[0].numel()
            noise = torch.randn(tensor.shape, generator=random)
            tensor.copy_(noise / scale**0.5 if tensor.ndim > 1 else noise / 10 + ("norm" in name))


def as_hf(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """glmv's names and layout to transformers': the names are the same, stacked experts are transposed."""
    return {n: w.mT.contiguous() if n.endswith(STACKED) else w.clone() for n, w in weights.items()}


@dataclass
class Trainee:
    """A model, its optimizer, and how its loss is computed."""

    model: nn.Module
    loss: Callable[[nn.Module], Tensor]
    clip: Callable[[list[nn.Parameter]], Tensor]

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, fused=True)

    def step(self, watch: Watch) -> None:
        self.optimizer.zero_grad()
        with watch.phase("forward"):
            loss = self.loss(self.model)
        with watch.phase("backward"):
            loss.backward()
        with watch.phase("clip"):
            self.clip(list(self.model.parameters()))
        with watch.phase("optimizer"):
            self.optimizer.step()

    def gradients(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss, and gradients by glmv's name and layout."""
        self.optimizer.zero_grad()
        loss = self.loss(self.model)
        loss.backward()
        grads = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        return loss.detach(), grads


def trainees(config: dict[str, Any], batch: dict[str, Tensor], dtype: torch.dtype, seed: int) -> dict[str, Trainee]:
    """Both sides with the same weights."""
    device = batch["input_ids"].device
    ours = Glm4vMoeForConditionalGeneration(ModelConfig.from_hf(config, source="the benchmark's config"))
    draw_weights(ours, seed)
    theirs = HFModel._from_config(
        Glm4vMoeConfig(**config), attn_implementation="sdpa", experts_implementation="grouped_mm", dtype=torch.float32
    )
    theirs.load_state_dict(as_hf(ours.state_dict()))
    ours.reset_buffers()
    inputs = {
        "input_ids_BS": batch["input_ids"],
        "mm_token_type_ids_BS": batch["mm_token_type_ids"],
        "pixel_values_NP": batch["pixel_values"].to(dtype),
        "image_grid_thw": batch["image_grid_thw"].cpu(),
    }
    labels = batch["labels"].cpu()
    objective = Objective("per_token_loss", int(count_targets(labels)), 1)

    def our_loss(model: nn.Module) -> Tensor:
        share_BS = shares(labels, torch.zeros_like(labels), objective)
        return cross_entropy(model(**inputs), batch["labels"], share_BS)

    def their_loss(model: nn.Module) -> Tensor:
        return model(**batch | {"pixel_values": inputs["pixel_values_NP"]}, use_cache=False).loss

    return {
        "glmv": Trainee(ours.to(device, dtype), our_loss, lambda parameters: clip_grad_norm(parameters, MAX_NORM)),
        PEER: Trainee(
            theirs.to(device, dtype).train(),
            their_loss,
            lambda parameters: nn.utils.clip_grad_norm_(parameters, MAX_NORM),
        ),
    }


def differences(sides: dict[str, Trainee]) -> dict[str, float]:
    """Relative difference of the losses, and relative L2 of all gradients taken as one vector."""
    (loss, own), (hf_loss, other) = (side.gradients() for side in sides.values())
    other = {n: g.mT if n.endswith(STACKED) else g for n, g in other.items()}
    if own.keys() != other.keys():
        raise SystemExit(f"gradients on one side only: {sorted(own.keys() ^ other.keys())}")
    whole, hf_whole = (torch.cat([grads[name].flatten().double() for name in own]) for grads in (own, other))
    return {"loss": relative_l2(loss, hf_loss), "gradients": relative_l2(whole, hf_whole)}


def check(found: dict[str, float], dtype: torch.dtype) -> None:
    """Candidates that compute different things are not compared; bf16 rounding sends some tokens to other experts."""
    if dtype == torch.float32 and not max(found.values()) < 1e-3:
        raise SystemExit(f"glmv and transformers differ: {found}")


def main(
    dtype: Annotated[list[str], typer.Option(help="fp32 or bf16; may be given again.")] = ["fp32", "bf16"],  # noqa: B006
    layers: int = 4,
    hidden: Annotated[int, typer.Option(help="A multiple of 256.")] = 512,
    experts: int = 32,
    tokens: Annotated[int, typer.Option(help="Of the one row, an image's included.")] = 512,
    side: Annotated[int, typer.Option(help="The image has side x side patches.")] = 16,
    repetitions: int = 5,
    threads: Annotated[int, typer.Option(help="torch's threads; 0 leaves them as they are.")] = 0,
    device: str = "cpu",
    seed: int = 7,
    out: Annotated[Path | None, typer.Option(help="Write the figures as JSON.")] = None,
) -> None:
    """Time whole training steps."""
    if threads:
        torch.set_num_threads(threads)
    where, cases, console = torch.device(device), [], Console(width=None if sys.stdout.isatty() else 100)
    config = hub_config(special_token_ids(train_tokenizer()), sizes(layers, hidden, experts))
    batch = {name: value.to(where) for name, value in draw_batch(config, tokens, side, seed).items()}
    for name in dtype:
        sides = trainees(config, batch, DTYPES[name], seed)
        found = differences(sides)
        check(found, DTYPES[name])
        for trainee in sides.values():
            trainee.step(Watch(where))  # makes the optimizer's state
        before = machine(where)
        candidates = [Candidate(label, side.step) for label, side in sides.items()]
        summary = summarise(interleave(candidates, repetitions, where), PHASES)
        cases.append(
            {
                "sizes": {"layers": layers, "hidden": hidden, "experts": experts, "tokens": tokens, "side": side},
                "parameters": sum(p.numel() for p in sides["glmv"].model.parameters()),
                "dtype": name,
                "machine": before,
                "load_after": machine(where)["load_average"],
                "seconds": summary,
                "differences": found,
            }
        )
        title = f"step  {layers} layers, hidden {hidden}, {experts} experts, {tokens} tokens, {name}, {device}"
        save("step", cases, out)
        console.print(table(title, summary, PEER))
        del sides, candidates
        gc.collect()


if __name__ == "__main__":
    typer.run(main)
