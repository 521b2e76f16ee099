import pytest
import torch

from glmv.verify.owner import Layout, owner

SHAPES = {"w": torch.Size([10, 7])}
SHAPES |= {f"layers.1.mlp.experts.{e}.up_proj.weight": torch.Size([40, 72]) for e in range(6)}
EXPERT = "layers.1.mlp.experts.{}.up_proj.weight"


@pytest.mark.parametrize(("row", "rank"), [(0, 0), (2, 0), (3, 1), (9, 3)])
def test_rows_are_held_in_chunks(row, rank):
    assert owner("w", f"[{row}, 2]", SHAPES, Layout.plain(4)) == f"held by rank {rank} (dp_shard {rank})"


def test_copies_hold_the_same():
    assert owner("w", "[6, 2]", SHAPES, Layout(4, shards=2, ep=1, efsdp=4)) == "held by ranks 1, 3 (dp_shard 1)"


def test_an_expert_is_a_row_of_its_stack():
    assert owner(EXPERT.format(5), "[0, 1]", SHAPES, Layout.plain(2)) == "held by rank 1 (dp_shard 1)"


def test_an_expert_lives_on_its_expert_parallel_rank():
    layout = Layout(4, shards=4, ep=2, efsdp=1)
    assert owner(EXPERT.format(2), "[0, 1]", SHAPES, layout) == "held by ranks 0, 2 (ep 0)"


@pytest.mark.parametrize(("column", "rank"), [(0, 1), (35, 1), (36, 3), (71, 3)])
def test_its_weight_is_sharded_by_columns(column, rank):
    said = owner(EXPERT.format(4), f"[7, {column}]", SHAPES, Layout(4, shards=4, ep=2, efsdp=2))
    assert said == f"held by rank {rank} (ep 1, efsdp {rank // 2})"


def test_what_has_no_place_has_no_owner():
    assert owner("loss", "", SHAPES, Layout.plain(4)) == ""
