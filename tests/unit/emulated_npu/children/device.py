"""Facts about the device itself: memory, refusals, random numbers, counters, training helpers."""

import copy
import io
import sys
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from facts import fact, report
from torch.utils.checkpoint import checkpoint

from glmv.verify import emulated_npu
from glmv.verify.emulated_npu import count

emulated_npu.install(devices=2, poison=True)
NPU = torch.device("npu", 0)


@fact
def announcement():
    return [emulated_npu.describe(), torch.npu.get_device_name(), emulated_npu.is_emulated()]


@fact
def addition():
    total = torch.ones(2, device="npu:0") + 1
    return [total.tolist(), str(total.device)]


@fact
def second_device():
    return [str((torch.ones(2, device="npu:1") * 2).device), torch.npu.device_count()]


@fact
def third_device():
    return torch.ones(1, device="npu:2")


@fact
def fresh_memory():
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    return {
        "floats are nan": all(torch.empty(3, device=NPU, dtype=t).isnan().all().item() for t in dtypes),
        "int64": torch.empty(2, device=NPU, dtype=torch.int64).tolist(),
        "resized storage": regrown().isnan().any().item(),
    }


def regrown():
    tensor = torch.zeros(4, device=NPU)
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(16)
    return tensor


@fact
def mixed_with_cpu():
    return torch.ones(2, device=NPU) + torch.ones(2)


@fact
def mixed_with_other_npu():
    return torch.ones(2, 2, device=NPU) @ torch.ones(2, 2, device="npu:1")


@fact
def mixed_operator():
    gate = torch.ones(2, device="npu:1")
    return torch.ops.npu.npu_rms_norm(torch.ones(2, 2, device=NPU), gate)


@fact
def resized_output():
    output = torch.empty(0, device=NPU)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values, positions = torch.sort(torch.tensor([2.0, 1.0, 3.0], device=NPU), out=(output, long_output()))
    return [output.tolist(), values is output, positions.tolist()]


def long_output():
    return torch.empty(9, dtype=torch.int64, device=NPU)


@fact
def views_share_memory():
    base = torch.zeros(2, 3, device=NPU)
    base.t()[1].add_(1)
    torch.view_as_real(torch.view_as_complex(base.view(3, 2))).mul_(2)
    return base.tolist()


@fact
def host_indices():
    return torch.arange(4.0, device=NPU)[torch.tensor([0, 2])].tolist()


@fact
def between_devices():
    strided = torch.arange(6.0, device=NPU).view(2, 3).t()
    moved = strided.to("npu:1")
    return [moved.tolist(), str(moved.device), str(torch.npu.current_device())]


@fact
def mixed_with_number():
    return (torch.ones(2, device=NPU) * torch.tensor(3.0)).tolist()


@fact
def operator_on_cpu():
    return torch.ops.npu.npu_swiglu(torch.ones(2, 2))


@fact
def numpy():
    return torch.ones(2, device=NPU).numpy()


@fact
def float64_matmul():
    return torch.ones(2, 2, device=NPU, dtype=torch.float64) @ torch.ones(2, 2, device=NPU, dtype=torch.float64)


@fact
def other_settings():
    emulated_npu.install(devices=2, poison=True)
    emulated_npu.install(devices=3)


@fact
def stand_in():
    import torch_npu

    from spec.npu_ops import OPERATORS

    named = {name for name in vars(torch_npu) if name.startswith("npu_")}
    return [named == set(OPERATORS), torch_npu.__version__, torch_npu.npu is torch.npu]


@fact
def cpu_generator():
    return torch.rand(2, device=NPU, generator=torch.Generator())


@fact
def random_numbers():
    torch.manual_seed(1)
    first = F.dropout(torch.ones(64, device=NPU))
    torch.manual_seed(1)
    torch.rand(100)
    again = F.dropout(torch.ones(64, device=NPU))
    host = torch.get_rng_state()
    F.dropout(torch.ones(64, device=NPU))
    return {
        "seeded": torch.equal(first, again),
        "host undisturbed": torch.equal(host, torch.get_rng_state()),
        "moves on": not torch.equal(again, F.dropout(torch.ones(64, device=NPU))),
    }


@fact
def recomputation():
    def layer(x):
        return F.dropout(x * x)

    gradients = []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        x = torch.arange(64.0, device=NPU, requires_grad=True)
        torch.manual_seed(1)
        run(x).sum().backward()
        gradients.append(x.grad)
    return torch.equal(*gradients)


def causes(action):
    """Waits of `action` on a fresh [2, 3] tensor."""
    x = torch.arange(6.0, device=NPU).view(2, 3)
    with count() as counted:
        action(x)
    return counted.sync_causes


@fact
def waits():
    counts = torch.tensor([1, 2], device=NPU)
    actions = {
        "item": lambda x: x[0, 0].item(),
        "branch": lambda x: bool(x.sum() > 0),
        "cpu": lambda x: x.cpu(),
        "tolist": lambda x: x.tolist(),
        "read a mask": lambda x: x[x > 2],
        "write a mask": lambda x: x.__setitem__(x > 2, 0.0),
        "bincount": lambda x: torch.bincount(x.long().view(-1)),
        "repeats": lambda x: x.repeat_interleave(counts, dim=0),
        "synchronize": lambda x: torch.npu.synchronize(),
        "pageable": lambda x: torch.empty(2, 3).copy_(x, non_blocking=True),
    }
    return {name: causes(action) for name, action in actions.items()}


@fact
def no_waits():
    counts = torch.tensor([1, 2], device=NPU)
    actions = [
        lambda x: x.repeat_interleave(counts, dim=0, output_size=3),
        lambda x: torch.histc(x, bins=4, min=0, max=3),
        lambda x: x[torch.tensor([1, 0], device=NPU)],
        lambda x: x.masked_fill(x > 2, 0.0).sum(),
        lambda x: torch.empty(2, 3, pin_memory=True).copy_(x, non_blocking=True),
        lambda x: torch.tensor([1.0], device=NPU),
        lambda x: torch.ops.npu.npu_swiglu(x.view(3, 2)),
    ]
    return [causes(action) for action in actions]


@fact
def a_small_function():
    """What counters say of one product, one operator and its gradient, and one look at the result."""
    x = torch.ones(2, 4, device=NPU, requires_grad=True)
    with count(record=True) as counted:
        y = torch.ops.npu.npu_swiglu(x, -1)
        y.sum().backward()
        y.sum().item()
    call = counted.recorded[0]
    return {
        "calls": {name: counted.calls.get(name, 0) for name in ("npu_swiglu", "npu_swiglu.backward", "aten::sum")},
        "syncs": counted.syncs,
        "recorded": [call.name, call.args[0].shape, str(call.args[0].dtype), len(counted.recorded)],
    }


@fact
def integer_histogram():
    counts = torch.histc(torch.tensor([0, 2, 2], device=NPU), bins=3, min=0, max=2)
    return [counts.tolist(), str(counts.dtype)]


@fact
def autocast():
    layer = torch.nn.Linear(4, 4).to(NPU)
    with torch.autocast("npu", dtype=torch.bfloat16):
        y = layer(torch.ones(2, 4, device=NPU))
        return [str(t.dtype) for t in (y, F.layer_norm(y, (4,)), y.softmax(-1), y * 2)]


@fact
def attention_like_cpu():
    torch.manual_seed(0)
    host = [torch.randn(1, 4, 8, 16, requires_grad=True) for _ in range(3)]
    npu = [t.detach().to(NPU).requires_grad_() for t in host]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        outputs = [F.scaled_dot_product_attention(*tensors, is_causal=True) for tensors in (host, npu)]
    for output in outputs:
        output.sum().backward()
    return [torch.equal(outputs[0], outputs[1].cpu()), torch.equal(host[1].grad, npu[1].grad.cpu())]


@fact
def convolution_like_cpu():
    torch.manual_seed(0)
    host = torch.nn.Conv3d(3, 4, 2)
    npu = copy.deepcopy(host).to(NPU)
    x = torch.randn(1, 3, 4, 4, 4)
    for layer, images in ((host, x), (npu, x.to(NPU))):
        layer(images).sum().backward()
    return [torch.equal(host.weight.grad, npu.weight.grad.cpu()), torch.equal(host.bias.grad, npu.bias.grad.cpu())]


@fact
def optimizers_like_cpu():
    return [like_cpu(options) for options in ({"fused": True}, {"foreach": True}, {"foreach": False})]


def like_cpu(options):
    weights = []
    for device in ("cpu", NPU):
        torch.manual_seed(0)
        layer = torch.nn.Linear(4, 3).to(device)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, **options)
        for step in range(3):
            layer(torch.full((2, 4), 1.0 + step, device=device)).pow(2).sum().backward()
            torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        weights.append(layer.weight.detach().cpu())
    return torch.equal(*weights)


@fact
def saved_and_loaded():
    file = io.BytesIO()
    torch.save(torch.ones(2, device="npu:1"), file)
    file.seek(0)
    return str(torch.load(file).device)


@fact
def memory():
    torch.npu.reset_peak_memory_stats()
    before = torch.npu.memory_allocated()
    tensor = torch.ones(1000, device=NPU)
    during = torch.npu.memory_allocated()
    del tensor
    return [during - before, torch.npu.memory_allocated() - before, torch.npu.max_memory_allocated() - before]


@fact
def streams():
    stream = torch.npu.Stream()
    with torch.npu.stream(stream):
        inside = torch.npu.current_stream() == stream
    event = stream.record_event()
    torch.npu.current_stream().wait_event(event)
    return [inside, torch.npu.current_stream() == stream]


@fact
def no_gradient():
    x = torch.ones(3, 2, device=NPU, requires_grad=True)
    ends = torch.tensor([3], device=NPU)
    torch.ops.npu.npu_grouped_matmul(
        [x], [torch.ones(1, 2, 4, device=NPU)], group_list=ends, split_item=3, group_type=0
    )[0].sum().backward()


@fact
def statistics_have_no_gradient():
    y, rstd = torch.ops.npu.npu_rms_norm(torch.ones(3, 2, device=NPU, requires_grad=True), torch.ones(2, device=NPU))
    return [y.requires_grad, rstd.requires_grad]


@fact
def host_tensor_over_hccl():
    dist.init_process_group("hccl", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(2))


if __name__ == "__main__":
    report()
    sys.stdout.flush()
