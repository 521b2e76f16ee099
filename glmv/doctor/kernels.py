"""Which implementation of the model's operators bf16 tensors get on which device: the operators are asked."""
# Shapes: B batch, N heads, S sequence, D head dim, R rows, H hidden, E experts, F = 2I, I intermediate.

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from glmv.doctor.fact import Fact

if TYPE_CHECKING:
    import torch

PART = "kernels"
NPU = "npu"  # the name under which an NPU's own implementation is registered


def kernels() -> Iterator[Fact]:
    """Operators that an NPU has kernels of its own for, or that have several implementations elsewhere."""
    import torch

    from glmv.ops.attention import attention, segment_attention
    from glmv.ops.experts import combine, expert_mlp, permute
    from glmv.ops.norm import rms_norm
    from glmv.ops.rope import rotate

    devices = [torch.device("cpu")] + ([torch.device("cuda", 0)] if torch.cuda.device_count() else [])
    rows = [(device.type, chosen(device)) for device in devices]
    for operator in (attention, segment_attention, permute, expert_mlp, combine, rms_norm, rotate):
        elsewhere = "/".join(name for name in operator.implementations if name != NPU)
        told = [f"{device}: {names.get(operator.name, elsewhere)}" for device, names in rows]
        told += [f"npu: {'torch_npu' if NPU in operator.implementations else elsewhere}"]
        note = "on an NPU with attn_implementation: flash_attention_2" if "attention" in operator.name else ""
        yield Fact(PART, operator.name, ", ".join(told), note=note)


def chosen(device: torch.device) -> dict[str, str]:
    """Implementation that small bf16 tensors on a device get, for the operators where that is a question off an NPU."""
    import torch

    from glmv.ops.attention import attention
    from glmv.ops.experts import expert_mlp
    from glmv.ops.kernels import Kernels

    options = Kernels()
    states_BNSD = torch.zeros(1, 2, 8, 16, dtype=torch.bfloat16, device=device)
    rows_RH = torch.zeros(8, 16, dtype=torch.bfloat16, device=device)
    counts_E = torch.tensor([8, 0], device=device)
    gate_up_EHF, down_EIH = rows_RH.new_zeros(2, 16, 32), rows_RH.new_zeros(2, 16, 16)
    heads = (states_BNSD, states_BNSD, states_BNSD, None)
    return {
        "attention": attention.choose(*heads, implementation=options.attention, causal=True),
        "expert_mlp": expert_mlp.choose(rows_RH, counts_E, gate_up_EHF, down_EIH, kernels=options),
    }
