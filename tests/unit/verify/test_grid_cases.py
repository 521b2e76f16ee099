import os
import subprocess
import sys

import pytest

from glmv.verify.grid.cases import Case, axes, covering, every, layouts, pairs, rounded

RANKS = (1, 2, 4)


def possible_pairs(ranks):
    """By brute force over all combinations."""
    return set().union(*(pairs(case) for case in every(ranks)))


@pytest.mark.parametrize("ranks", RANKS)
def test_every_pair_that_can_meet_does(ranks):
    assert set().union(*(pairs(case) for case in covering(ranks))) == possible_pairs(ranks)


@pytest.mark.parametrize("ranks", [*RANKS, 8])
def test_no_case_is_impossible(ranks):
    assert [case.id for case in covering(ranks) if case.fault] == []


def test_few_cases_are_enough():
    sizes = sorted((len(choices) for choices in axes(4).values()), reverse=True)
    assert len(covering(4)) <= 1.5 * sizes[0] * sizes[1]


@pytest.mark.parametrize("seed", ["1", "2"])
def test_the_cases_are_the_same_in_every_process(seed):
    code = "from glmv.verify.grid.cases import covering; print(*(case.id for case in covering(4)), sep='\\n')"
    said = subprocess.check_output([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, text=True)
    assert said.split() == [case.id for case in covering(4)]


@pytest.mark.parametrize("ranks", [4, 8])
def test_a_case_is_found_by_its_id(ranks):
    assert [Case.from_id(case.id) for case in covering(ranks)] == covering(ranks)


@pytest.mark.parametrize("id", ["", "4", "4-fsdp", "x" + covering(2)[0].id, covering(2)[0].id + "-more"])
def test_an_id_of_nothing_is_refused(id):
    with pytest.raises(ValueError, match="names no case of the grid"):
        Case.from_id(id)


def test_a_case_that_only_npus_take_is_in_no_set():
    """It is run by its name, in the dtype that the operators have."""
    name = "2-fsdp-2x1x1-mc2-whole-logits-1-off-per_token_loss-nothing-even-bf16"
    assert Case.from_id(name).exchange == "mc2"
    assert all(case.exchange != "mc2" for case in every(2, "bf16"))
    with pytest.raises(ValueError, match="names no case of the grid"):
        Case.from_id(name.replace("bf16", "fp32"))


def test_layouts_use_all_ranks():
    assert all(len(layouts(ranks)) == len({*layouts(ranks)}) for ranks in RANKS)
    for layout in layouts(8):
        ep, efsdp, edp = map(int, layout.split("x"))
        assert ep * efsdp * edp == 8


def test_rounded_shows_every_choice_once_more():
    cases = covering(4)
    for name in ("exchange", "recompute"):
        assert {getattr(case, name) for case in rounded(cases, "bf16", [name])} == {*axes(4)[name]}
    assert {case.dtype for case in rounded(cases, "bf16", ["exchange"])} == {"bf16"}
