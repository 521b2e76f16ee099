"""Judge which experts the machine chose, before its choice is pinned for everything else.

Under rounding two experts with nearly equal scores may change places, and the truth cannot say who is right. Any other
difference is a fault, and so are more near-ties than rounding brings about: the law's noise draws show how far scores
move, and how often a choice falls the other way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from glmv.verify.judge import Finding
from spec.router import Routing

# A margin is the difference of two noisy scores (a factor 1.4) and the largest over tens of thousands of tokens (4.3
# sigma); the rest is for tokens that are noisier than the others of their micro-batch.
MARGIN_RATIO = 8.0
SHARE_RATIO = 3.0


def margins(routing: Routing, index_TK: Tensor, real_T: Tensor) -> Tensor:
    """By how much each real token's choice went against the scores, [T]; 0 where it took the K best."""
    score_TE, index_TK = routing.choice_TE[real_T], index_TK[real_T]
    taken_TE = torch.zeros_like(score_TE, dtype=torch.bool).scatter_(-1, index_TK, True)
    worst_taken_T = score_TE.masked_fill(~taken_TE, torch.inf).amin(-1)
    best_left_T = score_TE.masked_fill(taken_TE, -torch.inf).amax(-1)
    return (best_left_T - worst_taken_T).clamp(min=0)


@dataclass(frozen=True)
class ScoreNoise:
    """What one noise draw did to one layer's scores of a micro-batch."""

    rms: float
    flips: int
    tokens: int


def score_noise(truth: Mapping[int, Routing], draw: Mapping[int, Routing], real_T: Tensor) -> dict[int, ScoreNoise]:
    """By layer: RMS error of a draw's scores, and how many tokens it would have sent elsewhere."""
    found = {}
    for layer, said in truth.items():
        drawn_TE = draw[layer].choice_TE.to(said.choice_TE.dtype)
        rms = float((drawn_TE - said.choice_TE)[real_T].square().mean().sqrt())
        free_TK = drawn_TE.topk(said.top_k_index_TK.shape[-1], dim=-1).indices
        found[layer] = ScoreNoise(rms, int((margins(said, free_TK, real_T) > 0).sum()), int(real_T.sum()))
    return found


class RoutingNoise:
    """Score noise of each layer, pooled over draws."""

    def __init__(self) -> None:
        self.draws: dict[int, list[ScoreNoise]] = defaultdict(list)

    def add(self, noise: Mapping[int, ScoreNoise]) -> None:
        """Take in one draw of one micro-batch."""
        for layer, found in noise.items():
            self.draws[layer].append(found)

    def level(self, layer: int) -> float:
        """RMS score error."""
        draws = self.draws[layer]
        return (sum(draw.rms**2 for draw in draws) / len(draws)) ** 0.5

    def share(self, layer: int) -> float:
        """Share of tokens whose choice a draw changed."""
        draws = self.draws[layer]
        return sum(draw.flips for draw in draws) / sum(draw.tokens for draw in draws)


def judge_margins(
    chosen: Mapping[int, Tensor],
    truth: Mapping[int, Routing],
    own_noise: RoutingNoise,
    noise: RoutingNoise,
    real_T: Tensor,
    dtype: torch.dtype,
) -> Iterator[Finding]:
    """One micro-batch: per layer, the largest margin by which an expert was preferred wrongly.

    Args:
        chosen: experts [T, K] by layer.   truth: the law's biased scores, computed on the chosen route.
        own_noise: of this micro-batch's own draws: pictures make some noisier than others.
    """
    floor = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    for layer, said in truth.items():
        index_TK = chosen[layer][real_T]
        repeated_T = (index_TK.sort(-1).values.diff(dim=-1) == 0).any(-1)
        margin_T = margins(said, chosen[layer], real_T).masked_fill(repeated_T, torch.inf)
        allowed = MARGIN_RATIO * max(own_noise.level(layer), noise.level(layer), floor)
        yield Finding(_name(layer), "choice margin", float(margin_T.max()), allowed, f"token {int(margin_T.argmax())}")


def judge_share(layer: int, flips: int, tokens: int, own_share: float, noise: RoutingNoise) -> Finding:
    """One step: how many of its tokens chose otherwise, against what its own draws and all draws did.

    One token more may always.
    """
    allowed = SHARE_RATIO * max(own_share, noise.share(layer)) + 1 / tokens
    return Finding(_name(layer), "choice share", flips / tokens, allowed)


def _name(layer: int) -> str:
    return f"model.language_model.layers.{layer}.mlp.gate"
