"""A model whose ranks share sequences: loss and every gradient are those of the law on the whole micro-batches."""

from dataclasses import replace

import layouts
import pytest
import torch
from layouts import DTYPES, backward, build, everyone, law_of
from rank_cases import LOSS_TYPES

from glmv.parallel.process import AgreedError, on_all_ranks
from glmv.tiny.make import make_tiny
from glmv.verify.grid import machine
from glmv.verify.grid.batches import law_batch, micro_batch
from glmv.verify.grid.cases import Case
from spec.train import Objective, contribution

# Pictures of different shapes, a video beside pictures, packed documents, padded rows, text alone; one of each step is
# shared by all ranks, or by both ranks of a pair.
BATCHES = {
    "pictures": ["pictures", "wide_picture"],
    "videos": ["video_beside_pictures", "picture"],
    "packed": ["packed", "pictures"],
    "padded_rows": ["mixed_lengths", "text"],
    "one_target": ["one", "three"],
    "nothing_to_learn_beside_pictures": ["masked_picture", "ten"],
}
TWO = {"ulysses2": {"ulysses": 2}, "ring2": {"ring": 2}}
FOUR = {
    "ring4": {"ring": 4},
    "ulysses4": {"ulysses": 4},
    "ring2_ulysses2": {"ring": 2, "ulysses": 2},
    "two_pairs_ring2": {"ring": 2},
    "two_pairs_ulysses2": {"ulysses": 2},
}
WITH_EXPERTS = {"ring2_ep2": {"ring": 2, "ep": 2}, "ulysses2_ep4": {"ulysses": 2, "ep": 4}}


def check(names, process, tiny_dir, judge, dtype="fp64", loss_type="per_token_loss", **layout):
    said = backward(build(tiny_dir, process, dtype=dtype, **layout), names, process, loss_type)
    if process.is_main:
        judge(said, law_of(tiny_dir).of(names, loss_type=loss_type), DTYPES[dtype])


@pytest.mark.world_size(2)
@pytest.mark.parametrize("batches", BATCHES)
@pytest.mark.parametrize("layout", TWO)
def test_two_ranks_share_sequences(layout, batches, process, tiny_dir, judge):
    check(BATCHES[batches], process, tiny_dir, judge, **TWO[layout])


@pytest.mark.world_size(4)
@pytest.mark.parametrize("batches", BATCHES)
@pytest.mark.parametrize("layout", FOUR)
def test_four_ranks_share_sequences(layout, batches, process, tiny_dir, judge):
    check(BATCHES[batches], process, tiny_dir, judge, **FOUR[layout])


@pytest.mark.world_size(4)
@pytest.mark.parametrize("layout", WITH_EXPERTS)
def test_ranks_share_sequences_and_experts(layout, process, tiny_dir, judge):
    check(BATCHES["packed"], process, tiny_dir, judge, **WITH_EXPERTS[layout])


def law_of_label(directory, label):
    """The law of nine text tokens of which one has a label."""

    def law(policy):
        whole, batch = law_of(directory), law_batch("one")
        labels_BS = torch.full_like(batch.input_ids, -100)
        labels_BS[0, label] = batch.input_ids[0, label]
        objective = Objective("per_token_loss", targets=1, micro_batches=1)
        found = contribution(whole.weights, replace(batch, labels=labels_BS), objective, whole.config, policy)
        return {"loss": found.loss, **found.gradients}

    return law


@pytest.mark.world_size(2)
@pytest.mark.parametrize(("layout", "label"), [("ulysses2", 5), ("ring2", 3), ("ring2", 6)])
def test_the_only_label_stands_at_the_start_of_a_part(layout, label, process, tiny_dir, judge, monkeypatch):
    batch = micro_batch("one")
    labels_BS = torch.full_like(batch.labels, -100)
    labels_BS[0, label] = batch.input_ids[0, label]
    monkeypatch.setattr(layouts, "micro_batch", lambda name: replace(batch, labels=labels_BS))
    said = backward(build(tiny_dir, process, **TWO[layout]), ["one"], process)
    if process.is_main:
        judge(said, law_of_label(tiny_dir, label), torch.float64)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("layout", TWO)
def test_without_any_label_loss_and_gradients_are_zeros(layout, process, tiny_dir):
    said = backward(build(tiny_dir, process, **TWO[layout]), ["masked", "masked_picture"], process)
    assert not any(tensor.any() for tensor in said.values())  # NaN counts as something


@pytest.mark.world_size(2)
def test_a_step_without_any_label_is_warned_of_and_is_zero(process, grid_models, shared_dir, monkeypatch, capsys):
    monkeypatch.setattr(machine, "NAMES", ("masked", "masked_picture"))
    case = Case(2, "fsdp", "1x2x1", "none", "r2", "logits", "2", "off", "default", "nothing", "even")
    metrics = machine.run(case, grid_models, shared_dir, process).train_step(2)
    assert (metrics.tokens, metrics.loss, metrics.grad_norm) == (0, 0, 0)
    warned = "warning: step 2: no sample of the global batch has a label to learn" in capsys.readouterr().out
    assert warned == process.is_main


@pytest.mark.world_size(4)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_type_divides_by_what_the_whole_micro_batch_has(loss_type, process, tiny_dir, judge):
    check(BATCHES["packed"], process, tiny_dir, judge, loss_type=loss_type, ring=2)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("kernel", ["eager", "flash"])
@pytest.mark.parametrize("layout", TWO)
def test_every_attention_is_right(layout, kernel, process, tiny_dir, judge):
    check(BATCHES["packed"], process, tiny_dir, judge, kernel=kernel, **TWO[layout])


@pytest.fixture(scope="module")
def six_heads(process, tmp_path_factory):
    text = {"num_attention_heads": 6, "num_key_value_heads": 2}
    return make_tiny(tmp_path_factory.mktemp("heads") / "tiny", config_overrides={"text_config": text})


@pytest.mark.world_size(4)
def test_heads_that_ranks_do_not_divide_are_refused_on_every_rank(process, six_heads):
    with pytest.raises(AgreedError) as caught, on_all_ranks():
        build(six_heads, process, ulysses=4)
    (said,) = set(everyone(str(caught.value)))
    assert said.startswith("parallel.ulysses_parallel_size = 4 does not divide the 6 query heads")


@pytest.mark.world_size(2)
@pytest.mark.parametrize("layout", TWO)
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_exchanges_again(reentrant, layout, process, tiny_dir, judge):
    features = {"recompute": True, "recompute_plan": {"use_reentrant": reentrant}}
    check(BATCHES["pictures"], process, tiny_dir, judge, features=features, **TWO[layout])
