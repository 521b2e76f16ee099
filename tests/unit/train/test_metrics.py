import json
from datetime import datetime

from glmv.train.metrics import METRICS_FILE, Reporter, StepMetrics, log_line

METRICS = StepMetrics(
    step=7,
    loss=1.25,
    lr=2.5e-5,
    grad_norm=0.98765,
    tokens=321,
    global_batch_size=8,
    consumed_samples=56,
    time_ms=1234.56,
)


def report(directory, *steps, active=True, resumed_at=0, log_interval=1):
    values = vars(METRICS)
    options = {"train_iters": 7, "log_interval": log_interval, "directory": directory, "resumed_at": resumed_at}
    with Reporter(active=active, **options) as reporter:
        for step in steps:
            reporter.report(StepMetrics(**{**values, "step": step}))
        reporter.summary(None)
    return reporter


def test_the_log_line_is_upstreams_byte_for_byte():
    assert log_line(METRICS, 10000, datetime(2026, 1, 2, 3, 4, 5)) == (
        "[2026-01-02 03:04:05] iteration        7/   10000 | consumed samples:           56 | "
        "elapsed time per iteration (ms): 1234.6 | learning rate: 2.500000E-05 | global batch size:     8 | "
        "loss: 1.250000E+00 | grad norm: 0.988 |"
    )


def test_every_step_is_a_line_of_json(tmp_path):
    report(tmp_path / "save", 1, 2)
    lines = [json.loads(line) for line in (tmp_path / "save" / METRICS_FILE).read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0] == {**vars(METRICS), "step": 1}


def test_a_resumed_run_goes_on_in_the_same_file(tmp_path):
    report(tmp_path, 1, 2)
    report(tmp_path, 3, resumed_at=2)
    steps = [json.loads(line)["step"] for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert steps == [1, 2, 3]


def test_a_resumed_run_replaces_the_steps_that_it_repeats(tmp_path):
    report(tmp_path, 1, 2, 3)
    with (tmp_path / METRICS_FILE).open("a") as stream:
        stream.write('{"step": 4, "lo')  # the earlier run was killed here
    report(tmp_path, 2, resumed_at=1)
    steps = [json.loads(line)["step"] for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert steps == [1, 2]


def test_a_new_run_begins_a_new_file(tmp_path):
    report(tmp_path, 1, 2)
    report(tmp_path, 1)
    assert len((tmp_path / METRICS_FILE).read_text().splitlines()) == 1


def test_the_interval_thins_out_lines_and_never_the_last(tmp_path, capsys):
    report(tmp_path, *range(1, 8), log_interval=3)
    lines = [line for line in capsys.readouterr().out.splitlines() if "iteration  " in line]
    assert [int(line.split("iteration")[1].split("/")[0]) for line in lines] == [3, 6, 7]


def test_a_line_is_not_wrapped_or_coloured(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    report(tmp_path, 7)
    assert any(
        line.endswith("| grad norm: 0.988 |") and line.startswith("[20")
        for line in capsys.readouterr().out.splitlines()
    )


def test_other_ranks_print_and_write_nothing(tmp_path, capsys):
    reporter = report(tmp_path / "save", 1, active=False)
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "save").exists()
    assert len(reporter.history) == 1


def test_a_run_that_saves_nothing_writes_no_file_and_still_reports(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    report(None, 1, 2)
    assert list(tmp_path.iterdir()) == []
    said = capsys.readouterr().out
    assert "iteration        2/" in said
    assert "metrics     none (training.save is not set)" in said
