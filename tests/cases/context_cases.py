"""Sequences over ranks: what every rank holds, puts in and gets out, and what the law says of the whole."""
# Shapes: B batch, S sequence, L places of a rank, N heads, D head dim.

from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from op_cases import draw
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
        borders = torch.tensor([0, *lengths[:-1]]).cumsum(0)
        return document_ids(torch.ones(1, sum(lengths)), borders)
    longest = max(lengths)
    fill = [[0] * (longest - n) for n in lengths]
    rows = [[1] * n + pad if kind == "right" else pad + [1] * n for n, pad in zip(lengths, fill)]
    return document_ids(torch.tensor(rows))


@st.composite
def documents(draw):
    """Document numbers [B, S] of padded rows, or of one packed row with padding behind it."""
    if draw(st.booleans()):
        masks = st.lists(st.integers(0, 1), min_size=(length := draw(st.integers(1, 12))), max_size=length)
        return document_ids(torch.tensor(draw(st.lists(masks, min_size=1, max_size=3))))
    lengths = torch.tensor([0, *draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))])
    return document_ids(torch.ones(1, int(lengths.sum()) + draw(st.integers(0, 3))), lengths.cumsum(0))


def inputs_of(document_BS: Tensor, shared: int = SHARED) -> dict[str, Tensor]:
    """Query, key, value and the gradient that comes back, [B, N, S, D]: float64 values that bf16 can hold."""
    heads = {"query": HEADS, "key": shared, "value": shared, "grad": HEADS}
    rows, length = document_BS.shape
    return {name: draw(rows, count, length, DIM, seed=seed) for seed, (name, count) in enumerate(heads.items())}


def law_of_documents(document_BS: Tensor, given: dict[str, Tensor]):
    """Causal attention of each document by itself: output and gradients of all tokens; zero at padding."""
    shared = given["key"].shape[1]
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


def law_of(case: str, shared: int = SHARED):
    """`law_of_documents` of one of CASES."""
    document_BS = documents_of(case)
    return law_of_documents(document_BS, inputs_of(document_BS, shared))


def context(degrees: str, process) -> ContextParallel:
    """Collective: these ranks in groups of that size."""
    ring, ulysses = DEGREES[degrees]
    config = ParallelConfig(ring_attention_size=ring, ulysses_parallel_size=ulysses)
    return ContextParallel(build_meshes(config, process), merge=2)


def run_part(
    own: ContextParallel, document_BS: Tensor, given: dict[str, Tensor], dtype: torch.dtype, kernel: str, device="cpu"
) -> dict[str, Tensor]:
    """Collective: this rank's part of output and gradients, [B, L, N, D]."""
    partition = own.partition_of(document_BS)
    parts = {name: split_heads(states.to(dtype).to(device), partition) for name, states in given.items()}
    leaves = {name: parts[name].requires_grad_() for name in ("query", "key", "value")}
    output = own.attend(*leaves.values(), VisibleInPart(partition=partition), implementation=kernel)
    output.backward(parts["grad"])
    said = {"output": output, **{name: leaf.grad for name, leaf in leaves.items()}}
    return {name: states.detach().transpose(1, 2) for name, states in said.items()}


def split_heads(states_BNSD: Tensor, partition: Partition) -> Tensor:
    """[B, N, S, D] -> [B, N, L, D] with zeros at padding."""
    return partition.split(states_BNSD.permute(1, 3, 0, 2), 0).permute(2, 0, 3, 1).contiguous()


def whole_of(parts: Sequence[dict[str, Tensor]], document_BS: Tensor, degrees: Degrees) -> dict[str, Tensor]:
    """What the ranks of a group have, put together under the law's names."""
    partitions = [Partition.of(document_BS, degrees, rank) for rank in range(degrees.size)]
    return {name: join([part[name] for part in parts], partitions, 0).transpose(1, 2) for name in parts[0]}
