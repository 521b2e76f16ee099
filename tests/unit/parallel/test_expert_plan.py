"""Which modules are spread over ranks, and which dim of a weight is split."""

import pytest
import torch

from glmv.config.parallel import ParallelConfig
from glmv.model import Glm4vMoeForConditionalGeneration, ModelConfig
from glmv.parallel.expert_parallel import _expert_modules, shard_dim
from glmv.parallel.mesh import ParallelError
from glmv.parallel.patterns import PatternError


@pytest.mark.parametrize(
    ("shape", "ranks", "dim"),
    [((12, 72, 80), 4, 1), ((12, 40, 72), 9, 2), ((128, 1408, 4096), 256, 2), ((3, 5, 7), 1, 1)],
)
def test_the_first_dim_behind_the_experts_that_divides_evenly_is_split(shape, ranks, dim):
    assert shard_dim(shape, ranks) == dim


def test_a_weight_that_no_dim_divides_is_refused_with_its_sizes():
    with pytest.raises(ParallelError, match="= 7 divides none of the sizes 72 and 80"):
        shard_dim((14, 72, 80), 7)


@pytest.fixture(scope="module")
def model(tiny_dir):
    with torch.device("meta"):
        return Glm4vMoeForConditionalGeneration(ModelConfig.from_hf_dir(tiny_dir))


def chosen(model, **plan):
    return list(_expert_modules(model, ParallelConfig(expert_parallel_size=2, ep_plan=plan)))


ALL = [f"model.language_model.layers.{layer}.mlp.experts" for layer in (1, 2)]


def test_without_a_plan_all_experts_are_spread(model):
    assert chosen(model) == ALL


def test_a_plan_may_name_some(model):
    assert chosen(model, apply_modules=["*.layers.2.mlp.experts"]) == ALL[1:]


def test_naming_the_sharded_ones_again_is_fine(model):
    assert chosen(model, apply_modules=["*.mlp.experts"], apply_efsdp_modules=["*.mlp.experts"]) == ALL


@pytest.mark.parametrize(
    ("plan", "error", "said"),
    [
        ({"apply_modules": ["*.mlp.expert"]}, PatternError, "matches no module"),
        ({"apply_modules": ["*.mlp"]}, ParallelError, "model.language_model.layers.0.mlp, which holds no stacked"),
        ({"apply_efsdp_modules": ["*.layers.1.mlp.experts"]}, ParallelError, "layers.2.mlp.experts is not in both"),
    ],
)
def test_a_plan_about_something_else_is_refused(plan, error, said, model):
    with pytest.raises(error) as caught:
        chosen(model, **plan)
    assert said in str(caught.value)
