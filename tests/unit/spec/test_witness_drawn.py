"""HF agrees with the law on architectures and inputs that nobody chose."""

import pytest
from hf_witness import Video, build_witness, make_batch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_witness_hf import agree

sizes = st.integers(1, 3)


@st.composite
def text_configs(draw):
    kv_heads, groups = draw(sizes), draw(st.sampled_from([1, 2, 3]))
    head_dim = draw(st.sampled_from([12, 16, 24]))
    experts_per_group = draw(st.integers(2, 4))
    kept = draw(st.integers(1, groups))
    first = draw(st.integers(1, head_dim // 4 - 2))
    second = draw(st.integers(1, head_dim // 4 - first - 1))
    return {
        "hidden_size": draw(st.sampled_from([20, 36])),
        "intermediate_size": draw(st.sampled_from([30, 44])),
        "moe_intermediate_size": draw(st.sampled_from([12, 28])),
        "num_hidden_layers": draw(sizes),
        "num_attention_heads": kv_heads * draw(sizes),
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rope_scaling": {"rope_type": "default", "mrope_section": [first, second, head_dim // 4 - first - second]},
        "n_routed_experts": groups * experts_per_group,
        "num_experts_per_tok": draw(st.integers(2, kept * experts_per_group)),
        "n_group": groups,
        "topk_group": kept,
        "norm_topk_prob": draw(st.booleans()),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
        "first_k_dense_replace": draw(st.integers(0, 1)),
        "n_shared_experts": draw(st.integers(1, 2)),
        "attention_bias": draw(st.booleans()),
    }


@st.composite
def vision_configs(draw, out_hidden_size):
    heads = draw(sizes)
    return {
        "depth": draw(sizes),
        "num_heads": heads,
        "hidden_size": heads * draw(st.sampled_from([8, 12])),
        "out_hidden_size": out_hidden_size,
        "intermediate_size": draw(st.sampled_from([22, 30])),
        "image_size": 14 * draw(st.sampled_from([4, 5])),
    }


even = st.sampled_from([2, 4, 6])
images = st.tuples(even, even)
videos = st.builds(Video, sizes, even, even)


def samples(pictures):
    segments = st.lists(st.one_of(st.integers(1, 6), pictures), min_size=1, max_size=3)
    # Text behind the last picture, so that every sample has something to learn.
    return st.lists(segments.map(lambda row: [*row, 9]), min_size=1, max_size=2)


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_drawn_architectures_and_inputs(data, judge):
    text = data.draw(text_configs(), label="text_config")
    vision = data.draw(vision_configs(text["hidden_size"]), label="vision_config")
    rows = data.draw(st.one_of(samples(images), samples(videos)), label="samples")
    padding = data.draw(st.sampled_from(["left", "right"]), label="padding")
    agree(build_witness(text, vision), make_batch(rows, padding), judge)
