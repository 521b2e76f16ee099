"""The judge is told what the candidate was told."""

from pathlib import Path

import pytest
import torch

from glmv.config import load_config
from glmv.verify.run import PICTURES, Options, _recipe
from spec.loss import LOSS_TYPES


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_loss_type_is_the_configs(loss_type, tiny_dir):
    config = load_config(PICTURES / "train.yaml", [f"features.loss_cfg.loss_type={loss_type}"])
    assert _recipe(config, tiny_dir, "fp32", Options(out=Path("unused"))).loss_type == loss_type


@pytest.mark.parametrize(("buffers", "dtype"), [("fp32", None), ("bf16", torch.bfloat16)])
def test_truth_and_draws_have_the_candidates_buffers(buffers, dtype, tiny_dir):
    options = Options(out=Path("unused"), buffers=buffers)
    recipe = _recipe(load_config(PICTURES / "train.yaml"), tiny_dir, "bf16", options)
    truth, draw = recipe.policy(torch.float64), recipe.policy(torch.bfloat16, draw=3)
    assert truth.buffers == draw.buffers == dtype
    assert (draw.compute, draw.draw) == (torch.bfloat16, 3)
