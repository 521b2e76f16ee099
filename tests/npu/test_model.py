"""The whole model on an NPU against the law: logits, loss, every gradient, one step, and what recomputation and
autocast do to them."""

import pytest
import torch
from model_cases import answers, make_batch
from torch.utils.checkpoint import checkpoint

from glmv.ops.kernels import Kernels

BF16, FP32 = torch.bfloat16, torch.float32
FLASH = Kernels(attention="flash")
CASES = {
    "fp32 padded right": ("padded_right", FP32, FLASH),
    "fp32 videos beside images": ("image_and_video_padded_right", FP32, FLASH),
    "fp32 packed": ("packed_equal_lengths_and_padding", FP32, FLASH),
    "fp32 sdpa": ("padded_left", FP32, Kernels(attention="sdpa")),
    "fp32 eager packed": ("packed", FP32, Kernels(attention="eager")),
    "fp32 without fused operators": ("one_image", FP32, Kernels(fused=False)),
    "bf16 padded left": ("padded_left", BF16, FLASH),
    "bf16 packed": ("packed", BF16, FLASH),
    "bf16 text": ("text", BF16, FLASH),
    "bf16 looped": ("images_not_square", BF16, Kernels(grouped=False, attention="sdpa")),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_loss_and_every_gradient(name, tiny, device, judge):
    case, dtype, kernels = CASES[name]
    batch = make_batch(case)
    said, chosen = answers(tiny.model(dtype, device, kernels), batch)
    judge(said, tiny.law(batch, chosen), dtype)


@pytest.fixture(scope="module")
def calls_of(tiny, device):
    """Operator calls of one forward and backward with these kernels."""
    from glmv.verify import emulated_npu

    if not emulated_npu.is_emulated():
        pytest.skip("counts calls, which only the emulated device does")

    def calls(kernels, case="packed"):
        model, batch = tiny.model(BF16, device, kernels), make_batch(case)
        with emulated_npu.count() as counted:
            answers(model, batch)
        return {name: number for name, number in counted.calls.items() if name.startswith("npu_")}

    return calls


def test_every_fused_operator_is_called(calls_of, tiny):
    """13 norms, a rotation of q and k and an attention a block, and per MoE layer one permutation each way."""
    blocks, layers = tiny.config.vision.depth, tiny.config.text.num_hidden_layers
    moe = layers - tiny.config.text.first_k_dense_replace
    assert calls_of(FLASH) == {
        "npu_rms_norm": (norms := 2 * blocks + 2 + 2 * layers + 1),
        "npu_rms_norm.backward": norms,
        "npu_rotary_mul": (turned := 2 * (blocks + layers)),
        "npu_rotary_mul.backward": turned,
        "npu_fusion_attention": blocks + layers,
        "npu_fusion_attention.backward": blocks + layers,
        "npu_moe_token_permute": moe,
        "npu_moe_token_permute.backward": moe,
        "npu_grouped_matmul": 6 * moe,
        "npu_swiglu": moe,
        "npu_swiglu.backward": moe,
        "npu_moe_token_unpermute": moe,
        "npu_moe_token_unpermute.backward": moe,
    }


def test_without_the_fused_operators_only_attention_is_left(calls_of):
    assert set(calls_of(Kernels(fused=False, attention="flash"))) == {
        "npu_fusion_attention", "npu_fusion_attention.backward"
    }  # fmt: skip


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_sdpa_and_eager_keep_their_meaning(attention, calls_of):
    assert "npu_fusion_attention" not in calls_of(Kernels(attention=attention))


def test_one_step_of_adamw_moves_every_weight_as_on_the_cpu(tiny, device):
    """The optimizer is elementwise: from the same gradients, the same weights to the last bit."""
    batch, model, twin = make_batch("padded_right"), tiny.model(FP32, device, FLASH), tiny.model(FP32)
    answers(model, batch)
    for parameter, other in zip(model.parameters(), twin.parameters()):
        other.grad = parameter.grad.cpu()
    for each in (model, twin):
        torch.optim.AdamW(each.parameters(), lr=1e-3, weight_decay=0.1, foreach=False).step()
    for (name, mine), other in zip(model.named_parameters(), twin.parameters()):
        assert mine.detach().cpu().equal(other), name


def recomputed(model, batch):
    """The loss with every decoder layer and vision block recomputed in backward."""
    for layer in [*model.model.language_model.layers, *model.model.visual.blocks]:
        inner = layer.forward
        layer.forward = lambda *args, inner=inner: checkpoint(inner, *args, use_reentrant=False)
    return answers(model, batch)[0]


@pytest.mark.parametrize("case", ["padded_right", "packed"])
def test_recomputation_changes_no_bit(case, tiny, device):
    batch = make_batch(case)
    plain, again = (
        answers(tiny.model(BF16, device, FLASH), batch)[0],
        recomputed(tiny.model(BF16, device, FLASH), batch),
    )
    for name, value in plain.items():
        assert value.equal(again[name]), name


def test_recomputation_runs_the_layers_again(tiny, device, count):
    with count() as counted:
        recomputed(tiny.model(BF16, device, FLASH), make_batch("text"))
    layers = tiny.config.text.num_hidden_layers + tiny.config.vision.depth
    assert counted.calls["npu_fusion_attention"] == 2 * layers


def test_autocast_trains_an_fp32_model_in_bf16(tiny, device, judge):
    batch, model = make_batch("padded_right"), tiny.model(FP32, device, FLASH)
    with torch.autocast("npu", dtype=BF16):
        said, chosen = answers(model, batch)
    assert {said["logits"].dtype, said["lm_head.weight"].dtype} == {BF16, FP32}
    judge(said, tiny.law(batch, chosen), BF16)


def test_a_second_pass_is_bit_equal(tiny, device):
    model, batch = tiny.model(BF16, device, FLASH), make_batch("image_and_video_padded_right")
    first = {name: value.clone() for name, value in answers(model, batch)[0].items()}
    second = answers(model, batch)[0]
    for name, value in first.items():
        assert value.equal(second[name]), name
