"""The routed experts on an NPU: permutation, grouped matmuls, SwiGLU and weighted sum, against the law."""

import pytest
import torch
from expert_cases import EXPERTS, HIDDEN, INNER, ROUTINGS, drawn_case, make_case, poison
from op_cases import draw, leaf

from glmv.ops.experts import combine, expert_mlp, experts, permute
from glmv.ops.kernels import Kernels

BF16, FP32 = torch.bfloat16, torch.float32
GROUPED, LOOPED, PLAIN = Kernels(), Kernels(grouped=False), Kernels(fused=False)
FUSED_CALLS = {
    "npu_moe_token_permute": 1, "npu_moe_token_permute.backward": 1, "npu_grouped_matmul": 6, "npu_swiglu": 1,
    "npu_swiglu.backward": 1, "npu_moe_token_unpermute": 1, "npu_moe_token_unpermute.backward": 1,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_grouped_output_and_every_gradient(routing, dtype, device, judge):
    case = make_case(routing)
    poison(device)
    judge(case.machine(dtype, device, GROUPED), case.law, dtype)


@pytest.mark.parametrize("kernels", [LOOPED, PLAIN], ids=["looped", "plain"])
@pytest.mark.parametrize("routing", ["balanced", "empty_first", "one_expert"])
def test_other_ways_give_the_same(routing, kernels, device, judge):
    case = make_case(routing)
    judge(case.machine(BF16, device, kernels), case.law, BF16)


def test_one_local_expert(device, judge):
    """As on a rank that shares the experts with as many others."""
    case = drawn_case([[0]] * 5, experts=1, hidden=HIDDEN, inner=INNER, seed=3)
    judge(case.machine(FP32, device, GROUPED), case.law, FP32)


def npu_calls(counted):
    return {name: calls for name, calls in counted.calls.items() if name.startswith("npu_")}


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        (GROUPED, FUSED_CALLS),
        (LOOPED, {n: c for n, c in FUSED_CALLS.items() if "token" in n}),
        (PLAIN, {}),
        (Kernels(grouped=False, fused=False), {}),
    ],
    ids=["grouped", "looped", "plain", "plain looped"],
)
def test_the_switches_choose_the_operators(kernels, expected, device, count):
    with count() as counted:
        make_case("balanced").machine(BF16, device, kernels)
    assert npu_calls(counted) == expected


def test_without_the_fused_operators_the_experts_loop_and_say_so(device, said):
    make_case("balanced").machine(BF16, device, PLAIN)
    assert len([message for message in said() if "PyTorch's grouped kernel does not exist on an NPU" in message]) == 1


def empty_case(device, dtype):
    """Weights that collect gradients, and no token."""
    gate_up, down = (
        leaf(draw(EXPERTS, HIDDEN, 2 * INNER), dtype, device),
        leaf(draw(EXPERTS, INNER, HIDDEN), dtype, device),
    )
    hidden = leaf(torch.zeros(0, HIDDEN), dtype, device)
    return hidden, gate_up, down


@pytest.mark.parametrize("kernels", [GROUPED, LOOPED], ids=["grouped", "looped"])
def test_no_tokens(kernels, device):
    hidden, gate_up, down = empty_case(device, BF16)
    weight = leaf(torch.zeros(0, 2), FP32, device)
    poison(device)
    index = torch.zeros(0, 2, dtype=torch.int64, device=device)
    output = experts(hidden, index, weight, gate_up, down, kernels)
    output.sum().backward()
    assert output.shape == hidden.grad.shape == (0, HIDDEN)
    assert gate_up.grad.eq(0).all()
    assert down.grad.eq(0).all()


def test_no_rows_for_any_local_expert(device):
    """A rank of expert parallelism that receives nothing: exact zeros, and a graph that still reaches it."""
    rows, gate_up, down = empty_case(device, BF16)
    poison(device)
    counts = torch.zeros(EXPERTS, dtype=torch.int64, device=device)
    output = expert_mlp(rows, counts, gate_up, down, kernels=GROUPED)
    output.sum().backward()
    assert rows.grad.shape == (0, HIDDEN)
    assert gate_up.grad.eq(0).all()
    assert down.grad.eq(0).all()


@pytest.mark.parametrize("routing", ["only_last", "empty_first"])
def test_experts_without_tokens_get_gradients_of_zero(routing, device):
    poison(device)
    said, used = make_case(routing).machine(BF16, device, GROUPED), {e for row in ROUTINGS[routing] for e in row}
    for expert in set(range(EXPERTS)) - used:
        for part in ("gate", "up", "down"):
            assert not said[f"mlp.experts.{expert}.{part}_proj.weight"].any()


def test_a_second_run_is_bit_equal(device):
    case = make_case("balanced")
    first = case.machine(BF16, device, GROUPED)
    poison(device)
    second = case.machine(BF16, device, GROUPED)
    assert all(value.equal(second[name]) for name, value in first.items())


def test_frozen_experts_cost_no_weight_gradient(device, count):
    hidden, gate_up, down = (x.requires_grad_(i == 0) for i, x in enumerate(empty_case(device, FP32)))
    hidden = leaf(draw(5, HIDDEN), FP32, device)
    counts = torch.tensor([1, 0, 2, 0, 0, 2], device=device)
    with count() as counted:
        expert_mlp(hidden, counts, gate_up.detach(), down.detach(), kernels=GROUPED).sum().backward()
    assert counted.calls["npu_grouped_matmul"] == 4
    assert hidden.grad.any()


def test_an_expanded_gradient_counts_like_a_dense_one(device):
    grads = []
    for backward in (lambda out: out.sum().backward(), lambda out: out.backward(torch.ones_like(out))):
        rows, gate_up, down = (
            leaf(x, FP32, device) for x in (draw(5, HIDDEN), draw(6, HIDDEN, 80), draw(6, 40, HIDDEN))
        )
        backward(expert_mlp(rows, torch.tensor([1, 0, 2, 0, 0, 2], device=device), gate_up, down, kernels=GROUPED))
        grads.append([x.grad for x in (rows, gate_up, down)])
    assert all(one.equal(other) for one, other in zip(*grads))


def test_routing_weights_are_not_rounded_to_bf16(device):
    index = torch.tensor([[0, 1]], device=device)
    rows, _, order = permute(torch.ones(1, 8, dtype=BF16, device=device), index, 2, kernels=GROUPED)
    weight = torch.tensor([[1 + 2**-10, -1.0]], device=device)
    assert combine(rows, weight, order, kernels=GROUPED).eq(2**-10).all()


def test_no_fp32_copy_of_the_rows_is_kept(device):
    """What autograd keeps of [R, H] has the dtype of the rows."""
    case, kept = make_case("balanced"), []
    hidden = leaf(case.hidden_TH, BF16, device)
    weights = (leaf(x, BF16, device) for x in (case.gate_up_EHF, case.down_EIH))
    routing = case.top_k_index_TK.to(device), case.top_k_weight_TK.to(device, FP32)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        experts(hidden, *routing, *weights, GROUPED)
    large = [x for x in kept if x.numel() >= case.top_k_index_TK.numel() * INNER]
    assert {x.dtype for x in large} == {BF16}


def test_no_host_synchronisation(device, count):
    case = make_case("empty_middle")
    hidden, gate_up, down = (leaf(x, BF16, device) for x in (case.hidden_TH, case.gate_up_EHF, case.down_EIH))
    index, weight = case.top_k_index_TK.to(device), leaf(case.top_k_weight_TK, FP32, device)
    grad = case.grad_TH.to(device, BF16)
    with count() as counted:
        experts(hidden, index, weight, gate_up, down, GROUPED).backward(grad)
    assert counted.sync_causes == {}
