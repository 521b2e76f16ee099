"""Ranks that share sequences, all of them threads of this process."""

from queue import SimpleQueue

import torch.distributed as dist

from glmv.parallel.context_parallel import ContextParallel
from glmv.parallel.dispatch import Traffic
from glmv.parallel.ring import Ring
from glmv.parallel.sequence import Degrees
from glmv.parallel.ulysses import Ulysses

Boxes = list[dict[tuple[int, int], SimpleQueue]]


def boxes_of(degrees: Degrees) -> Boxes:
    """By Ulysses rank, then by (ring rank, tag): where its neighbour's messages come to."""
    return [{(r, tag): SimpleQueue() for r in range(degrees.ring) for tag in (0, 1)} for _ in range(degrees.ulysses)]


class Letterbox:
    """What comes to a rank from its neighbour; threads have no point-to-point transport."""

    def __init__(self, box, leaving):
        self.box, self.leaving = box, leaving

    def wait(self):
        return self.box.get(timeout=20)


class ThreadRing(Ring):
    """A ring whose ranks are threads."""

    def __init__(self, rank, size, boxes):
        self.rank, self.size, self.boxes, self.traffic = rank, size, boxes, Traffic()

    def pass_on(self, leaving, tag):
        self.boxes[(self.rank + 1) % self.size, tag].put(leaving.clone())
        self.traffic.bytes += leaving.numel() * leaving.element_size()
        return Letterbox(self.boxes[self.rank, tag], leaving)


class ThreadContext(ContextParallel):
    """Ranks that share a sequence, for attention alone."""

    def __init__(self, degrees: Degrees, rank: int, boxes: Boxes) -> None:
        self.degrees, self.rank, self.partition = degrees, rank, None
        ring_rank, ulysses_rank = degrees.place(rank)
        groups = [dist.new_group([*range(n * degrees.ulysses, (n + 1) * degrees.ulysses)]) for n in range(degrees.ring)]
        self.ulysses = Ulysses(groups[ring_rank]) if degrees.ulysses > 1 else None
        self.ring = ThreadRing(ring_rank, degrees.ring, boxes[ulysses_rank]) if degrees.ring > 1 else None
