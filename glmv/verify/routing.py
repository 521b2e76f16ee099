"""Judge which experts the machine chose, before its choice is pinned for everything else.

Under rounding two experts with nearly equal scores may change places; the truth cannot say who is right. Any other
difference is a fault, and many near-ties at once are one too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from glmv.verify.judge import Finding
from spec.router import Routing

RATIO = 6.0
# Share of tokens whose choice may differ: scores closer than their own rounding noise are rare in float32 and common in
# bfloat16, where sigmoid scores of a small model differ by a few ulps only.
# One token may always differ, except in float64.
SUBSTITUTIONS = {torch.float64: 0.0, torch.float32: 0.002, torch.bfloat16: 0.10}


def score_noise(truth: Mapping[int, Routing], draw: Mapping[int, Routing], real_T: Tensor) -> dict[int, float]:
    """RMS error of the biased scores of each layer in one noise draw, over real tokens."""
    return {
        layer: float((draw[layer].choice_TE.double() - routing.choice_TE.double())[real_T].square().mean().sqrt())
        for layer, routing in truth.items()
    }


def judge_choice(
    chosen: Mapping[int, Tensor],
    truth: Mapping[int, Routing],
    noise: Mapping[int, float],
    real_T: Tensor,
    dtype: torch.dtype,
) -> Iterator[Finding]:
    """Per layer: the largest margin by which an expert was preferred wrongly, and the share of tokens concerned.

    Args:
        chosen: experts [T, K] by layer.   truth: the law's biased scores, computed on the chosen route.
        noise: from `score_noise`, by layer.   real_T: bool, False at padding.
    """
    for layer, routing in truth.items():
        name = f"model.language_model.layers.{layer}.mlp.gate"
        score_TE, index_TK = routing.choice_TE[real_T], chosen[layer][real_T]
        taken_TE = torch.zeros_like(score_TE, dtype=torch.bool).scatter_(-1, index_TK, True)
        if int(taken_TE.sum()) != index_TK.numel():
            yield Finding(name, "repeated expert", 1.0, 0.0)
        worst_taken_T = score_TE.masked_fill(~taken_TE, torch.inf).amin(-1)
        best_left_T = score_TE.masked_fill(taken_TE, -torch.inf).amax(-1)
        margin_T = (best_left_T - worst_taken_T).clamp(min=0)
        token = int(margin_T.argmax())
        floor = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        yield Finding(name, "choice margin", float(margin_T.max()), RATIO * max(noise[layer], floor), f"token {token}")
        cap = SUBSTITUTIONS[dtype]
        cap = max(cap, 1 / len(margin_T)) if cap else 0.0
        yield Finding(name, "choice share", float((margin_T > 0).double().mean()), cap)
