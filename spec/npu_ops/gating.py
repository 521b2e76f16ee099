"""Which experts a token visits and with what weight, from router logits.

Source: op-plugin's documentation of npu_moe_gating_top_k and the documentation of aclnnMoeGatingTopK and its gradient;
the rule is DeepSeek-V3's (arXiv 2412.19437, section 2.1.2) when norm_type is 1.
"""

# Shapes: T tokens, E experts, K experts per token, G groups.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spec.npu_ops.contract import Call, Contract, wide
from spec.npu_ops.refuse import check_dtype, refuse_if, refuse_undescribed

SOFTMAX, SIGMOID = 0, 1
BY_BEST, BY_BEST_TWO = 0, 1
MOST_EXPERTS = 2048


def gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    input_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:
    """Score logits x [T, E] by softmax or sigmoid, choose by score + bias, weigh by score.

    Sigmoid weights (norm_type 1) are ALWAYS divided by their sum; softmax weights never are. Equal scores go to the
    lower expert.

    Returns:
        weights [T, K] in the dtype of x, experts int32 [T, K], and float32 scores [T, E]: memory that nobody wrote (NaN
        here) unless `out_flag`.
    """
    score_TE = scores(x, norm_type)
    choice_TE = score_TE if bias is None else score_TE + bias.to(score_TE.dtype)
    if group_count > 1:
        choice_TE = choice_TE.masked_fill(
            ~strong_groups(choice_TE, k_group, group_count, group_select_mode), -torch.inf
        )
    expert_TK = choice_TE.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weight_TK = weigh(score_TE.gather(-1, expert_TK), norm_type, eps) * routed_scaling_factor
    written = score_TE if out_flag else torch.full_like(score_TE, float("nan"))
    return weight_TK.to(x.dtype), expert_TK.to(torch.int32), written


def scores(x: Tensor, norm_type: int) -> Tensor:
    """Scores of all experts in the wide dtype."""
    logits = x.to(wide(x))
    return logits.sigmoid() if norm_type == SIGMOID else logits.softmax(-1)


def strong_groups(choice_TE: Tensor, k_group: int, group_count: int, mode: int) -> Tensor:
    """True for experts of the k_group best groups; a group counts as its best expert, or as its two best summed."""
    choice_TGe = choice_TE.unflatten(-1, (group_count, -1))
    score_TG = choice_TGe.topk(2 if mode == BY_BEST_TWO else 1).values.sum(-1)
    group_TG = score_TG.sort(dim=-1, descending=True, stable=True).indices[:, :k_group]
    strong_TG = torch.zeros_like(score_TG, dtype=torch.bool).scatter(-1, group_TG, True)
    return strong_TG[..., None].expand_as(choice_TGe).flatten(-2)


def weigh(score_TK: Tensor, norm_type: int, eps: float) -> Tensor:
    """Weights before scaling."""
    return score_TK / (score_TK.sum(-1, keepdim=True) + eps) if norm_type == SIGMOID else score_TK


def gating_top_k_backward(
    x_norm: Tensor,
    grad_y: Tensor,
    expertIdx: Tensor,
    *,
    renorm: int = 0,
    norm_type: int = 0,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> Tensor:
    """Gradient of the logits [T, E] in the dtype of `grad_y`.

    Args:
        x_norm: float32 scores [T, E], the third output of a forward with `out_flag`.   expertIdx: int32 [T, K].
    """
    score_TE, expert_TK = x_norm.to(wide(x_norm)), expertIdx.long()
    to_score_TK = grad_y.to(score_TE.dtype) * routed_scaling_factor
    if norm_type == SIGMOID:
        chosen_TK = score_TE.gather(-1, expert_TK)
        weight_TK = weigh(chosen_TK, norm_type, eps)
        mean_T1 = (weight_TK * to_score_TK).sum(-1, keepdim=True)
        to_score_TK = (to_score_TK - mean_T1) / (chosen_TK.sum(-1, keepdim=True) + eps)
    to_score_TE = torch.zeros_like(score_TE).scatter(-1, expert_TK, to_score_TK)
    if norm_type == SIGMOID:
        return (to_score_TE * score_TE * (1 - score_TE)).to(grad_y.dtype)
    return (score_TE * (to_score_TE - (to_score_TE * score_TE).sum(-1, keepdim=True))).to(grad_y.dtype)


def gating_gradients(grads: Sequence[Tensor], call: Call, outputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Gradient of the logits; the bias only decides and has none."""
    options = {"norm_type": call.norm_type, "routed_scaling_factor": call.routed_scaling_factor, "eps": call.eps}
    return {"x": gating_top_k_backward(scores(call.x, call.norm_type), grads[0], outputs[1], **options)}


def refuse_gating(call: Call) -> None:
    """What npu_moe_gating_top_k refuses."""
    x, experts, groups = call.x, call.x.size(-1), call.group_count
    refuse_undescribed("npu_moe_gating_top_k", input_ids=call.input_ids, tid2eid=call.tid2eid)
    refuse_if(x.dim() != 2, "The x should be 2D")
    check_dtype("x", x)
    refuse_if(experts > MOST_EXPERTS, f"npu_moe_gating_top_k: at most {MOST_EXPERTS} experts are supported")
    if call.bias is not None:
        refuse_if(call.bias.shape != (experts,), f"npu_moe_gating_top_k: bias must be 1D with {experts} elements")
        refuse_if(call.bias.dtype != x.dtype, "npu_moe_gating_top_k: bias must have the dtype of x")
    refuse_kind("npu_moe_gating_top_k", call)
    refuse_if(call.group_select_mode not in (0, 1), "npu_moe_gating_top_k: group_select_mode must be 0 or 1")
    refuse_if(groups < 1 or experts % groups != 0, f"npu_moe_gating_top_k: {groups} groups do not divide {experts}")
    size = experts // groups
    smallest = 2 if call.group_select_mode == BY_BEST_TWO and groups > 1 else 1
    refuse_if(size < smallest, f"npu_moe_gating_top_k: a group must have at least {smallest} experts")
    refuse_if(not 1 <= call.k_group <= groups, f"npu_moe_gating_top_k: k_group must be 1 to {groups}")
    most = size * call.k_group
    refuse_if(not 1 <= call.k <= most, f"npu_moe_gating_top_k: k must be 1 to {most}, but is {call.k}")


def refuse_kind(operator: str, call: Call) -> None:
    """Options that forward and gradient share."""
    refuse_if(call.renorm != 0, f"{operator}: renorm must be 0, but is {call.renorm}")
    refuse_if(call.norm_type not in (SOFTMAX, SIGMOID), f"{operator}: norm_type must be 0 or 1")


def refuse_gating_backward(call: Call) -> None:
    """What npu_moe_gating_top_k_backward refuses."""
    operator = "npu_moe_gating_top_k_backward"
    check_dtype("x_norm", call.x_norm, (torch.float32,))
    check_dtype("grad_y", call.grad_y)
    check_dtype("expertIdx", call.expertIdx, (torch.int32,))
    refuse_if(call.grad_y.shape != call.expertIdx.shape, f"{operator}: grad_y and expertIdx must have the same shape")
    refuse_kind(operator, call)


GATING = Contract("npu_moe_gating_top_k", gating_top_k, refuse_gating, gating_gradients, non_differentiable=(1, 2))
GATING_BACKWARD = Contract("npu_moe_gating_top_k_backward", gating_top_k_backward, refuse_gating_backward)
