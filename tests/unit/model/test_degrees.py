"""How many ranks share a sequence, in which way, and over how many its experts are spread: nothing depends on it.

The machine runs on ranks that are threads, without FSDP, and the sum of what they find is judged by the law.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import Tiny
from thread_cases import ThreadRing, boxes_of
from torch.distributed.tensor import DTensor

from glmv.config.features import FeaturesConfig
from glmv.config.parallel import ParallelConfig
from glmv.data.batch import Batch
from glmv.parallel.context_parallel import apply_context_parallel, context_of
from glmv.parallel.expert_parallel import apply_expert_parallel
from glmv.parallel.mesh import build_meshes
from glmv.parallel.process import Process
from glmv.parallel.sequence import Degrees
from glmv.train.step import accumulate_gradients, global_targets
from glmv.verify.grid.batches import micro_batch
from glmv.verify.grid.law import Law
from glmv.verify.testing.threads import run_ranks
from spec.layout import per_expert
from spec.model import Batch as LawBatch

ROWS = 5
BATCHES = ["packed", "pictures", "video_beside_pictures", "three"]
SHARED = [(1, 1), (2, 1), (1, 2), (4, 1), (1, 4), (2, 2)]
# Ring ranks, Ulysses ranks, and how many of them have different experts. All ranks share one sequence.
layouts = st.sampled_from([(r, u, ep) for r, u in SHARED for ep in (4, 2, 1) if ep <= r * u])


@pytest.fixture(scope="module")
def law(tiny_dir):
    return Law.read(tiny_dir)


def step(tiny: Tiny, batch: Batch, degrees: Degrees, ep: int) -> dict[str, torch.Tensor]:
    """Loss and gradients of a micro-batch that all ranks have."""
    boxes, sizes = boxes_of(degrees), {"ring_attention_size": degrees.ring, "ulysses_parallel_size": degrees.ulysses}
    config = ParallelConfig(expert_parallel_size=ep, **sizes)

    def rank_of(rank):
        model = tiny.model(torch.float64)
        meshes = build_meshes(config, Process(rank, degrees.size, rank, torch.device("cpu")))
        apply_expert_parallel(model, config, FeaturesConfig(), meshes)
        apply_context_parallel(model, config, meshes)
        if degrees.ring > 1:
            ring, ulysses = degrees.place(rank)
            context_of(model).ring = ThreadRing(ring, degrees.ring, boxes[ulysses])
        targets = global_targets([batch], degrees.size)
        loss, _ = accumulate_gradients(model, [batch], targets, torch.device("cpu"))
        return loss, {name: own.grad for name, own in model.named_parameters()}

    losses, parts = zip(*run_ranks(degrees.size, rank_of))
    assert len(set(losses)) == 1
    whole = {name: summed([part[name] for part in parts], ep) for name in parts[0]}
    return {"loss": torch.tensor(losses[0], dtype=torch.float64), **per_expert(whole)}


def summed(grads, ep):
    """All ranks' gradients of a weight; rank r holds part r mod ep of one that is spread."""
    if not isinstance(grads[0], DTensor):
        return torch.stack(grads).sum(0)
    local = [grad.to_local() for grad in grads]
    return torch.cat([torch.stack(local[part::ep]).sum(0) for part in range(ep)])


@settings(max_examples=8)
@given(name=st.sampled_from(BATCHES), layout=layouts)
def test_degrees_change_nothing(tiny, law, judge, name, layout):
    ring, ulysses, ep = layout
    judge(step(tiny, micro_batch(name), Degrees(ring, ulysses), ep), law.of([name]), torch.float64)


@pytest.mark.parametrize(("ring", "ulysses"), [(4, 1), (1, 4), (2, 2)])
def test_a_sequence_of_fewer_tokens_than_ranks(tiny, judge, ring, ulysses):
    """Rows of three tokens, so that at least one rank has none. The mean over their targets."""
    ids = torch.arange(11, 11 + 40 * ROWS * 3, 40).view(ROWS, 3)
    zeros, ones = torch.zeros_like(ids), torch.ones_like(ids)
    law = tiny.law(LawBatch(ids, ones, zeros, labels=ids), {})
    said = step(tiny, Batch(ids, ones, ids, zeros, None, None, ("short",) * ROWS), Degrees(ring, ulysses), 2)
    targets = 2 * ROWS
    judge(said, lambda policy: {name: t / targets for name, t in law(policy).items() if name in said}, torch.float64)
