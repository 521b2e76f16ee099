"""Failures that others reported of mixtures of experts and of packed attention, tried on an NPU.

F01 counts, F02 rows behind the last expert, F03 empty experts, F04 experts that a rank does not use, F05 and F06 the
router's gradient, F07 the order of its steps, F08 determinism, F22 three rows of positions that pass for packing.
"""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from expert_cases import HIDDEN, make_case, poison
from model_cases import answers, make_batch, run
from op_cases import draw, leaf
from torch.distributed.fsdp import fully_shard

from glmv.model import Glm4vMoeForConditionalGeneration
from glmv.model.moe import Router
from glmv.ops.experts import combine, expert_mlp, permute
from glmv.ops.kernels import Kernels
from glmv.ops.permute import count_tokens
from spec import layout
from spec.npu_ops import OPERATORS
from spec.numerics import Policy
from spec.router import route

BF16, FP32 = torch.bfloat16, torch.float32
FUSED = Kernels(attention="flash")


@pytest.mark.parametrize("experts", [2, 8, 128, 160])
def test_f01_counts(experts, device):
    index_TK = torch.randint(experts, (37, 2), generator=torch.Generator().manual_seed(experts))
    for index in (index_TK, index_TK[:0], torch.full((5, 1), experts - 1)):
        counts = count_tokens(index.to(device), experts)
        assert counts.dtype == torch.int64
        assert counts.cpu().equal(torch.bincount(index.flatten(), minlength=experts))


def test_f01_counts_under_deterministic_algorithms(device):
    torch.use_deterministic_algorithms(True)
    try:
        assert count_tokens(torch.tensor([[1, 3], [3, 0]], device=device), 4).tolist() == [1, 1, 0, 2]
    finally:
        torch.use_deterministic_algorithms(False)


def test_f02_a_second_step_in_dirty_memory_is_finite_and_the_same(device):
    steps = []
    for _ in range(2):
        poison(device)
        steps.append(make_case("empty_last").machine(BF16, device, FUSED))
    assert all(value.isfinite().all() for value in steps[1].values())
    assert all(value.equal(steps[1][name]) for name, value in steps[0].items())


def test_f03_uneven_splits_with_empty_experts(device):
    rows, gate_up, down = draw(44, HIDDEN), draw(6, HIDDEN, 80) / 8, draw(6, 40, HIDDEN) / 8
    rows, gate_up, down = (leaf(x, BF16, device) for x in (rows, gate_up, down))
    poison(device, gate_up.shape, down.shape)
    counts = torch.tensor([10, 0, 27, 5, 0, 2], device=device)
    expert_mlp(rows, counts, gate_up, down, kernels=FUSED).sum().backward()
    for weight in (gate_up, down):
        assert [bool(grad.any()) for grad in weight.grad] == [True, False, True, True, False, True]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("kernels", [FUSED, Kernels(grouped=False)], ids=["grouped", "looped"])
def test_f04_ranks_that_use_disjoint_experts_end_the_step(kernels, tiny, device, process):
    model = tiny.model(FP32, device, kernels)
    for layer in model.model.language_model.layers:
        if hasattr(layer.mlp, "gate"):  # scores lie between 0 and 1
            half = layer.mlp.gate.e_score_correction_bias.view(2, -1)
            half[process.rank] += 4
        fully_shard(layer)
    fully_shard(model)
    for _ in range(3):
        model.zero_grad()
        logits = run(model, make_batch("text", seed=process.rank))
        logits.float().square().mean().backward()
    dist.barrier()
    grads = [p.grad.to_local() for n, p in model.named_parameters() if "experts." in n]
    assert all(grad.isfinite().all() for grad in grads)
    assert all(p.grad is not None for n, p in model.named_parameters() if "experts" in n)


def test_f05_slots_without_weight_get_their_own_gradient_and_no_other(device):
    """A slot's gradient is its row against the output's gradient, whatever weights the other slots have."""
    index = torch.tensor([[0, 1], [1, 0]], device=device)
    rows, _, order = permute(draw(2, 8).to(device, FP32), index, 2, kernels=FUSED)
    grads = []
    for values in ([[0.0, 0.5], [0.25, 0.0]], [[0.75, 0.5], [0.25, 1.0]]):
        weight = torch.tensor(values, device=device).requires_grad_()
        combine(rows, weight, order, kernels=FUSED).sum().backward()
        grads.append(weight.grad)
    assert grads[0].equal(grads[1])
    assert grads[0].all()


@pytest.mark.parametrize("top_k", [1, 2])
def test_f06_normalised_weights_of_one_expert_teach_the_router_nothing(top_k, tiny, device):
    """w / w is 1 whatever w is: at K = 1 the truth is a gradient of zero, and what is left of it is rounding."""
    config = tiny.config.model_copy(update={"text": tiny.config.text.model_copy(update={"num_experts_per_tok": top_k})})
    model = Glm4vMoeForConditionalGeneration(config, FUSED)
    model.load_state_dict(layout.stacked(tiny.weights))
    said, _ = answers(model.to(device), make_batch("text"))
    gate = max(value.abs().max() for name, value in said.items() if name.endswith("mlp.gate.weight"))
    others = max(value.abs().max() for name, value in said.items() if name.endswith("shared_experts.up_proj.weight"))
    assert bool(gate > torch.finfo(FP32).eps * others) is (top_k > 1)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("groups", [1, 2])
def test_f07_bias_selection_normalisation_and_scale(norm, scale, groups, tiny, device, judge):
    changes = {"norm_topk_prob": norm, "routed_scaling_factor": scale, "n_group": groups, "topk_group": 1}
    text, law_text = tiny.config.text.model_copy(update=changes), dataclasses.replace(tiny.law_config.text, **changes)
    experts, size = text.n_routed_experts, text.hidden_size
    hidden, weight, bias = draw(9, size), draw(experts, size, seed=1) / 8, draw(experts, seed=2)
    router = Router(text)
    router.load_state_dict({"weight": weight, "e_score_correction_bias": bias})
    index, said = router.to(device)(hidden.to(device, FP32))

    def law(policy):
        return {"weight": route(policy.enter(hidden), weight, bias, law_text, policy, index.cpu()).top_k_weight_TK}

    chosen = route(hidden, weight, bias, law_text, Policy()).top_k_index_TK
    assert index.cpu().sort(-1).values.equal(chosen.sort(-1).values)
    judge({"weight": said}, law, FP32)


def test_f08_ten_runs_are_bit_equal(device):
    case = make_case("balanced")
    first = case.machine(BF16, device, FUSED)
    for _ in range(9):
        again = case.machine(BF16, device, FUSED)
        assert all(value.equal(again[name]) for name, value in first.items())


def attention_calls(counted):
    """Arguments of every fused attention, by name."""
    operator = OPERATORS["npu_fusion_attention"]
    calls = [call for call in counted.recorded if call.name == operator.name]
    return [vars(operator.bind(call.args, call.kwargs)) for call in calls]


def test_f22_positions_never_reach_attention(tiny, device, count):
    """[3, 1, S] position ids are no sign of packing: the call has no lengths, and the causal mask."""
    with count(record=True) as counted, torch.no_grad():
        run(tiny.model(BF16, device, FUSED), make_batch("images_adjacent"))
    text = [call for call in attention_calls(counted) if call["sparse_mode"] == 3]
    assert len(text) == tiny.config.text.num_hidden_layers
    assert all(call["input_layout"] == "BNSD" and call["actual_seq_qlen"] is None for call in text)


@pytest.mark.parametrize("case", ["packed", "packed_equal_lengths_and_padding"])
def test_f22_lengths_end_at_the_last_token_of_the_documents(case, tiny, device, count):
    batch = make_batch(case)
    with count(record=True) as counted, torch.no_grad():
        run(tiny.model(BF16, device, FUSED), batch)
    ends = batch.document_ids[batch.document_ids >= 0].bincount().cumsum(0).tolist()
    text = [call for call in attention_calls(counted) if call["sparse_mode"] == 3]
    assert len(text) == tiny.config.text.num_hidden_layers
    assert all(call["actual_seq_qlen"] == call["actual_seq_kvlen"] == ends for call in text)
    assert all(call["query"].shape[0] == ends[-1] for call in text)
