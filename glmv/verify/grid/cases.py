"""Which combinations there are, which of them can work, and a small set in which every pair of choices meets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

AXES: dict[str, tuple[str, ...]] = {
    # fsdp: parameters sharded over all ranks.  hsdp: two copies, each sharded over half of them.
    "shard": ("fsdp", "hsdp"),
    # ep x efsdp x edp: expert-parallel ranks, ranks that shard their experts, copies of both.
    "experts": (),
    # How tokens travel; `balance` is alltoall with copies of hot experts.
    "exchange": ("none", "alltoall", "allgather", "balance"),
    # Which ranks share a sequence: ulysses x ring of them.
    "sequence": ("whole", "u2", "r2", "r4", "u2r2"),
    # The loss over whole logits, or over chunks of tokens.
    "head": ("logits", "chunks", "dynamic"),
    "accumulate": ("1", "2"),
    "recompute": ("off", "on", "reentrant"),
    "loss": ("per_token_loss", "default", "per_sample_loss", "raw"),
    "freeze": ("nothing", "vision", "embedding", "experts"),
    # skewed: all tokens choose among the experts of the first expert-parallel rank of four.
    "routing": ("even", "skewed"),
}
"""Axes and their choices; `layouts` gives those of `experts`, which depend on the number of ranks."""
NAMED = {"exchange": ("mc2",)}
"""Choices that only a case asked for by its id makes: no set has them, because an NPU alone computes them, in bf16."""
SEQUENCES = {"whole": (1, 1), "u2": (2, 1), "r2": (1, 2), "r4": (1, 4), "u2r2": (2, 2)}
"""Ulysses and ring degree of each choice of `sequence`."""


@dataclass(frozen=True)
class Case:
    """One choice of every axis; `dtype` is what the machine computes in."""

    ranks: int
    shard: str
    experts: str
    exchange: str
    sequence: str
    head: str
    accumulate: str
    recompute: str
    loss: str
    freeze: str
    routing: str
    dtype: str = "fp64"

    @property
    def id(self) -> str:
        """`4-fsdp-2x2x1-alltoall-whole-logits-...-fp64`."""
        return "-".join(str(getattr(self, field.name)) for field in fields(self))

    @classmethod
    def from_id(cls, text: str) -> Case:
        """The case of this id.

        Raises:
            ValueError: it isn't one.
        """
        ranks, *names = text.split("-")
        if not ranks.isdigit() or len(names) != len(fields(cls)) - 1 or (case := cls(int(ranks), *names)).fault:
            raise ValueError(f"{text} names no case of the grid")
        return case

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(ep, efsdp, edp)."""
        ep, efsdp, edp = map(int, self.experts.split("x"))
        return ep, efsdp, edp

    @property
    def shards(self) -> int:
        """Ranks that share one copy of the parameters."""
        return _shards(self.shard, self.ranks)

    @property
    def degrees(self) -> tuple[int, int]:
        """(ulysses, ring): ranks that share a sequence."""
        return SEQUENCES[self.sequence]

    @property
    def data_ranks(self) -> int:
        """Ranks, or groups that share sequences, with micro-batches of their own."""
        return self.ranks // math.prod(self.degrees)

    @property
    def fault(self) -> str:
        """Why this combination cannot be, or ""."""
        for name, choices in axes(self.ranks).items():
            if getattr(self, name) not in (known := (*choices, *NAMED.get(name, ()))):
                return f"{name} = {getattr(self, name)} is none of {', '.join(known)}"
        if self.exchange == "mc2" and self.dtype != "bf16":
            return f"mc2 computes in bf16, not in {self.dtype}"
        return "" if _fits(vars(self), self.ranks) else "these choices exclude each other"


def layouts(ranks: int) -> tuple[str, ...]:
    """All ways to lay out experts over this many ranks, as ep x efsdp x edp; at most four expert-parallel ranks."""
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    return tuple(f"{ep}x{n}x{ranks // ep // n}" for ep in divisors if ep <= 4 for n in divisors if ranks // ep % n == 0)


def axes(ranks: int) -> dict[str, tuple[str, ...]]:
    """`AXES` for this many ranks; one rank has nobody to share with."""
    alone = {"shard": ("fsdp",), "exchange": ("none",)} if ranks == 1 else {}
    sequences = tuple(name for name in AXES["sequence"] if ranks % math.prod(SEQUENCES[name]) == 0)
    return AXES | {"experts": layouts(ranks), "sequence": sequences} | alone


def every(ranks: int, dtype: str = "fp64") -> Iterator[Case]:
    """All combinations that can be."""
    for choice in itertools.product(*axes(ranks).values()):
        case = Case(ranks, **dict(zip(AXES, choice, strict=True)), dtype=dtype)
        if not case.fault:
            yield case


ANCHORS = (
    "4-fsdp-2x2x1-alltoall-whole-logits-2-off-per_token_loss-nothing-even-fp64",
    "4-fsdp-4x1x1-balance-whole-logits-1-off-default-nothing-skewed-fp64",
    "4-hsdp-2x1x2-allgather-whole-logits-1-on-per_sample_loss-vision-even-fp64",
    "4-hsdp-1x2x2-none-whole-logits-2-reentrant-raw-embedding-skewed-fp64",
    "4-fsdp-2x2x1-alltoall-u2-logits-1-off-per_token_loss-nothing-even-fp64",
    "4-fsdp-1x1x4-none-r2-logits-1-off-per_token_loss-nothing-even-fp64",
    "4-fsdp-4x1x1-balance-u2r2-logits-2-on-per_sample_loss-nothing-even-fp64",
    "4-fsdp-1x4x1-none-r4-dynamic-2-off-raw-nothing-skewed-fp64",
    "4-fsdp-1x2x2-none-u2-chunks-1-off-default-nothing-even-fp64",
)
"""Cases that stay in the set whatever else does, so that seeded faults can name them."""
Pair = tuple[tuple[str, str], tuple[str, str]]


def pairs(case: Case) -> set[Pair]:
    """Every two choices that meet in a case."""
    return set(itertools.combinations(((name, getattr(case, name)) for name in AXES), 2))


def covering(ranks: int, dtype: str = "fp64") -> list[Case]:
    """Few cases in which every pair of choices that can meet does: greedy, the same in every process.

    Anchors come first. Each further case is begun by the first pair still missing and filled axis by axis with the
    choice that adds most new pairs (Cohen et al., AETG, IEEE TSE 1997).
    """
    possible = axes(ranks)
    missing = _possible_pairs(ranks)
    found = [case for case in map(Case.from_id, ANCHORS) if case.ranks == ranks and case.dtype == dtype]
    met = set().union(*map(pairs, found))
    missing = {pair: None for pair in missing if pair not in met}
    while missing:
        case = _fill(dict(next(iter(missing))), possible, missing, ranks, dtype)
        found.append(case)
        for pair in pairs(case):
            missing.pop(pair, None)
    return found


def _possible_pairs(ranks: int) -> dict[Pair, None]:
    """In a fixed order (a dict, because sets of strings are ordered by a random hash)."""
    wanted: dict[Pair, None] = {}
    possible = axes(ranks)
    for (one, ones), (other, others) in itertools.combinations(possible.items(), 2):
        for pair in itertools.product(ones, others):
            chosen = {one: pair[0], other: pair[1]}
            if _fits(chosen, ranks):
                wanted[((one, pair[0]), (other, pair[1]))] = None
    return wanted


def _shards(shard: str, ranks: int) -> int:
    return ranks if shard == "fsdp" else ranks // 2


def _fits(chosen: Mapping[str, Any], ranks: int) -> bool:
    """Whether a partial choice can be completed.

    Tokens are exchanged where ep > 1 and only there; ranks that share a sequence share one copy of the parameters.
    """
    if chosen.keys() >= {"experts", "exchange"} and chosen["experts"].startswith("1x") != (
        chosen["exchange"] == "none"
    ):
        return False
    if chosen.keys() >= {"shard", "sequence"}:
        return _shards(chosen["shard"], ranks) % math.prod(SEQUENCES[chosen["sequence"]]) == 0
    return True


def _fill(
    chosen: dict[str, str], possible: dict[str, tuple[str, ...]], missing: dict[Pair, None], ranks: int, dtype: str
) -> Case:
    for name, choices in possible.items():
        if name not in chosen:
            fitting = [choice for choice in choices if _fits({**chosen, name: choice}, ranks)]
            chosen[name] = max(fitting, key=lambda choice: _gain(chosen, name, choice, missing))
    return Case(ranks, **chosen, dtype=dtype)


def _gain(chosen: dict[str, str], name: str, choice: str, missing: dict[Pair, None]) -> int:
    mine = (name, choice)
    return sum((mine, other) in missing or (other, mine) in missing for other in chosen.items())


def rounded(cases: Sequence[Case], dtype: str, names: Sequence[str]) -> list[Case]:
    """Of some cases the few that show every choice of these axes once, in another dtype."""
    wanted = {(name, getattr(case, name)) for case in cases for name in names}
    found: list[Case] = []
    for case in cases:
        new = {(name, getattr(case, name)) for name in names} & wanted
        if new:
            wanted -= new
            found.append(replace(case, dtype=dtype))
    return found
