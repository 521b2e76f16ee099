"""Facts about collectives and FSDP2, from two ranks: ranks.py RANK DIRECTORY."""

import datetime
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from facts import fact, report
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from glmv.verify import emulated_npu
from glmv.verify.emulated_npu import count

RANK, DIRECTORY = int(sys.argv[1]), Path(sys.argv[2])
SIZE = 2
emulated_npu.install(devices=SIZE, poison=True)
NPU = torch.device("npu", RANK)
torch.npu.set_device(NPU)
store = dist.FileStore(str(DIRECTORY / "store"), SIZE)
dist.init_process_group(
    "cpu:gloo,npu:hccl", store=store, rank=RANK, world_size=SIZE, timeout=datetime.timedelta(seconds=240)
)


def mine(*shape, dtype=torch.float32):
    """1 on rank 0, 2 on rank 1."""
    return torch.full(shape, RANK + 1, device=NPU, dtype=dtype)


def reduced(op, dtype=torch.float32):
    tensor = mine(2, dtype=dtype)
    dist.all_reduce(tensor, op)
    return tensor.tolist()


@fact
def all_reduce():
    ops = dist.ReduceOp
    return {str(op).split(".")[-1]: reduced(op) for op in (ops.SUM, ops.MAX, ops.MIN, ops.PRODUCT, ops.AVG)}


@fact
def dtypes():
    known = (torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8)
    return {str(dtype): reduced(dist.ReduceOp.SUM, dtype) for dtype in known} | {
        "torch.bool": reduced(dist.ReduceOp.SUM, torch.bool)
    }


@fact
def average_of_large_numbers():
    """The sum of two 60000 is no fp16 number, so that neither is half of it."""
    tensor = torch.tensor([60000.0], device=NPU, dtype=torch.float16)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    return str(tensor.item())


@fact
def premultiplied_sum():
    source, output = mine(4), torch.empty(2, device=NPU)
    dist.reduce_scatter_tensor(output, source, dist._make_nccl_premul_sum(0.5))
    return [output.tolist(), source.tolist()]


@fact
def float64():
    return reduced(dist.ReduceOp.SUM, torch.float64)


@fact
def bitwise():
    return reduced(dist.ReduceOp.BAND, torch.int32)


@fact
def gather_and_scatter():
    gathered, scattered = torch.empty(4, device=NPU), torch.empty(2, device=NPU)
    dist.all_gather_into_tensor(gathered, mine(2))
    dist.reduce_scatter_tensor(scattered, torch.arange(4.0, device=NPU))
    lists = [torch.empty(2, device=NPU) for _ in range(SIZE)]
    dist.all_gather(lists, mine(2))
    listed = torch.empty(2, device=NPU)
    dist.reduce_scatter(listed, [mine(2), mine(2) * 10])
    return [gathered.tolist(), scattered.tolist(), [t.tolist() for t in lists], listed.tolist()]


@fact
def uneven_exchange():
    sent, received = ([1, 2], [1, 3]) if RANK == 0 else ([3, 0], [2, 0])
    rows = torch.arange(float(sum(sent)), device=NPU) + 10 * RANK
    output = torch.empty(sum(received), device=NPU)
    dist.all_to_all_single(output, rows, received, sent)
    return output.tolist()


@fact
def empty_exchange():
    output = torch.empty(0, 3, device=NPU)
    dist.all_to_all_single(output, torch.empty(0, 3, device=NPU), [0, 0], [0, 0])
    return list(output.shape)


@fact
def exchange_of_lists():
    outputs = [torch.empty(1, device=NPU) for _ in range(SIZE)]
    dist.all_to_all(outputs, [torch.full((1,), 10.0 * RANK + to, device=NPU) for to in range(SIZE)])
    return [t.item() for t in outputs]


@fact
def one_to_all_and_back():
    tensor, received = mine(2), torch.empty(2, device=NPU)
    dist.broadcast(tensor, 1)
    both = [dist.P2POp(dist.isend, mine(2), 1 - RANK), dist.P2POp(dist.irecv, received, 1 - RANK)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    dist.barrier()
    return [tensor.tolist(), received.tolist()]


@fact
def host_tensor():
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    return tensor.tolist()


@fact
def counted_bytes():
    with count() as counted:
        dist.all_reduce(mine(3))
        dist.all_reduce(mine(3))
    return [counted.collectives, counted.syncs]


@fact
def fused_exchange():
    """Row i of rank r goes to rank i's only expert, which multiplies by its rank + 1."""
    name = dist.group.WORLD._get_backend(NPU).get_hccl_comm_name(RANK)
    rows = torch.tensor([[1.0, 0.0], [2.0, 0.0]], device=NPU, dtype=torch.bfloat16) * (1 + 10 * RANK)
    weight = torch.full((1, 2, 3), RANK + 1.0, device=NPU, dtype=torch.bfloat16)
    product = torch.ops.npu.npu_alltoallv_gmm(rows, weight, name, SIZE, [1, 1], [1, 1])[0]
    return [product.tolist(), str(product.device)]


def network(device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.GELU(), torch.nn.Linear(12, 6)).to(device)
    mesh = init_device_mesh(device.type, (SIZE,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


def train(model, optimizer, device, steps):
    for step in steps:
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + RANK)).to(device)
        model(batch).float().pow(2).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def weights(model):
    return [p.full_tensor().detach().cpu() for p in model.parameters()]


@fact
def sharded_training_like_cpu():
    """FSDP2 with bf16 compute and fp32 reduction on the npu and on the CPU: the same weights to the last bit."""
    trained = []
    for device in (NPU, torch.device("cpu")):
        model, optimizer = network(device)
        train(model, optimizer, device, range(3))
        trained.append(weights(model))
    return all(torch.equal(a, b) for a, b in zip(*trained, strict=True))


@fact
def checkpoint_resumes():
    model, optimizer = network(NPU)
    train(model, optimizer, NPU, range(2))
    saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    dcp.save(saved, checkpoint_id=DIRECTORY / "checkpoint")
    fresh, fresh_optimizer = network(NPU)
    loaded = dict(zip(("model", "optimizer"), get_state_dict(fresh, fresh_optimizer)))
    dcp.load(loaded, checkpoint_id=DIRECTORY / "checkpoint")
    set_state_dict(fresh, fresh_optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    train(model, optimizer, NPU, range(2, 4))
    train(fresh, fresh_optimizer, NPU, range(2, 4))
    return all(torch.equal(a, b) for a, b in zip(weights(model), weights(fresh), strict=True))


@fact
def sharded_step_waits():
    model, optimizer = network(NPU)
    with count() as counted:
        train(model, optimizer, NPU, range(1))
    return counted.sync_causes


if __name__ == "__main__":
    report()
    sys.stdout.flush()
    dist.destroy_process_group()
