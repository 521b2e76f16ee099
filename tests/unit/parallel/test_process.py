import pytest
import torch
import torch.distributed as dist

from glmv.errors import GlmvError
from glmv.parallel.process import (
    AgreedError,
    LaunchError,
    choose_device,
    current,
    on_all_ranks,
    process_group,
    raise_on_all_ranks,
    read_launch_environment,
)

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}

# What is changed in torchrun's environment, and what the message must name.
WRONG = {
    "no rank": ({"RANK": None}, "RANK"),
    "no world size": ({"WORLD_SIZE": None}, "WORLD_SIZE"),
    "no port": ({"MASTER_PORT": ""}, "MASTER_PORT"),
    "a port that the launcher chose and did not tell": ({"MASTER_PORT": "0"}, "torchrun --standalone"),
    "rank is a word": ({"RANK": "one"}, '"one"'),
    "rank beyond the world": ({"RANK": "2"}, "RANK = 2"),
    "negative local rank": ({"LOCAL_RANK": "-1"}, "LOCAL_RANK = -1"),
    "no ranks at all": ({"WORLD_SIZE": "0"}, "WORLD_SIZE = 0"),
}


@pytest.fixture
def alone(monkeypatch):
    for key in TORCHRUN:
        monkeypatch.delenv(key, raising=False)


def test_torchrun_names_the_rank():
    assert read_launch_environment(TORCHRUN) == (1, 2, 1)


def test_without_torchrun_a_process_is_alone():
    assert read_launch_environment({"PATH": "/bin"}) == (0, 1, 0)


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_environment_is_refused_by_name(case):
    change, named = WRONG[case]
    environ = {key: value for key, value in {**TORCHRUN, **change}.items() if value is not None}
    with pytest.raises(LaunchError, match=named):
        read_launch_environment(environ)


def test_an_unknown_device_is_refused():
    with pytest.raises(LaunchError, match="gpu"):
        choose_device("gpu", 0)


def test_more_local_ranks_than_devices_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(LaunchError, match="--nproc-per-node 2"):
        choose_device("cuda", 2)


def test_a_process_alone_forms_a_group_and_leaves_it(alone):
    with process_group("cpu") as process:
        assert current() is process
        assert dist.get_world_size() == 1
    assert not dist.is_initialized()


def test_the_group_is_left_after_an_error(alone):
    with pytest.raises(ZeroDivisionError), process_group("cpu"):
        _ = 1 / 0
    assert not dist.is_initialized()


def test_a_users_error_reaches_every_rank_as_agreed(alone):
    with process_group("cpu"), pytest.raises(AgreedError, match=r"^no such picture$"), on_all_ranks():
        raise GlmvError("no such picture")


def test_a_bug_keeps_its_own_type(alone):
    with process_group("cpu"), pytest.raises(KeyError), on_all_ranks():
        raise KeyError("a bug")


def test_no_error_is_no_error(alone):
    with process_group("cpu"):
        raise_on_all_ranks(None)
