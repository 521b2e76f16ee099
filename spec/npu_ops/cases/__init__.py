"""Calls of every operator: drawn ones, ones at the border, and ones that must be refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from spec.npu_ops.cases import attention, pointwise, products, routing
from spec.npu_ops.cases.draws import Case, Draw

Refusals = list[tuple[str, Case, str]]


def no_edges() -> list[Case]:
    """For operators whose drawn cases say it all."""
    return []


@dataclass(frozen=True)
class Source:
    """Where one operator's cases come from."""

    draw: Callable[[Draw], Case]
    refusals: Callable[[], Refusals]
    edges: Callable[[], list[Case]] = no_edges


SOURCES: dict[str, Source] = {
    "npu_moe_token_permute": Source(routing.draw_permute, routing.refusals_permute, routing.edges_permute),
    "npu_moe_token_permute_grad_v2": Source(routing.draw_permute_grad, routing.refusals_permute_grad),
    "npu_moe_token_unpermute": Source(routing.draw_unpermute, routing.refusals_unpermute, routing.edges_unpermute),
    "npu_moe_token_unpermute_grad_v2": Source(routing.draw_unpermute_grad, routing.refusals_unpermute_grad),
    "npu_moe_gating_top_k": Source(routing.draw_gating, routing.refusals_gating),
    "npu_moe_gating_top_k_backward": Source(routing.draw_gating_backward, routing.refusals_gating_backward),
    "npu_grouped_matmul": Source(
        products.draw_grouped_matmul, products.refusals_grouped_matmul, products.edges_grouped_matmul
    ),
    "npu_alltoallv_gmm": Source(products.draw_alltoallv_gmm, products.refusals_exchange, products.edges_alltoallv_gmm),
    "npu_gmm_alltoallv": Source(products.draw_exchange, products.refusals_exchange, products.edges_gmm_alltoallv),
    "npu_swiglu": Source(pointwise.draw_swiglu, pointwise.refusals_swiglu),
    "npu_swiglu_backward": Source(pointwise.draw_swiglu_backward, pointwise.refusals_swiglu_backward),
    "npu_rotary_mul": Source(pointwise.draw_rotary, pointwise.refusals_rotary, pointwise.edges_rotary),
    "npu_rotary_mul_backward": Source(pointwise.draw_rotary_backward, pointwise.refusals_rotary_backward),
    "npu_rms_norm": Source(pointwise.draw_rms_norm, pointwise.refusals_rms_norm),
    "npu_rms_norm_backward": Source(pointwise.draw_rms_norm_backward, pointwise.refusals_rms_norm_backward),
    "npu_fusion_attention": Source(attention.draw_attention, attention.refusals_attention, attention.edges_attention),
    "npu_fusion_attention_grad": Source(attention.draw_attention_grad, attention.refusals_attention_grad),
    "npu_ring_attention_update": Source(attention.draw_ring, attention.refusals_ring),
}


def draw(name: str, generator: torch.Generator) -> Case:
    """A valid call of the operator; small, cheap, and different every time."""
    return SOURCES[name].draw(Draw(generator))


def edges(name: str) -> list[Case]:
    """Valid calls at the border of what the operator takes."""
    return SOURCES[name].edges()


def refusals(name: str) -> list[tuple[str, tuple[Any, ...], dict[str, Any], str]]:
    """Calls that must be refused: label, arguments, keyword arguments, and a piece of the message."""
    return [(label, case.args, case.kwargs, message) for label, case, message in SOURCES[name].refusals()]
