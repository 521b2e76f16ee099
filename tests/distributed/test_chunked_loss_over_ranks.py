"""The loss in chunks over FSDP2: the law's, whatever unit the head's weight is in, and no rank ever has all logits."""

from itertools import chain

import layouts
import pytest
import torch
from layouts import DTYPES, PATTERNS, backward, build, everyone, law_of, of_trained, trained_names, watch_choices
from rank_cases import CASES, LOSS_CASE, NOTHING_TO_LEARN
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from glmv.config.features import FeaturesConfig
from glmv.ops.loss import count_targets
from glmv.train.build import chunk_size_of
from glmv.verify.grid import machine
from glmv.verify.grid.batches import micro_batch
from glmv.verify.grid.cases import Case
from spec.loss import LOSS_TYPES

STATIC = {"enable_chunk_loss": True, "chunkloss_plan": {"chunk_size": 5}}
DYNAMIC = {"enable_dynamic_chunk_loss": True, "chunkloss_plan": {"total_chunk_size": 7}}
KINDS = {"static": STATIC, "dynamic": DYNAMIC}
DIFFERENT = CASES["all_different"]
VOCABULARY = 640


def step(directory, process, names=DIFFERENT, features=STATIC, loss_type="per_token_loss", **options):
    """Collective: loss and gradients of a step, the model, and the experts chosen by micro-batch."""
    model = build(directory, process, features=features, **options)
    choices = watch_choices(model)
    said = backward(model, names, process, loss_type, chunk_size_of(FeaturesConfig(**features)))
    return said, model, [*chain(*everyone(choices))]


@pytest.fixture
def judge(judge, process):
    """All ranks have the same to be judged: one of them does it."""
    return judge if process.is_main else lambda *_: None


@pytest.mark.world_size(2)
@pytest.mark.parametrize(("kind", "loss_type"), [*(("static", each) for each in LOSS_TYPES), ("dynamic", "default")])
def test_two_ranks_that_accumulate_compute_the_law(kind, loss_type, process, tiny_dir, judge):
    said, *_ = step(tiny_dir, process, CASES[LOSS_CASE], KINDS[kind], loss_type)
    judge(said, law_of(tiny_dir).of(CASES[LOSS_CASE], loss_type=loss_type), torch.float64)


@pytest.mark.parametrize("nproc", [pytest.param(n, marks=pytest.mark.world_size(n)) for n in (1, 4)])
def test_other_numbers_of_ranks_compute_the_law(nproc, process, tiny_dir, judge):
    said, *_ = step(tiny_dir, process, CASES["masked_ranks"])
    judge(said, law_of(tiny_dir).of(CASES["masked_ranks"]), torch.float64)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_rounded(dtype, process, tiny_dir, judge):
    said, _, choices = step(tiny_dir, process, dtype=dtype)
    judge(said, law_of(tiny_dir).of(DIFFERENT, choices), DTYPES[dtype])


@pytest.mark.world_size(2)
def test_mixed_precision_does_not_round_the_shares(process, tiny_dir):
    model, given = build(tiny_dir, process, dtype="bf16", features=STATIC), []
    model.lm_head.register_forward_pre_hook(lambda _, args: given.append(args[1].share_BS))
    backward(model, DIFFERENT, process, chunk_size=chunk_size_of(FeaturesConfig(**STATIC)))
    targets = sum(int(count_targets(micro_batch(name).labels)) for name in DIFFERENT)
    assert [share.max().item() for share in given] == [1 / targets] * 2


@pytest.mark.world_size(2)
def test_a_head_in_the_models_own_unit(process, tiny_dir, judge, monkeypatch):
    monkeypatch.setattr(layouts, "PATTERNS", [name for name in PATTERNS if name != "lm_head"])
    said, *_ = step(tiny_dir, process)
    judge(said, law_of(tiny_dir).of(DIFFERENT), torch.float64)


@pytest.mark.world_size(2)
def test_the_output_dtype_does_not_round_the_loss(process, tiny_dir, monkeypatch):
    plain, *_ = step(tiny_dir, process, dtype="bf16")
    monkeypatch.setitem(layouts.POLICIES, "bf16", layouts.POLICIES["bf16"] | {"output_dtype": "bf16"})
    said, *_ = step(tiny_dir, process, dtype="bf16")
    assert said["loss"].equal(plain["loss"])


@pytest.mark.world_size(2)
def test_a_frozen_head_gets_no_gradient_and_passes_one_on(process, tiny_dir, judge):
    said, model, _ = step(tiny_dir, process, frozen=["lm_head"])
    assert model.lm_head.weight.grad is None
    assert said.keys() - {"loss"} == trained_names(model)
    judge(said, of_trained(law_of(tiny_dir).of(DIFFERENT), said), torch.float64)


@pytest.mark.world_size(2)
def test_a_head_that_is_trained_alone(process, tiny_dir, judge):
    said, *_ = step(tiny_dir, process, frozen=["model"])
    assert said.keys() == {"loss", "lm_head.weight"}
    judge(said, of_trained(law_of(tiny_dir).of(DIFFERENT), said), torch.float64)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_learn_is_zero_with_zero_gradients(kind, process, tiny_dir):
    said, model, _ = step(tiny_dir, process, NOTHING_TO_LEARN, KINDS[kind])
    assert said.keys() - {"loss"} == trained_names(model)
    assert not any(tensor.any() for tensor in said.values())


@pytest.mark.world_size(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_head(reentrant, process, tiny_dir, judge):
    plan = {"apply_modules": ["model.language_model.layers.{*}", "lm_head"], "use_reentrant": reentrant}
    said, *_ = step(tiny_dir, process, features={**STATIC, "recompute": True, "recompute_plan": plan})
    judge(said, law_of(tiny_dir).of(DIFFERENT), torch.float64)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("shared", [{"ulysses": 2}, {"ring": 2}, {"ulysses": 2, "ring": 2}], ids=str)
def test_ranks_that_share_sequences_compute_the_law(shared, process, tiny_dir, judge):
    said, *_ = step(tiny_dir, process, CASES[LOSS_CASE], **shared)
    judge(said, law_of(tiny_dir).of(CASES[LOSS_CASE]), torch.float64)


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("loss_type", "shared", "kind"),
    [*zip(LOSS_TYPES, ["ring", "ulysses", "ring", "ulysses"], ["static", "dynamic", "dynamic", "static"], strict=True)],
)
def test_every_loss_type_in_chunks_of_shared_sequences(loss_type, shared, kind, process, tiny_dir, judge):
    said, *_ = step(tiny_dir, process, CASES[LOSS_CASE], KINDS[kind], loss_type, **{shared: 2})
    judge(said, law_of(tiny_dir).of(CASES[LOSS_CASE], loss_type=loss_type), torch.float64)


@pytest.mark.world_size(2)
def test_a_frozen_head_of_shared_sequences(process, tiny_dir, judge):
    said, model, _ = step(tiny_dir, process, frozen=["lm_head"], ring=2)
    assert model.lm_head.weight.grad is None
    judge(said, of_trained(law_of(tiny_dir).of(DIFFERENT), said), torch.float64)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("shared", ["ring", "ulysses"])
def test_parts_whose_chunks_have_nothing_to_learn(shared, process, tiny_dir, judge):
    """Three of nine tokens have targets, all of them on one rank; then none of eight."""
    names = ["three", "masked"]
    said, *_ = step(tiny_dir, process, names, **{shared: 2})
    judge(said, law_of(tiny_dir).of(names), torch.float64)


class LogitRows(TorchDispatchMode):
    """The most tokens that any result had logits, or anything else as wide, for."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view:  # the head's weight, transposed
            made = [leaf for leaf in tree_leaves(result) if torch.is_tensor(leaf) and leaf.shape[-1:] == (VOCABULARY,)]
            self.most = max([self.most, *(tensor.numel() // VOCABULARY for tensor in made)])
        return result


@pytest.mark.world_size(2)
# Each rank has a micro-batch of two rows, one of 24 tokens in all and the other of 38.
@pytest.mark.parametrize(
    ("head", "most"), [("chunks", {10}), ("dynamic", {7}), ("logits", {24, 38})], ids=["static", "dynamic", "whole"]
)
def test_the_trainer_makes_no_more_logits_than_a_chunks(head, most, process, grid_models, shared_dir):
    case = Case(2, "fsdp", "1x1x2", "none", "whole", head, "2", "off", "default", "nothing", "even")
    with LogitRows() as rows:
        machine.run(case, grid_models, shared_dir, process)
    assert set(everyone(rows.most)) == most
