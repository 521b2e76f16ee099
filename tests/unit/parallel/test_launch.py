import signal

import pytest
from processes import eventually, is_running

from glmv.parallel.launch import launch

pytestmark = pytest.mark.multirank


def run(code, timeout_s=240.0):
    head = "import os, pathlib, signal, subprocess, sys, time\nrank = int(os.environ['RANK'])\n"
    return launch(["-c", head + code], nproc=2, timeout_s=timeout_s, grace_s=0.5)


def test_every_rank_runs_and_its_output_is_kept():
    result = run("print('I am', rank, 'of', os.environ['WORLD_SIZE'])")
    assert result.ok
    assert [rank.stdout for rank in result.ranks] == ["I am 0 of 2\n", "I am 1 of 2\n"]


@pytest.mark.parametrize("failing", [0, 1])
def test_the_exit_code_of_any_rank_counts(failing):
    result = run(f"sys.exit(3 if rank == {failing} else 0)")
    assert not result.ok
    assert result.ranks[failing].exit_code == 3


def test_a_killed_rank_is_red_and_takes_the_others_along():
    result = run("os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(3600)")
    assert not result.ok
    assert result.ranks[1].exit_code == -signal.SIGKILL
    assert not result.timed_out


def test_a_launch_that_runs_out_of_time_is_red():
    result = run("time.sleep(3600)", timeout_s=1.0)
    assert result.timed_out
    assert not result.ok


HANGS = """
there = pathlib.Path({there!r})

def stuck_here():
    there.touch()
    time.sleep(3600)

if rank == 1:
    stuck_here()
while not there.exists():
    time.sleep(0.02)
sys.exit(3)
"""


def test_a_hanging_rank_prints_where_it_hangs(tmp_path):
    result = run(HANGS.format(there=str(tmp_path / "there")))
    assert "in stuck_here" in result.ranks[1].stderr


def test_nothing_that_a_rank_started_outlives_the_launch(tmp_path):
    code = f"child = subprocess.Popen(['sleep', '3600'])\nopen(f'{tmp_path}/{{rank}}', 'w').write(str(child.pid))"
    assert run(code).ok
    started = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert len(started) == 2
    assert eventually(lambda: not any(map(is_running, started)))
