"""Parts that ranks wrote become whole tensors again, or the reader says what is wrong."""

import json

import pytest
import torch
from safetensors.torch import save_file

from glmv.data import Sample, collate, pack
from glmv.verify.trace import Recorder, Trace, load_whole, save_parts

WHOLE = torch.arange(12.0).reshape(4, 3)


def write(path, part, offset):
    save_file({"w": part.contiguous()}, path, metadata={"places": json.dumps({"w": [[4, 3], offset]})})
    return path


def test_plain_tensors_come_back(tmp_path):
    save_parts({"w": WHOLE, "scalar": torch.tensor(2.0)}, tmp_path / "a")
    found = load_whole([tmp_path / "a"])
    assert found["w"].equal(WHOLE)
    assert found["scalar"] == 2


def test_parts_are_put_in_their_places(tmp_path):
    paths = [write(tmp_path / "b", WHOLE[3:], [3, 0]), write(tmp_path / "a", WHOLE[:3], [0, 0])]
    assert load_whole(paths)["w"].equal(WHOLE)


def test_an_empty_part_holds_nothing(tmp_path):
    paths = [write(tmp_path / "a", WHOLE, [0, 0]), write(tmp_path / "b", WHOLE[:0], [4, 0])]
    assert load_whole(paths)["w"].equal(WHOLE)


def test_a_gap_is_told(tmp_path):
    with pytest.raises(ValueError, match="no rank holds all of w"):
        load_whole([write(tmp_path / "a", WHOLE[:3], [0, 0])])


def test_replicas_that_differ_are_told(tmp_path):
    paths = [write(tmp_path / "a", WHOLE, [0, 0]), write(tmp_path / "b", WHOLE + 1, [0, 0])]
    with pytest.raises(ValueError, match="w differs between ranks"):
        load_whole(paths)


def test_a_micro_batch_comes_back_with_its_videos_and_documents(tmp_path):
    grid = torch.tensor([[1, 2, 2]])
    video = {"pixel_values_videos": torch.ones(4, 6), "video_grid_thw": grid}
    ids = torch.tensor([5, 6, 7])
    samples = [Sample(str(n), ids[:n], ids[:n], ids[:n] * 0, None, None, **video) for n in (2, 3)]
    recorder = Recorder(tmp_path)
    recorder.batches, recorder.choices = [pack(samples, 0, length=7), collate(samples, 0)], [{}, {}]
    recorder._save_inputs(torch.nn.Module(), tmp_path / "input_0001_rank0.safetensors")
    packed, padded = (micro.batch for micro in Trace(tmp_path)._micro_batches(1))
    assert packed.documents.tolist() == [[0, 0, 1, 1, 1, -1, -1]]
    assert padded.document_ids is None
    assert packed.video_grid_thw.equal(torch.cat([grid, grid]))
    assert packed.pixel_values_videos.shape == (8, 6)


def part(places, *experts, ids=(5, 6, 7, 0)):
    """What one of two ranks that share a batch of three tokens and a padded place leaves behind."""
    whole = {"input_ids": torch.tensor([ids]), "attention_mask": torch.tensor([[1, 1, 1, 0]])}
    whole["mm_token_type_ids"] = whole["input_ids"] * 0
    own = {"places": torch.tensor([places]), "group": torch.tensor(0), "experts/2": torch.tensor(experts)}
    return {f"0/{name}": t for name, t in (whole | own).items()}


def read_parts(directory, *parts):
    for rank, tensors in enumerate(parts):
        save_file(tensors, directory / f"input_0001_rank{rank}.safetensors")
    return Trace(directory)._micro_batches(1)


def test_a_shared_micro_batch_comes_back_once_with_the_experts_of_all_parts(tmp_path):
    (micro,) = read_parts(tmp_path, part([2, 0], [8, 9], [4, 5]), part([1, -1], [6, 7], [0, 0]))
    assert micro.experts[2].tolist() == [[4, 5], [6, 7], [8, 9], [0, 1]]


@pytest.mark.parametrize("places", [[1, 0], [-1, -1], [1, 3]], ids=["twice", "never", "padding"])
def test_every_token_is_the_part_of_one_rank(places, tmp_path):
    with pytest.raises(ValueError, match="the part of no rank, of two, or was padding"):
        read_parts(tmp_path, part([2, 0], [8, 9], [4, 5]), part(places, [6, 7], [0, 1]))


def test_ranks_that_share_a_sequence_read_the_same_batch(tmp_path):
    with pytest.raises(ValueError, match="ranks 0 and 1 share a sequence, but differ in input_ids"):
        read_parts(tmp_path, part([2, 0], [8, 9], [4, 5]), part([1, -1], [6, 7], [0, 0], ids=(5, 6, 8, 0)))
