"""Gradients of sharded ranks are those of the law on the union of their batches, whatever the ranks saw."""

import math

import layouts
import pytest
import torch
from fsdp_runs import results_of
from layouts import PATTERNS, POLICIES, build
from rank_cases import CASES, LOSS_CASE, LOSS_TYPES, cases_of

from glmv.verify.grid.batches import micro_batch
from glmv.verify.grid.law import Law
from spec.layout import per_expert

WORLDS = [pytest.param(n, marks=pytest.mark.world_size(n)) for n in (1, 2, 4)]
CASES_OF_WORLDS = [pytest.param(n, case, marks=pytest.mark.world_size(n)) for n in (1, 2, 4) for case in cases_of(n)]
two_ranks = pytest.mark.world_size(2)
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(scope="module")
def law(tiny_dir):
    return Law.read(tiny_dir)


@pytest.fixture(scope="module")
def results(process, tiny_dir):
    return results_of(tiny_dir, process)


@pytest.fixture
def judge(judge, process):
    """All ranks have the same to be judged: one of them does it."""
    return judge if process.is_main else lambda *_: None


def said(result):
    return {"loss": result["loss"], **per_expert(result["gradients"])}


@pytest.mark.parametrize(("nproc", "case"), CASES_OF_WORLDS)
def test_gradients_are_those_of_the_union_in_float64(nproc, case, results, law, judge):
    judge(said(results["fp64", case]), law.of(CASES[case]), torch.float64)


@two_ranks
@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_gradients_are_those_of_the_union_rounded(policy, results, law, judge):
    result = results[policy, "all_different"]
    judge(said(result), law.of(CASES["all_different"], result["choices"]), DTYPES[policy])


@two_ranks
def test_frozen_vision_changes_no_other_gradient(results):
    whole, frozen = (results["fp64", case]["gradients"] for case in ("text_beside_pictures", "frozen_vision"))
    assert {name for name in whole if name not in frozen} == {name for name in whole if "visual" in name}
    assert all(torch.equal(frozen[name], whole[name]) for name in frozen)


@two_ranks
def test_text_alone_gives_the_vision_tower_zero_gradients(results):
    gradients = results["fp64", "text_only"]["gradients"]
    assert not any(g.any() for name, g in gradients.items() if "visual" in name)


@two_ranks
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_each_loss_type_is_the_laws_over_ranks_and_accumulation(loss_type, results, law, judge):
    judge(said(results["fp64", loss_type]), law.of(CASES[LOSS_CASE], loss_type=loss_type), torch.float64)


@two_ranks
@pytest.mark.parametrize("case", ["nothing_to_learn", *(f"nothing_to_learn-{loss_type}" for loss_type in LOSS_TYPES)])
def test_a_batch_without_targets_has_loss_and_gradients_of_exactly_zero(case, results):
    result = results["fp64", case]
    assert result["loss"] == 0
    assert not any(g.any() for g in result["gradients"].values())


@two_ranks
def test_every_parameter_has_a_gradient_in_every_case(results):
    parameters = results["fp64", "all_different"]["gradients"].keys()
    assert all(results["fp64", case]["gradients"].keys() == parameters for case in [*CASES, "nothing_to_learn"])


@pytest.mark.parametrize(("nproc", "case"), [case for case in CASES_OF_WORLDS if case.values[0] > 1])
def test_the_norm_is_bit_equal_on_every_rank(nproc, case, results):
    assert len(set(results["fp64", case]["norms"])) == 1


@pytest.mark.parametrize("nproc", WORLDS)
def test_the_norm_is_that_of_the_whole_gradients(nproc, results):
    result = results["fp64", "all_different"]
    exact = torch.cat([g.flatten() for g in result["gradients"].values()]).norm()
    # One rounding per addition of the two sums at most, in either order.
    roundings = sum(g.numel() for g in result["gradients"].values())
    assert abs(result["norms"][0] - exact) <= roundings * torch.finfo(torch.float64).eps * exact


# Of every shard's norm, of its square, and of the sums: well below what counting a parameter twice would add.
NORM_ROUNDINGS = 32 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("nproc", WORLDS)
def test_each_parameter_counts_once_whatever_its_mesh(nproc, results):
    seen = results["meshes"]
    exact = seen["squares"] ** 0.5
    assert len(set(seen[2.0])) == 1
    assert abs(seen[2.0][0] - exact) <= NORM_ROUNDINGS * exact
    assert set(seen[math.inf]) == {7.0}


@pytest.mark.parametrize("nproc", WORLDS)
def test_clipping_scales_every_mesh_alike(nproc, results):
    clipped = results["meshes"]["clipped"]
    assert len(set(clipped)) == 1
    assert abs(clipped[0] - 1) <= NORM_ROUNDINGS


@pytest.mark.parametrize("nproc", WORLDS[1:])
def test_a_bad_value_on_one_rank_is_seen_on_every_rank(nproc, results):
    assert not any(math.isfinite(norm) for rank in results["meshes"]["nan"] for norm in rank)


@two_ranks
def test_mixed_precision_rounds_where_it_should(results):
    assert results["dtypes"] == {
        "vision_cos": "float32",
        "vision_weight": "bfloat16",
        "router_weight": "float32",
        "routing_weight": "float32",
        "experts_weight": "bfloat16",
        "correction_bias": "float32",
        "master": "float32",
        "gradient": "float32",
    }


UNITS = {"by_layer": PATTERNS, "finer": [*PATTERNS, "*.self_attn", "*.attn", "*.mlp"], "model": []}


@two_ranks
@pytest.mark.parametrize("units", UNITS)
def test_logits_may_be_asked_for_in_another_format_whatever_the_units(units, process, tiny_dir, monkeypatch):
    def logits(**policy):
        monkeypatch.setattr(layouts, "PATTERNS", UNITS[units])
        monkeypatch.setitem(layouts.POLICIES, "bf16", POLICIES["bf16"] | policy)
        return build(tiny_dir, process, dtype="bf16")(**micro_batch("picture").model_inputs())

    plain, asked = logits(), logits(output_dtype="fp32")
    assert (plain.dtype, asked.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(asked, plain.float())
