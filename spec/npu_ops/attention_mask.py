"""Which pairs of query and key fused attention leaves out, by sparse mode."""

# Shapes: Q queries, K keys of one block.

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from spec.npu_ops.contract import Call
from spec.npu_ops.refuse import check_dtype, refuse_if

FULL, CAUSAL_LEFT_UP, CAUSAL_RIGHT_DOWN, BAND = 0, 2, 3, 4
NAMES = {1: "allMask", 5: "prefix", 6: "prefixCompress", 7: "rightDownCausalBand", 8: "bandLeftUpCausal"}
SIDE = 2048


def masked_pairs(call: Call, queries: int, keys: int) -> Tensor | None:
    """True where a query must not see a key, broadcastable to [B, N, Q, K]; None when it sees all.

    Without `atten_mask` the device ignores sparse_mode, pre_tockens and next_tockens.
    Mode 0 adds a window to the given mask: key j is seen from query i if i - pre <= j <= i + next.
    Modes 2, 3 and 4 are formulas; the compressed 2048 x 2048 triangle only carries their pattern. Mode 2 lines up the
    first query with the first key, mode 3 and 4 the last with the last.
    """
    if call.atten_mask is None:
        return None
    shift = 0 if call.sparse_mode in (FULL, CAUSAL_LEFT_UP) else keys - queries
    # By how much key j stands ahead of query i.
    ahead_QK = torch.arange(keys)[None] - torch.arange(queries)[:, None] - shift
    if call.sparse_mode in (CAUSAL_LEFT_UP, CAUSAL_RIGHT_DOWN):
        return ahead_QK > 0
    outside_QK = (ahead_QK > call.next_tockens) | (ahead_QK < -call.pre_tockens)
    return outside_QK if call.sparse_mode == BAND else outside_QK | call.atten_mask[..., :queries, :keys].bool()


def blind_rows_are_zero(call: Call, queries: int, keys: int) -> bool:
    """Whether rows that see nothing are handled; otherwise, and with TND always, nothing is promised (NaN here)."""
    handled = call.inner_precise == 2 or (call.sparse_mode == CAUSAL_RIGHT_DOWN and queries > keys)
    return handled and call.input_layout != "TND"


def refuse_mask(call: Call, batch: int, queries: int, keys: int) -> None:
    """A mask of the wrong kind for its mode.

    Args:
        queries, keys: sizes of the block, with TND of the longest sequence.
    """
    mode, mask = call.sparse_mode, call.atten_mask
    refuse_if(mode in NAMES, f"sparse_mode {mode} ({NAMES.get(mode)}) is not described by this contract")
    refuse_if(mode not in (0, 2, 3, 4), f"sparse_mode must be 0 to 8, but got {mode}")
    if mask is None:
        refuse_if(mode != FULL, f"sparse_mode {mode} needs atten_mask: without it nothing is masked at all")
        return
    check_dtype("atten_mask", mask, (torch.bool, torch.uint8))
    if mode == FULL:
        shapes: list[tuple[int, ...]] = [(queries, keys)]
        if call.input_layout != "TND":
            shapes += [(b, n, queries, keys) for b, n in ((batch, call.head_num), (batch, 1), (1, 1))]
        fits = tuple(mask.shape) in shapes
        refuse_if(not fits, f"atten_mask {tuple(mask.shape)} must be one of {shapes} in sparse_mode 0")
        return
    shape = tuple(mask.shape)
    refuse_if(shape != (SIDE, SIDE), f"sparse_mode {mode} takes the compressed {SIDE}x{SIDE} atten_mask, got {shape}")
    refuse_if(
        not mask.bool().equal(compressed_mask()),
        f"sparse_mode {mode} takes an atten_mask that is True strictly above the diagonal and nowhere else",
    )


@lru_cache(maxsize=1)
def compressed_mask() -> Tensor:
    """The bool triangle of modes 2, 3 and 4: True (masked) above the diagonal."""
    return torch.ones(SIDE, SIDE, dtype=torch.bool).triu(diagonal=1)
