"""The trainer on two ranks: what it repeats, saves, refuses and stops at."""

import math

import pytest
import torch

from glmv.checkpoint.hf_to_dcp import hf_to_dcp

pytestmark = pytest.mark.multirank
REFUSALS = ["missing picture", "missing shard", "missing checkpoint"]


@pytest.fixture(scope="module")
def seen(ranks, tiny_dir, tmp_path_factory):
    """What each rank reports, by rank."""
    root, work = tmp_path_factory.mktemp("dcp"), tmp_path_factory.mktemp("work")
    hf_to_dcp(tiny_dir, root / "tiny")
    ended = ranks("train_worker.py", tiny_dir, root / "tiny", work, nproc=2, cwd=work)
    assert ended.ok, ended.describe()
    return torch.load(work / "results.pt", weights_only=True)


def test_every_rank_reports_the_same_numbers(seen):
    assert seen[0]["uninterrupted"]["steps"] == seen[1]["uninterrupted"]["steps"]


def test_the_learning_rates_are_those_of_the_schedule(seen):
    # 4 steps from 1e-3 to 1e-4 by a cosine; 10 % of them round to no warm-up.
    steps = seen[0]["uninterrupted"]["steps"]
    assert [lr for _, _, lr, _, _ in steps] == [1e-4 + 9e-4 * (1 + math.cos(math.pi * n / 4)) / 2 for n in range(4)]


def test_ranks_train_on_different_samples(seen):
    steps = zip(*(rank["uninterrupted"]["samples"] for rank in seen), strict=True)
    assert all(set(first).isdisjoint(second) for first, second in steps)


def test_every_trainable_parameter_has_optimizer_state(seen):
    assert [rank["uninterrupted"]["without_state"] for rank in seen] == [0, 0]


def test_computed_buffers_are_right_after_meta_initialisation(seen):
    assert [rank["uninterrupted"]["wrong_buffers"] for rank in seen] == [[], []]
    assert seen[0]["uninterrupted"]["computed_buffers"] == 2


def test_the_config_chooses_the_loss(seen):
    """Micro-batches of two samples, all with unlike numbers of targets."""
    losses = seen[0]["losses"]
    assert losses == seen[1]["losses"]
    assert len(set(losses.values())) == len(losses) == 3


def test_rotary_buffers_are_rounded_when_asked(seen):
    assert [rank["late interval"]["wrong_buffers"] for rank in seen] == [[], []]
    assert seen[0]["late interval"]["rounded_buffers"] == 2


def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(seen):
    for rank in seen:
        assert rank["resumed"]["steps"] == rank["uninterrupted"]["steps"][2:]
        assert rank["resumed"]["weights"] == rank["uninterrupted"]["weights"]


def test_a_resumed_run_obeys_its_own_config(seen):
    assert [rank["resumed with another decay"] for rank in seen] == [[0.5], [0.5]]


@pytest.mark.parametrize(
    ("run", "saved"), [("five steps", [2, 4, 5]), ("late interval", [1]), ("no save", []), ("uninterrupted", [4])]
)
def test_each_checkpoint_is_written_once(run, saved, seen):
    assert [rank[run]["saves"] for rank in seen] == [saved, saved]


@pytest.mark.parametrize("spoil", ["input", "gradient"])
def test_a_step_that_is_not_finite_on_one_rank_is_taken_on_none(spoil, seen):
    for rank in seen:
        assert rank[spoil]["steps_done"] == 1
        assert rank[spoil]["weights_unchanged"]
        assert rank[spoil]["checkpoint_untouched"]


def test_the_stop_names_step_rank_and_samples(seen):
    messages = {rank["input"]["message"] for rank in seen}
    assert len(messages) == 1
    message = messages.pop()
    assert message.startswith("step 2: loss nan")
    assert f"Rank 1's loss is not finite, on {seen[1]['input']['samples'][0]}" in message
    assert "Rank 0's" not in message


def test_the_stop_names_the_gradient(seen):
    assert "1 gradients are not finite, the first is lm_head.weight" in seen[0]["gradient"]["message"]


@pytest.mark.parametrize("case", REFUSALS)
def test_a_fault_on_one_rank_is_the_same_message_on_both(case, seen):
    assert seen[0][case] is not None
    assert seen[0][case] == seen[1][case]
    assert "rank 1" in seen[0][case]


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("missing picture", "missing on rank 1"),
        ("missing shard", "broken"),
        ("missing checkpoint", "missing on rank 1"),
        ("three ranks asked for", "= 1 x 3 = 3 does not divide the number of ranks (WORLD_SIZE = 2)"),
        ("dead pattern", '"model.visul" matches no module'),
        ("no weights", "training.load"),
    ],
)
def test_a_refusal_names_its_cause(case, named, seen):
    assert all(named in rank[case] for rank in seen)
