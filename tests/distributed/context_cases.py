"""Sequences over ranks: what every rank holds, puts in and gets out, and what the law says of the whole."""
# Shapes: B batch, S sequence, L places of a rank, N heads, D head dim.

import functools
from itertools import pairwise

import torch
from torch import Tensor

from glmv.config.parallel import ParallelConfig
from glmv.ops.documents import document_ids
from glmv.parallel.context_parallel import ContextParallel, VisibleInPart
from glmv.parallel.mesh import build_meshes
from glmv.parallel.sequence import Degrees, Partition, join
from spec.numerics import attend

HEADS, SHARED, DIM = 4, 2, 16
DEGREES = {"ulysses2": (1, 2), "ring2": (2, 1), "ulysses4": (1, 4), "ring4": (4, 1), "ring2_ulysses2": (2, 2)}
LENGTHS = (1, 3, 7, 16, 37)
# Lengths of padded rows, on the right or on the left, or of packed documents and the padding behind them.
CASES: dict[str, tuple[str, list[int]]] = {
    **{f"length{n}": ("right", [n]) for n in LENGTHS},
    "padded_right": ("right", [16, 7, 1]),
    "padded_left": ("left", [5, 16, 9]),
    "an_empty_row": ("right", [9, 0]),
    "packed": ("packed", [7, 16, 5, 3]),
    "packed_short": ("packed", [1, 1, 2, 1, 3, 0]),
    "packed_equal": ("packed", [5, 5, 5, 8, 8, 2]),
}


def documents_of(case: str) -> Tensor:
    """Document numbers [B, S]."""
    kind, lengths = CASES[case]
    if kind == "packed":
        *documents, padding = lengths
        borders = torch.tensor([0, *documents]).cumsum(0)
        return document_ids(torch.ones(1, sum(lengths)), borders)
    longest = max(lengths)
    fill = [[0] * (longest - n) for n in lengths]
    rows = [[1] * n + pad if kind == "right" else pad + [1] * n for n, pad in zip(lengths, fill)]
    return document_ids(torch.tensor(rows))


def borders_of(case: str) -> list[tuple[int, int]]:
    """First and last place of each packed document."""
    *documents, _ = CASES[case][1]
    return list(pairwise(torch.tensor([0, *documents]).cumsum(0).tolist()))


@functools.cache
def draw(case: str, heads: int, seed: int) -> Tensor:
    """Values [B, heads, S, D] that bf16 can hold, the same on every rank."""
    rows, length = documents_of(case).shape
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, heads, length, DIM, generator=generator, dtype=torch.float64).bfloat16().double()


def inputs(case: str, shared: int = SHARED) -> dict[str, Tensor]:
    """Query, key, value and the gradient that comes back."""
    heads = {"query": HEADS, "key": shared, "value": shared, "grad": HEADS}
    return {name: draw(case, count, seed) for seed, (name, count) in enumerate(heads.items())}


def law_of(case: str, shared: int = SHARED):
    """Causal attention of each document by itself: output and gradients of all tokens; zero at padding."""
    given, document_BS = inputs(case, shared), documents_of(case)
    real_B1S1 = (document_BS >= 0)[:, None, :, None]
    allowed = (document_BS[:, :, None] == document_BS[:, None, :]) & (document_BS >= 0)[:, None, :]
    allowed &= torch.ones(allowed.shape[1:], dtype=torch.bool).tril()

    def law(policy):
        leaves = {name: given[name].to(policy.wide, copy=True).requires_grad_() for name in ("query", "key", "value")}
        query, key, value = (policy.enter(leaf) for leaf in leaves.values())
        key, value = (states.repeat_interleave(HEADS // shared, dim=1) for states in (key, value))
        output = attend(query, key, value, allowed[:, None], DIM**-0.5, policy)
        output.backward(policy.round(given["grad"]) * real_B1S1)
        return {"output": output.detach() * real_B1S1, **{name: leaf.grad for name, leaf in leaves.items()}}

    return law


def context(degrees: str, process) -> ContextParallel:
    """Collective: these ranks in groups of that size."""
    ring, ulysses = DEGREES[degrees]
    config = ParallelConfig(ring_attention_size=ring, ulysses_parallel_size=ulysses)
    return ContextParallel(build_meshes(config, process), merge=2)


def run(own: ContextParallel, case: str, dtype: torch.dtype, kernel: str, shared: int = SHARED) -> dict[str, Tensor]:
    """Collective: this rank's part of output and gradients, [B, L, N, D]."""
    partition = own.partition_of(documents_of(case))
    parts = {name: split_heads(states.to(dtype), partition) for name, states in inputs(case, shared).items()}
    leaves = {name: parts[name].requires_grad_() for name in ("query", "key", "value")}
    output = own.attend(*leaves.values(), VisibleInPart(partition=partition), implementation=kernel)
    output.backward(parts["grad"])
    said = {"output": output, **{name: leaf.grad for name, leaf in leaves.items()}}
    return {name: states.detach().transpose(1, 2) for name, states in said.items()}


def split_heads(states_BNSD: Tensor, partition: Partition) -> Tensor:
    """[B, N, S, D] -> [B, N, L, D] with zeros at padding."""
    return partition.split(states_BNSD.permute(1, 3, 0, 2), 0).permute(2, 0, 3, 1).contiguous()


def whole(parts: list[dict[str, Tensor]], case: str, degrees: Degrees) -> dict[str, Tensor]:
    """What the ranks of a group have, put together under the law's names."""
    partitions = [Partition.of(documents_of(case), degrees, rank) for rank in range(degrees.size)]
    return {name: join([part[name] for part in parts], partitions, 0).transpose(1, 2) for name in parts[0]}
