"""The vision tower's work spread over ranks that share a batch, one attention segment at a time.

A segment is an image, or one temporal patch of a video: nothing in the tower looks from one to another. Each is
computed by one rank, and every rank gets all features. A rank without a segment runs the smallest picture there is,
whose features nobody takes, so that all ranks meet in the tower's collectives.

    segments (patches)   a 24   b 8   c 16   d 4           rank 0: a        rank 1: b c        then d to rank 0 or 1,
                                                           whichever has fewer patches

Going back, each rank has gradients for the features that its own tokens took; they are summed where the feature was
computed. Only one rank holds the token of a feature, so that the sum is exact in any dtype.

A rank sends, with M features of width H on the rank of P that has most of them

    (P - 1) x M x H x element       forward, and the same backward
"""
# Shapes: N patches, P pixels of a patch or ranks, H features' width, M features of all ranks, m of this rank.

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from glmv.model.vision import VisionModel
from glmv.parallel.dispatch import Traffic


class SharedVision:
    """Runs a tower on all ranks of a group that have the same pictures.

    Attributes:
        traffic: what this rank has sent.   segments: which this rank computed last.
    """

    def __init__(self, group: dist.ProcessGroup, merge: int) -> None:
        self.group = group
        self.size = group.size()
        self.rank = group.rank()
        self.merge = merge
        self.traffic = Traffic()
        self.segments: list[int] = []

    def __call__(self, tower: VisionModel, pixel_values_NP: Tensor, grid_thw: Tensor) -> Tensor:
        """Collective: the features of all pictures, in their order.

        Args:
            pixel_values_NP, grid_thw: of all pictures, alike on all ranks; the grids on the host.
        """
        segments = [(h, w) for t, h, w in grid_thw.tolist() for _ in range(t)]
        dealt = deal([h * w for h, w in segments], self.size)
        self.segments = own = dealt[self.rank]
        patches = pixel_values_NP.split([h * w for h, w in segments])
        if own:
            given = torch.cat([patches[n] for n in own]), torch.tensor([[1, *segments[n]] for n in own])
            features_mH = tower(*given)
        else:
            features_mH = tower(*tower.black_picture(pixel_values_NP.device))[:0]
        features = [h * w // self.merge**2 for h, w in segments]
        counts = [sum(features[n] for n in theirs) for theirs in dealt]
        place_M = _places(features, [n for theirs in dealt for n in theirs])
        gathered_MH: Tensor = _Gather.apply(features_mH, self, counts)
        return gathered_MH.index_select(0, place_M.to(gathered_MH.device))

    def gather(self, part_mH: Tensor, longest: int) -> Tensor:
        """Collective: everybody's part, filled up to the longest, [P, longest, H]."""
        whole = part_mH.new_empty(self.size * longest, *part_mH.shape[1:])
        dist.all_gather_single(whole, F.pad(part_mH, (0, 0, 0, longest - len(part_mH))), group=self.group)
        self.traffic.add((self.size - 1) * longest, part_mH)
        return whole.unflatten(0, (self.size, longest))

    def reduce(self, whole_PmH: Tensor) -> Tensor:
        """Collective: the sum over all ranks of this rank's part, [longest, H]."""
        part = whole_PmH.new_empty(whole_PmH.shape[1:])
        dist.reduce_scatter_single(part, whole_PmH.flatten(0, 1), group=self.group)
        self.traffic.add((self.size - 1) * len(part), part)
        return part


def deal(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Which segments each rank computes: the largest first, each to whoever has least; ties go to the lower number."""
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for segment in sorted(range(len(sizes)), key=lambda n: -sizes[n]):
        rank = load.index(min(load))
        dealt[rank].append(segment)
        load[rank] += sizes[segment]
    return [sorted(segments) for segments in dealt]


def _places(sizes: Sequence[int], order: Sequence[int]) -> Tensor:
    """Where each row of all segments stands, if the segments stand in `order`."""
    starts = dict(zip(order, accumulate((sizes[n] for n in order), initial=0), strict=False))
    ranges = [torch.arange(starts[n], starts[n] + size) for n, size in enumerate(sizes)]
    return torch.cat(ranges)


class _Context(FunctionCtx):
    """What the backward pass of `_Gather` needs."""

    vision: SharedVision
    counts: list[int]


class _Gather(torch.autograd.Function):
    """Parts of all ranks one after another; gradients are summed where the part came from."""

    @staticmethod
    def forward(ctx: _Context, part_mH: Tensor, vision: SharedVision, counts: list[int]) -> Tensor:
        ctx.vision, ctx.counts = vision, counts
        whole_PmH = vision.gather(part_mH, max(counts))
        return torch.cat([part[:count] for part, count in zip(whole_PmH, counts, strict=True)])

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor) -> tuple[Tensor, None, None]:
        longest = max(ctx.counts)
        parts = [F.pad(part, (0, 0, 0, longest - len(part))) for part in grads[0].split(ctx.counts)]
        return ctx.vision.reduce(torch.stack(parts))[: ctx.counts[ctx.vision.rank]], None, None
