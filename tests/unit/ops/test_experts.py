import logging

import pytest
import torch
from expert_cases import EXPERTS, HIDDEN, INNER, ROUTINGS, make_case, poison
from op_cases import leaf

from glmv.ops import registry
from glmv.ops.experts import Order, combine, expert_mlp, experts
from glmv.ops.kernels import Kernels
from glmv.ops.permute import expert_order

FLOAT64, FP32, BF16 = torch.float64, torch.float32, torch.bfloat16
WAYS = {
    "float64-looped": (FLOAT64, False),
    "fp32-looped": (FP32, False),
    "bf16-looped": (BF16, False),
    "fp32-grouped": (FP32, True),
    "bf16-grouped": (BF16, True),
}


@pytest.fixture(params=WAYS)
def way(request):
    return WAYS[request.param]


@pytest.mark.parametrize("routing", ROUTINGS)
def test_output_and_every_gradient(routing, way, device, judge):
    case, (dtype, grouped) = make_case(routing), way
    poison(device)
    judge(case.machine(dtype, device, Kernels(grouped=grouped)), case.law, dtype)


def test_experts_without_tokens_get_gradients_of_zero(way, device):
    dtype, grouped = way
    poison(device)
    said = make_case("only_last").machine(dtype, device, Kernels(grouped=grouped))
    for expert in range(4):
        for part in ("gate", "up", "down"):
            assert not said[f"mlp.experts.{expert}.{part}_proj.weight"].any()


def test_no_tokens(way, device):
    dtype, grouped = way
    weights = torch.randn(EXPERTS, HIDDEN, 2 * INNER), torch.randn(EXPERTS, INNER, HIDDEN)
    gate_up, down, hidden = (leaf(x, dtype, device) for x in (*weights, torch.zeros(0, HIDDEN)))
    index, weight = torch.zeros(0, 2, dtype=torch.int64, device=device), leaf(torch.zeros(0, 2), FP32, device)
    poison(device)
    output = experts(hidden, index, weight, gate_up, down, Kernels(grouped=grouped))
    output.sum().backward()
    assert output.shape == hidden.grad.shape == (0, HIDDEN)
    assert weight.grad.shape == (0, 2)
    assert gate_up.grad.eq(0).all()
    assert down.grad.eq(0).all()


def test_a_second_run_is_bit_equal(way, device):
    case, (dtype, grouped) = make_case("balanced"), way
    first = case.machine(dtype, device, Kernels(grouped=grouped))
    poison(device)
    second = case.machine(dtype, device, Kernels(grouped=grouped))
    for name, value in first.items():
        assert value.equal(second[name]), name


def backward_twice(way, device, backward):
    """Gradient of gate_up after one and after two rounds of forward and `backward(output)`."""
    case, (dtype, grouped) = make_case("empty_middle"), way
    hidden, gate_up, down = (leaf(x, dtype, device) for x in (case.hidden_TH, case.gate_up_EHF, case.down_EIH))
    index, weight = case.top_k_index_TK.to(device), leaf(case.top_k_weight_TK, FP32, device)
    grads = []
    for _ in range(2):
        backward(experts(hidden, index, weight, gate_up, down, Kernels(grouped=grouped)))
        grads.append(gate_up.grad.clone())
    return grads


def test_a_second_backward_doubles_gradients(way, device):
    once, twice = backward_twice(way, device, lambda output: output.square().sum().backward())
    assert once.any()
    assert twice.equal(2 * once)


def test_an_expanded_gradient_counts_like_a_dense_one(way, device):
    expanded, _ = backward_twice(way, device, lambda output: output.sum().backward())
    dense, _ = backward_twice(way, device, lambda output: output.backward(torch.ones_like(output)))
    assert expanded.equal(dense)


def test_routing_weights_are_not_rounded_to_bf16(device):
    case = make_case("all_experts")
    case.top_k_weight_TK = case.top_k_weight_TK.bfloat16().double()
    before = case.machine(BF16, device, Kernels())["output"]
    case.top_k_weight_TK = case.top_k_weight_TK * (1 + 2**-10)  # bf16 would round this away exactly
    assert not case.machine(BF16, device, Kernels())["output"].equal(before)


def weighted(rows_RH, weight_TK, order_R, inverse_R):
    return combine(rows_RH, weight_TK, Order(inverse_R, order_R), kernels=Kernels())


def test_the_sum_over_experts_is_rounded_once():
    outputs_RH, place_R = torch.tensor([[256.0], [1.0], [1.0], [1.0]], dtype=BF16), torch.arange(4)
    assert weighted(outputs_RH, torch.ones(1, 4), place_R, place_R).item() == 260  # one by one in bf16: 256


def test_combining_rows_in_expert_order_is_combining_them_in_token_order():
    order_R, inverse_R = expert_order(torch.tensor([[1, 0], [0, 1], [1, 2]]))
    # Small integers and quarters: every sum is exact.
    slots_RH = torch.randint(-9, 10, (6, 4)).to(FLOAT64).requires_grad_()
    weight_TK = (torch.randint(1, 8, (3, 2)) / 4).to(FLOAT64).requires_grad_()
    expected_TH = (slots_RH.view(3, 2, 4) * weight_TK[..., None]).sum(1)
    assert weighted(slots_RH[order_R], weight_TK, order_R, inverse_R).equal(expected_TH)
    assert torch.autograd.gradcheck(lambda x, w: weighted(x, w, order_R, inverse_R), (slots_RH, weight_TK))


def chosen(case, dtype, **options):
    rows, gate_up, down = (x.to(dtype) for x in (case.hidden_TH, case.gate_up_EHF, case.down_EIH))
    return expert_mlp.choose(rows, torch.tensor([len(rows)] + [0] * 5), gate_up, down, kernels=Kernels(**options))


@pytest.mark.parametrize(
    ("dtype", "grouped", "name"),
    [(BF16, True, "grouped"), (FP32, True, "grouped"), (FLOAT64, True, "looped"), (BF16, False, "looped")],
)
def test_which_implementation_runs(dtype, grouped, name):
    assert chosen(make_case("balanced"), dtype, grouped=grouped) == name


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_sizes_that_the_kernel_refuses_run_looped_and_say_so_once(dtype, device, judge, caplog):
    registry.say_once.cache_clear()
    case = make_case("balanced")
    case.gate_up_EHF, case.down_EIH = case.gate_up_EHF[:, :, : 2 * 21], case.down_EIH[:, :21]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            judge(case.machine(dtype, device, Kernels()), case.law, dtype)
    assert [record.message for record in caplog.records] == [
        "use_grouped_expert_matmul: a row of 42 elements is no multiple of 16 bytes; "
        "the experts run looped (same result, slower)"
    ]


@pytest.mark.parametrize("grouped", [False, True])
def test_deterministic_algorithms_are_enough(grouped, device):
    torch.use_deterministic_algorithms(True)
    try:
        make_case("balanced").machine(FP32, device, Kernels(grouped=grouped))
    finally:
        torch.use_deterministic_algorithms(False)
