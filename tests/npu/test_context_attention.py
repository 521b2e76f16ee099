"""Attention over NPUs that share sequences, by the device's fused kernel."""

import pytest
import torch
import torch.distributed as dist
from context_cases import context, documents_of, inputs_of, law_of, run_part, whole_of

from glmv.ops.attention_block import attend_block, attend_block_backward


@pytest.mark.world_size(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", ["length37", "packed", "padded_left"])
@pytest.mark.parametrize("degrees", ["ulysses2", "ring2"])
def test_two_npus_attend_as_one(degrees, case, dtype, process, device, judge):
    own, document_BS = context(degrees, process), documents_of(case)
    part = run_part(own, document_BS, inputs_of(document_BS), dtype, "flash", device)
    parts = [None] * process.world_size
    dist.all_gather_object(parts, {name: states.cpu() for name, states in part.items()})
    if process.is_main:
        judge(whole_of(parts, document_BS, own.degrees), law_of(case), dtype)


def test_blocks_run_the_fused_kernel(device, count):
    query, key, value, grad = (states.float().to(device) for states in inputs_of(documents_of("length7")).values())
    with count() as counted:
        found = attend_block(query, key, value, causal=True, implementation="flash")
        attend_block_backward(grad, query, key, value, *found, causal=True, implementation="flash")
    assert counted.calls["npu_fusion_attention"] == counted.calls["npu_fusion_attention_grad"] == 1


def test_statistics_of_16_bit_states_are_fp32(device):
    query, key, value, _ = (states.bfloat16().to(device) for states in inputs_of(documents_of("length7")).values())
    assert attend_block(query, key, value, causal=True, implementation="flash")[1].dtype == torch.float32
