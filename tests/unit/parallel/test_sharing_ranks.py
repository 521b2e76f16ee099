"""How a config's ranks come to share sequences, and what is refused."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from glmv.config import load_config
from glmv.config.parallel import ParallelConfig
from glmv.model import Glm4vMoeForConditionalGeneration, ModelConfig
from glmv.ops.attention import text_attention
from glmv.parallel.context_parallel import apply_context_parallel, context_of
from glmv.parallel.mesh import ParallelError, Sizes
from glmv.parallel.process import Process
from glmv.train.batches import SampledBatches
from glmv.train.trainer import Trainer

TRAIN = Path(__file__).parents[3] / "examples" / "pictures" / "train.yaml"
SHARED = {"whole": (1, 1), "ring2": (2, 1), "ulysses2": (1, 2), "ring2_ulysses2": (2, 2)}


@pytest.fixture(scope="module")
def model(tiny_dir):
    with torch.device("meta"):
        return Glm4vMoeForConditionalGeneration(ModelConfig.from_hf_dir(tiny_dir))


def samples_of(rank, ranks, shared, directory):
    """What a rank of so many reads in a step of two micro-batches."""
    ring, ulysses = SHARED[shared]
    named = f"data.dataset_param.preprocess_parameters.model_name_or_path={directory}"
    sizes = [f"parallel.ring_attention_size={ring}", f"parallel.ulysses_parallel_size={ulysses}"]
    config = load_config(TRAIN, [named, *sizes, "training.gradient_accumulation_steps=2"])
    batches = SampledBatches(config, Process(rank, ranks, rank, torch.device("cpu")))
    return [batch.sample_ids for batch in batches.step(0)]


@pytest.mark.parametrize("shared", SHARED)
def test_ranks_that_share_sequences_read_the_same_samples_and_others_do_not(shared, tiny_dir):
    groups = 4 // (SHARED[shared][0] * SHARED[shared][1])
    read = [samples_of(rank, 4, shared, tiny_dir) for rank in range(4)]
    assert all(read[rank] == read[rank - rank % (4 // groups)] for rank in range(4))
    assert len({sample for step in read for batch in step for sample in batch}) == groups * sum(map(len, read[0]))


def test_the_samples_of_a_step_are_counted_once():
    config = load_config(TRAIN, ["training.micro_batch_size=3", "training.gradient_accumulation_steps=5"])
    trainer = SimpleNamespace(config=config, process=SimpleNamespace(world_size=8), sharers=4)
    assert Trainer.global_batch_size.fget(trainer) == 3 * 5 * 2


def test_the_layout_of_a_config_counts_who_shares_a_sequence():
    sizes = Sizes.of(ParallelConfig(ring_attention_size=2, ulysses_parallel_size=4), 16)
    assert (sizes.ring, sizes.ulysses, sizes.sharers) == (2, 4, 8)


# Sizes, the number of ranks, and what names them and the way out.
REFUSED = {
    "ring": ({"ring_attention_size": 3}, 4, "ring_attention_size x ulysses_parallel_size = 1 x 3 x 1 = 3 does not"),
    "ulysses": ({"ulysses_parallel_size": 3}, 4, "ulysses_parallel_size = 1 x 1 x 3 = 3 does not divide the number of"),
    "both": ({"ring_attention_size": 2, "ulysses_parallel_size": 3}, 8, "= 1 x 2 x 3 = 6 does not divide the number"),
    "more_than_ranks": ({"ring_attention_size": 4}, 2, "= 1 x 4 x 1 = 4 does not divide the number of ranks (WORLD_S"),
    "with_data": (
        {"ulysses_parallel_size": 2, "data_parallel_size": 4},
        4,
        "ring_attention_size x ulysses_parallel_size = 4 x 1 x 1 x 2 = 8 ranks, but WORLD_SIZE = 4",
    ),
    "experts": ({"ulysses_parallel_size": 2, "expert_parallel_size": 3}, 4, "expert_parallel_size = 3 does not divide"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_degrees_that_no_number_of_ranks_fits_are_refused_by_name(case):
    sizes, ranks, said = REFUSED[case]
    with pytest.raises(ParallelError) as caught:
        Sizes.of(ParallelConfig(**sizes), ranks)
    assert said in str(caught.value)


@pytest.mark.parametrize("ulysses", [3, 5, 8, 12])
def test_ulysses_ranks_that_do_not_divide_the_heads_are_refused_by_name(ulysses, model):
    with pytest.raises(ParallelError) as caught:
        apply_context_parallel(model, ParallelConfig(ulysses_parallel_size=ulysses), meshes=None)
    first, second = str(caught.value).splitlines()
    assert first == (
        f"parallel.ulysses_parallel_size = {ulysses} does not divide the 4 query heads of the text decoder."
    )
    assert second == "Choose 1, 2 or 4, and spread a sequence further by ring_attention_size."


def test_without_sharing_the_model_is_left_alone(model):
    apply_context_parallel(model, ParallelConfig(), meshes=None)
    assert context_of(model) is None
    assert model.model.language_model.layers[0].self_attn.attend is text_attention


def test_other_models_share_nothing():
    assert context_of(torch.nn.Linear(2, 2)) is None


def test_sizes_without_sharing_are_as_they_were():
    assert dataclasses.asdict(Sizes.of(ParallelConfig(), 4)) == {
        "dp_replicate": 1, "dp_shard": 4, "edp": 1, "efsdp": 4, "ep": 1, "ring": 1, "ulysses": 1
    }  # fmt: skip
