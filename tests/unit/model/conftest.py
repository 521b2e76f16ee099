import pytest
from model_cases import Tiny

from glmv.tiny.make import make_tiny


@pytest.fixture(scope="session")
def tiny(tiny_dir) -> Tiny:
    return Tiny(tiny_dir)


@pytest.fixture(scope="session")
def tiny_groups(tmp_path_factory) -> Tiny:
    """Group-limited, unnormalised, scaled routing: nothing of it is visible in the real config."""
    text = {"n_group": 4, "topk_group": 2, "norm_topk_prob": False, "routed_scaling_factor": 2.5}
    directory = tmp_path_factory.mktemp("groups") / "tiny"
    return Tiny(make_tiny(directory, config_overrides={"text_config": text}))
