"""Fused attention against torch's own, in float64; order of statistics; ring attention."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from contract_tools import call, drawn, equal_in_float64, largest, truth

from spec.npu_ops import OPERATORS
from spec.npu_ops.attention_mask import compressed_mask
from spec.npu_ops.cases import edges
from spec.npu_ops.cases.attention import grad_case, lay_out
from spec.npu_ops.cases.draws import Case, Draw

ATTENTION, GRAD = OPERATORS["npu_fusion_attention"].forward, OPERATORS["npu_fusion_attention_grad"].forward
RING = OPERATORS["npu_ring_attention_update"].forward
CAUSAL = {"atten_mask": compressed_mask(), "scale": 0.3}
HEADS, SHARED, WIDTH = 6, 2, 8


def heads(batch, queries, keys, width=WIDTH):
    draw = Draw.seeded(7)
    shapes = ((HEADS, queries), (SHARED, keys), (SHARED, keys))
    return [draw.normal(batch, n, s, width).double() for n, s in shapes]


def allowed(mode, queries, keys):
    """What a query may see, as torch wants it."""
    everything = torch.ones(queries, keys, dtype=torch.bool)
    return everything.tril(0 if mode == 2 else keys - queries)


def torch_attention(q, k, v, mask=None, scale=0.3):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)


@pytest.mark.parametrize("layout", ["BSH", "SBH", "BNSD", "BSND"])
@pytest.mark.parametrize("mode", [2, 3])
@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (4, 7)])
def test_causal_in_every_padded_layout(layout, mode, queries, keys):
    tensors = heads(3, queries, keys)
    expected = lay_out(torch_attention(*tensors, allowed(mode, queries, keys)), layout)
    found = ATTENTION(*(lay_out(x, layout) for x in tensors), HEADS, layout, sparse_mode=mode, **CAUSAL)[0]
    assert equal_in_float64(found, expected)
    assert found.is_contiguous()


def test_modes_2_and_3_differ_where_lengths_do():
    tensors = heads(1, 4, 7)
    left, right = (ATTENTION(*tensors, HEADS, "BNSD", sparse_mode=mode, **CAUSAL)[0] for mode in (2, 3))
    assert not left.equal(right)


@pytest.mark.parametrize("shape", [(5, 7), (1, 1, 5, 7), (3, 1, 5, 7), (3, HEADS, 5, 7)], ids=str)
def test_a_whole_mask_hides_where_it_is_true(shape):
    tensors = heads(3, 5, 7)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.3
    found = ATTENTION(*tensors, HEADS, "BNSD", atten_mask=mask, scale=0.3)[0]
    assert equal_in_float64(found, torch_attention(*tensors, ~mask))
    assert ATTENTION(*tensors, HEADS, "BNSD", atten_mask=mask.to(torch.uint8), scale=0.3)[0].equal(found)


def test_mode_0_adds_a_window():
    tensors = heads(1, 6, 6)
    nothing = torch.zeros(6, 6, dtype=torch.bool)
    window = torch.ones(6, 6, dtype=torch.bool).tril(1).triu(-2)
    found = ATTENTION(*tensors, HEADS, "BNSD", atten_mask=nothing, scale=0.3, pre_tockens=2, next_tockens=1)[0]
    assert equal_in_float64(found, torch_attention(*tensors, window))


def test_a_band_is_counted_from_the_end():
    tensors = heads(1, 4, 7)
    window = torch.ones(4, 7, dtype=torch.bool).tril(4).triu(1)
    found = ATTENTION(*tensors, HEADS, "BNSD", sparse_mode=4, pre_tockens=2, next_tockens=1, **CAUSAL)[0]
    assert equal_in_float64(found, torch_attention(*tensors, window))


def test_scale_is_one_unless_given():
    tensors = heads(2, 5, 5)
    assert equal_in_float64(ATTENTION(*tensors, HEADS, "BNSD")[0], torch_attention(*tensors, scale=1.0))


def test_without_a_mask_windows_are_ignored():
    tensors = heads(2, 5, 5)
    assert ATTENTION(*tensors, HEADS, "BNSD", next_tockens=0)[0].equal(ATTENTION(*tensors, HEADS, "BNSD")[0])


@pytest.mark.parametrize("inner_precise", [0, 2])
def test_rows_that_see_nothing(inner_precise):
    tensors = heads(1, 3, 3)
    mask = torch.tensor([[0, 0, 0], [1, 1, 1], [0, 0, 1]], dtype=torch.bool)
    output, _, total, *_ = ATTENTION(*tensors, HEADS, "BNSD", atten_mask=mask, inner_precise=inner_precise)
    if inner_precise == 2:
        assert not output[:, :, 1].any()
        assert not total[:, :, 1].any()
    else:
        assert output[:, :, 1].isnan().all()
    assert output[:, :, [0, 2]].isfinite().all()


def test_rows_without_keys_in_mode_3_are_zero():
    case = truth(next(case for case in edges("npu_fusion_attention") if case.label == "rows that see nothing"))
    output = call("npu_fusion_attention", case)[0]
    assert not output[:, :, :2].any()
    assert output[:, :, 2:].ne(0).all()


@pytest.mark.parametrize("seed", range(40))
def test_statistics_give_the_probabilities(seed):
    """exp(score - max) / sum adds up to one, and max + log(sum) is logsumexp."""
    draw = Draw.seeded(seed)
    q, k = draw.normal(2, 3, 4, 5).double(), draw.normal(2, 3, 6, 5).double()
    _, maximum, total, *_ = ATTENTION(q, k, k, 3, "BNSD", scale=0.4)
    score = q @ k.mT * 0.4
    assert equal_in_float64(maximum, score.amax(-1)[..., None].expand(-1, -1, -1, 8))
    assert equal_in_float64(maximum + total.log(), score.logsumexp(-1)[..., None].expand(-1, -1, -1, 8))


ENDS = [3, 3, 8, 9]


def packed_heads(tokens=9):
    draw = Draw.seeded(8)
    return [draw.normal(tokens, n, WIDTH).double() for n in (HEADS, SHARED, SHARED)]


def one_by_one(tensors):
    """(output, maximum, sum) of every sequence, from the padded layout."""
    for first, last in pairwise([0, *ENDS]):
        if last > first:
            parts = (x[first:last].transpose(0, 1)[None] for x in tensors)
            output, maximum, total, *_ = ATTENTION(*parts, HEADS, "BNSD", sparse_mode=2, **CAUSAL)
            yield output[0].transpose(0, 1), maximum[0], total[0]


def packed(tensors, **more):
    ends = {"actual_seq_qlen": ENDS, "actual_seq_kvlen": ENDS}
    return ATTENTION(*tensors, HEADS, "TND", sparse_mode=2, **ends, **CAUSAL, **more)


def test_packed_sequences_attend_alone():
    expected = torch.cat([output for output, *_ in one_by_one(packed_heads())])
    assert equal_in_float64(packed(packed_heads())[0], expected)


def test_statistics_lie_sequence_by_sequence():
    tensors = packed_heads()
    for place in (1, 2):
        blocks = [parts[place].flatten() for parts in one_by_one(tensors)]
        assert packed(tensors)[place].flatten().equal(torch.cat(blocks))


def test_statistics_by_token_when_asked():
    tensors = packed_heads()
    for place in (1, 2):
        blocks = [parts[place].transpose(0, 1) for parts in one_by_one(tensors)]
        assert packed(tensors, softmax_layout="TND")[place].equal(torch.cat(blocks))
    assert not packed(tensors)[1].equal(packed(tensors, softmax_layout="TND")[1])


@pytest.mark.parametrize("softmax_layout", ["", "TND"])
def test_the_gradient_reads_the_order_that_the_forward_wrote(softmax_layout):
    tensors, options = packed_heads(), {"actual_seq_qlen": ENDS, "actual_seq_kvlen": ENDS}
    forward = Case((*tensors, HEADS, "TND"), CAUSAL | options | {"sparse_mode": 2, "softmax_layout": softmax_layout})
    output, maximum, total, *_ = call("npu_fusion_attention", forward)
    found = call("npu_fusion_attention_grad", grad_case(forward, output.cos(), output, maximum, total))
    leaves = [x.requires_grad_() for x in tensors]
    mask = torch.block_diag(*(torch.ones(b - a, b - a).tril() for a, b in pairwise([0, *ENDS]) if b > a)).bool()
    whole = torch_attention(*(x.transpose(0, 1)[None] for x in leaves), mask)[0].transpose(0, 1)
    expected = torch.autograd.grad(whole, leaves, output.detach().cos())
    for left, right in zip(found[:3], expected, strict=True):
        assert equal_in_float64(left, right, largest(*expected))


def halves(*tensors):
    """The same queries with the first three keys, and with the others."""
    q, k, v = tensors
    return [(q, k[:, :, :3], v[:, :, :3]), (q, k[:, :, 3:], v[:, :, 3:])]


def merged(blocks):
    """Ring attention in SBH over blocks of keys."""
    parts = []
    for block in blocks:
        output, maximum, total, *_ = ATTENTION(*(lay_out(x, "SBH") for x in block), HEADS, "SBH", scale=0.3)
        parts.append((output, maximum, total))
    return RING(*parts[0], *parts[1])


def test_merged_blocks_are_the_whole():
    tensors = heads(3, 5, 7)
    whole = ATTENTION(*(lay_out(x, "SBH") for x in tensors), HEADS, "SBH", scale=0.3)
    for found, expected in zip(merged(halves(*tensors)), whole[:3], strict=True):
        assert equal_in_float64(found, expected)


def test_gradients_of_blocks_under_merged_statistics_add_up():
    tensors = heads(3, 5, 7)
    output, maximum, total = merged(halves(*tensors))
    options = {"softmax_max": maximum, "softmax_sum": total, "attention_in": output, "scale_value": 0.3}
    parts = [
        GRAD(*(lay_out(x, "SBH") for x in block), output.cos(), HEADS, "SBH", **options) for block in halves(*tensors)
    ]
    found = [parts[0][0] + parts[1][0], *(torch.cat([parts[0][i], parts[1][i]]) for i in (1, 2))]
    leaves = [x.requires_grad_() for x in tensors]
    expected = torch.autograd.grad(lay_out(torch_attention(*leaves), "SBH"), leaves, output.cos())
    for left, right in zip(found, expected, strict=True):
        assert equal_in_float64(left, lay_out(right, "SBH"), largest(*expected))


def test_a_block_alone_does_not_know_the_whole():
    """The gradient uses the statistics that it is given instead of its own."""
    block = [lay_out(x, "SBH") for x in halves(*heads(3, 5, 7))[0]]
    output, maximum, total, *_ = ATTENTION(*block, HEADS, "SBH", scale=0.3)
    own, global_ = (
        GRAD(*block, output, HEADS, "SBH", softmax_max=maximum, softmax_sum=s, attention_in=output)[2]
        for s in (total, 2 * total)
    )
    assert equal_in_float64(global_, own / 2)


@pytest.mark.parametrize("softmax_layout", ["", "TND"])
def test_packed_ring_update_weighs_each_token_by_its_own_statistics(softmax_layout):
    draw = Draw.seeded(9)
    q, *blocks = (draw.normal(9, 2, 64).double() for _ in range(3))
    ends = {"actual_seq_qlen": ENDS, "actual_seq_kvlen": ENDS, "softmax_layout": softmax_layout}
    parts = [ATTENTION(q, k, k, 2, "TND", **ends)[:3] for k in blocks]
    options = {"input_layout": "TND", "input_softmax_layout": softmax_layout}
    output = RING(*parts[0], *parts[1], actual_seq_qlen=torch.tensor([0, *ENDS]), **options)[0]
    both = [torch.cat([x[a:b] for a, b in pairwise([0, *ENDS]) for x in blocks])] * 2
    doubled = {"actual_seq_qlen": ENDS, "actual_seq_kvlen": [2 * end for end in ENDS]}
    assert equal_in_float64(output, ATTENTION(q, *both, 2, "TND", **doubled)[0])


@pytest.mark.parametrize("seed", range(20))
def test_a_ring_update_without_new_weight_changes_nothing(seed):
    case = truth(drawn("npu_ring_attention_update", seed))
    output, maximum, total, other, *_ = case.args
    nothing = (other, torch.full_like(maximum, torch.finfo(torch.float32).min), torch.zeros_like(total))
    for found, expected in zip(RING(output, maximum, total, *nothing, **case.kwargs), case.args, strict=False):
        assert equal_in_float64(found, expected)
