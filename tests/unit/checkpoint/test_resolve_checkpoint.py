"""Which checkpoint a root points at."""

import pytest

from glmv.checkpoint.errors import CheckpointError
from glmv.checkpoint.paths import TRACKER, resolve_checkpoint


def test_the_tracker_chooses(root_copy):
    assert resolve_checkpoint(root_copy) == root_copy / "release"
    (root_copy / "release").rename(root_copy / "iter_0000120")
    (root_copy / TRACKER).write_text("120")
    assert resolve_checkpoint(str(root_copy)) == root_copy / "iter_0000120"


def test_one_checkpoint_can_be_named(root):
    assert resolve_checkpoint(root / "release") == root / "release"


@pytest.mark.parametrize("content", ["", "latest", "-1", "1.5", "²", "../release"])
def test_a_tracker_with_other_content_is_refused(root_copy, content):
    (root_copy / TRACKER).write_text(content)
    with pytest.raises(CheckpointError, match=r"latest_.*\.txt: .* neither 'release' nor an iteration. .*: release\."):
        resolve_checkpoint(root_copy)


def test_a_tracker_that_points_nowhere_names_what_there_is(root_copy):
    (root_copy / TRACKER).write_text("9\n")
    with pytest.raises(CheckpointError, match=r"points to iter_0000009, which is not there. .* directory: release\."):
        resolve_checkpoint(root_copy)


def test_a_root_without_tracker_names_what_there_is(root_copy):
    (root_copy / TRACKER).unlink()
    with pytest.raises(CheckpointError, match=r"has no latest_.*: release\."):
        resolve_checkpoint(root_copy)


def test_an_empty_directory_holds_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="holds no complete checkpoint; give another root"):
        resolve_checkpoint(tmp_path)


def test_a_missing_root(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere: does not exist"):
        resolve_checkpoint(tmp_path / "nowhere")


def test_a_hugging_face_directory_is_told_with_the_command(tiny_dir):
    with pytest.raises(CheckpointError, match="Convert it first: glmv convert hf-to-dcp --hf-dir"):
        resolve_checkpoint(tiny_dir)


def test_a_file_is_no_root(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="file: is a file"):
        resolve_checkpoint(tmp_path / "file")
