"""Reading DCP files that may be damaged, or written to do harm."""

import builtins
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from glmv.checkpoint.dcp import SafeLoadPlanner, SafeReader, TensorReader, alone_is_fine, read_metadata
from glmv.checkpoint.errors import CheckpointError

KEY = "model.lm_head.weight"


class Harm:
    """Pickles as a call that makes a directory."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return builtins.open, (str(self.path), "w")


@pytest.fixture
def release(root_copy):
    return root_copy / "release"


def edit_metadata(release, edit):
    metadata = FileSystemReader(release).read_metadata()
    edit(metadata)
    (release / ".metadata").write_bytes(pickle.dumps(metadata))


def test_metadata_is_what_torch_reads(release):
    theirs = FileSystemReader(release).read_metadata()
    ours = read_metadata(release)
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data


def test_tensors_are_what_torch_reads(release):
    metadata = read_metadata(release)
    theirs = {key: torch.empty(v.size, dtype=v.properties.dtype) for key, v in metadata.state_dict_metadata.items()}
    with alone_is_fine():
        dcp.load(theirs, checkpoint_id=release, no_dist=True)
    reader = TensorReader(release, metadata)
    assert all(torch.equal(reader.read(key), tensor) for key, tensor in theirs.items())


def test_a_pickle_that_calls_something_else_is_refused_before_the_call(release, tmp_path):
    (release / ".metadata").write_bytes(pickle.dumps(Harm(tmp_path / "harm")))
    with pytest.raises(CheckpointError, match=r"\.metadata: names \S*io.open, which no torch checkpoint needs"):
        read_metadata(release)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("content", [b"", b"garbage", pickle.dumps({"a": 1}), pickle.dumps(torch.Size([1]))])
def test_damaged_metadata_is_refused(release, content):
    (release / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata: (is damaged|holds no DCP metadata).* another iteration"):
        read_metadata(release)


def test_truncated_metadata_is_refused(release):
    path = release / ".metadata"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"\.metadata: is damaged"):
        read_metadata(release)


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "a/b"])
def test_metadata_that_leads_out_of_the_checkpoint_is_refused(release, path):
    def lead_out(metadata):
        next(iter(metadata.storage_data.values())).relative_path = path

    edit_metadata(release, lead_out)
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        read_metadata(release)


def storage_file(release):
    storage = read_metadata(release).storage_data
    return release / next(info.relative_path for index, info in storage.items() if index.fqn == KEY)


def test_a_missing_file_is_named_with_the_tensor(release):
    path = storage_file(release)
    path.unlink()
    with pytest.raises(CheckpointError, match=rf"{path.name}: is missing, and {KEY} stands in it"):
        TensorReader(release, read_metadata(release)).read(KEY)


def test_a_truncated_file_is_named_with_the_tensor(release):
    path = storage_file(release)
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(CheckpointError, match=rf"{path.name}: {KEY} is truncated or damaged"):
        TensorReader(release, read_metadata(release)).read(KEY)


def test_a_pickled_object_in_a_tensor_s_place_is_refused(release, tmp_path):
    torch.save(Harm(tmp_path / "harm"), storage_file(release))
    with pytest.raises(CheckpointError, match=f"{KEY} is truncated or damaged"):
        TensorReader(release, read_metadata(release)).read(KEY)
    assert not (tmp_path / "harm").exists()


def test_a_tensor_with_a_missing_part_is_refused(release):
    def lose_a_part(metadata):
        metadata.state_dict_metadata[KEY].chunks.clear()

    edit_metadata(release, lose_a_part)
    with pytest.raises(CheckpointError, match=f"{KEY}: 0 of 46080 elements are stored"):
        TensorReader(release, read_metadata(release)).read(KEY)


def test_pickled_entries_are_never_loaded(tmp_path):
    with alone_is_fine():
        dcp.save({"harm": Harm(tmp_path / "harm")}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    state = {"harm": None}
    reader = SafeReader(tmp_path / "dcp", read_metadata(tmp_path / "dcp"))
    with pytest.raises(dcp.api.CheckpointException, match="harm: is a pickled object"), alone_is_fine():
        dcp.load(state, storage_reader=reader, planner=SafeLoadPlanner(), no_dist=True)
    assert not (tmp_path / "harm").exists()
