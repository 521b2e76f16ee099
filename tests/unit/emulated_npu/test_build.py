"""The extension is built once, whole or not at all, and says what it lacks."""

import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from glmv.verify.emulated_npu import EmulationError, build

COMPILER = """#!/bin/sh
echo run >> {log}
sleep 0.2
for last; do :; done
echo library > "$last"
"""


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """Sources of its own and an empty cache."""
    directory = tmp_path / "csrc"
    directory.mkdir()
    (directory / "module.cpp").write_text("int main() { return 0 }\n")
    monkeypatch.setattr(build, "SOURCES", directory)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return directory


def test_no_compiler(sources, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(EmulationError, match=r"no g\+\+ on PATH.*Install g\+\+.*or run on a real NPU"):
        build.cached_library()


def test_a_failing_compiler_is_quoted(sources):
    with pytest.raises(EmulationError, match=r"module\.cpp:1:.* error: expected"):
        build.cached_library()


def test_a_failed_build_leaves_nothing_to_load(sources):
    with pytest.raises(EmulationError):
        build.cached_library()
    assert list(build.cache_directory().glob("*.so")) == []


def test_ranks_that_start_together_build_once(sources, tmp_path, monkeypatch):
    compiler, log = tmp_path / "compiler", tmp_path / "log"
    compiler.write_text(COMPILER.format(log=log))
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(compiler))
    with ThreadPoolExecutor(4) as ranks:
        libraries = set(ranks.map(lambda _: build.cached_library(), range(4)))
    assert log.read_text().count("run") == 1
    assert len(libraries) == 1


def test_changed_sources_are_built_anew(sources):
    before = build.cache_directory()
    (sources / "module.cpp").write_text("int main() { return 1; }\n")
    assert build.cache_directory() != before
