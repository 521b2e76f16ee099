"""The trainer on NPUs: one judged step on one rank and on two, checkpoints, and what a step makes the host wait for."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from glmv.config import load_config
from glmv.ops.kernels import Kernels
from glmv.ops.npu.library import torch_npu
from glmv.train.build import create_model, read_model_config
from glmv.train.observer import Observer
from glmv.train.trainer import Trainer
from glmv.verify.grid import machine
from glmv.verify.grid.cases import Case, axes
from glmv.verify.grid.law import Law
from glmv.verify.grid.verdict import judge_case, report
from glmv.verify.trace import Recorder, Trace


def plain(ranks, dtype, **choices):
    """A step of the grid in which nothing but `choices` is out of the ordinary."""
    first = {name: options[0] for name, options in axes(ranks).items()}
    case = Case(ranks=ranks, dtype=dtype, **first | choices)
    return pytest.param(case, id=case.id, marks=pytest.mark.world_size(ranks))


# In a judged step every rank computes; its micro-batches hold pictures, text, packed documents and padding.
JUDGED = [
    plain(1, "fp32", accumulate="2"),
    plain(1, "bf16", recompute="on", freeze="vision"),
    plain(2, "fp32", experts="1x2x1", accumulate="2"),
    # Two ranks share the experts, and tokens choose among those of the first: nothing arrives at the second.
    plain(2, "fp32", experts="2x1x1", exchange="alltoall", routing="skewed"),
    # Two ranks share each sequence.
    plain(2, "fp32", sequence="r2"),
    plain(2, "bf16", sequence="u2"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory, process):
    """The tiny models, written by rank 0."""
    shared = [str(tmp_path_factory.mktemp("models"))]
    dist.broadcast_object_list(shared)
    directory = machine.Path(shared[0])
    if process.is_main:
        machine.write_models(directory)
    dist.barrier()
    return directory


def with_flash(config):
    """The published config asks for flash_attention_2."""
    model = config.model.model_copy(update={"attn_implementation": "flash_attention_2"})
    return config.model_copy(update={"model": model})


@pytest.mark.parametrize("case", JUDGED)
def test_a_step_is_within_budget_of_the_law(case, models, shared_dir, process):
    mine = machine.names_on(case, process.rank)
    config = with_flash(machine.config_of(case, models, shared_dir))
    trainer = Trainer(config, Recorder(shared_dir / "trace"), batches=machine.GridBatches(mine))
    trainer.train_step(1)
    dist.barrier()
    misses = judge_case(case, Law.read(models / f"hf-{case.routing}"), trainer, Trace(shared_dir / "trace"), process)
    assert process.device.type == "npu"
    if misses:
        pytest.fail(report(case, misses), pytrace=False)


def pictures(models, *overrides):
    """examples/pictures, a few samples of it."""
    example = machine.TRAIN.parent
    return load_config(
        machine.TRAIN,
        [
            f"training.load={models}/dcp-even",
            f"model.model_name_or_path={models}/dcp-even",
            "model.attn_implementation=flash_attention_2",
            f"data.dataset_param.preprocess_parameters.model_name_or_path={models}/hf-even",
            f"data.dataset_param.basic_parameters.dataset={example}/conversations.json",
            "data.dataset_param.basic_parameters.max_samples=6",
            "training.gradient_accumulation_steps=1",
            "training.no_load_optim=false",
            "training.lr_decay_style=constant",
            *overrides,
        ],
    )


def shards(trainer):
    """This rank's part of every weight and moment, on the host."""
    parts = dict(trainer.model.state_dict())
    for name, parameter in trainer.model.named_parameters():
        memory = trainer.optimizer.state[parameter]
        parts |= {f"{kind}/{name}": memory[kind] for kind in ("exp_avg", "exp_avg_sq")}
    return {n: (t.to_local() if isinstance(t, DTensor) else t).detach().cpu().clone() for n, t in parts.items()}


@pytest.mark.world_size(2)
def test_a_resumed_training_goes_on_bit_for_bit(models, shared_dir, process):
    whole = Trainer(
        pictures(models, "training.train_iters=3", "training.save_interval=2", f"training.save={shared_dir}")
    )
    steps = [(m.step, m.loss, m.grad_norm) for m in whole.run()]
    iterations = {path.name: path for path in shared_dir.iterdir() if path.is_dir()}
    second = next(path for name, path in iterations.items() if name.endswith("2"))
    resumed = Trainer(pictures(models, "training.train_iters=3", "training.save=null", f"training.load={second}"))
    assert resumed.iteration == 2
    assert [(m.step, m.loss, m.grad_norm) for m in resumed.run()] == steps[2:]
    expected = shards(whole)
    assert all(value.equal(expected[name]) for name, value in shards(resumed).items())
    assert all(torch.isfinite(torch.tensor(step[1:])).all() for step in steps)


class Counting(Observer):
    """Counts from the second step on; the first makes communicators and optimizer state."""

    def __init__(self, count):
        self.count, self.block, self.counted = count, None, []

    def before_step(self, trainer, step, micro_batches):
        self.block = self.count()
        self.counted.append(self.block.__enter__())

    def after_step(self, trainer, step, metrics):
        self.block.__exit__(None, None, None)


# The loss of all micro-batches, whether the norm is finite, the norm.
WAITS_OF_A_STEP = 3


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_host_waits_three_times_a_step_however_many_micro_batches(accumulate, models, process, count):
    watcher = Counting(count)
    overrides = f"training.gradient_accumulation_steps={accumulate}", "training.train_iters=2", "training.save=null"
    Trainer(pictures(models, *overrides), watcher).run()
    assert watcher.counted[1].syncs == WAITS_OF_A_STEP, watcher.counted[1].sync_causes


def test_the_device_is_set_up(process):
    """Plain memory formats, and no compiler that waits for every new shape."""
    option = torch_npu()._C._npu_getOption
    assert [option("ALLOW_INTERNAL_FORMAT"), option("jitCompile")] == [b"disable", b"disable"]


@pytest.mark.world_size(2)
def test_collectives_between_npus_are_hccls(process):
    backend = dist.get_backend_config(dist.group.WORLD)
    assert "npu:hccl" in str(backend)
    total = torch.full((3,), float(process.rank + 1), device=process.device)
    dist.all_reduce(total)
    assert total.tolist() == [3, 3, 3]


@pytest.mark.parametrize(
    ("override", "kernels"),
    [
        ("model.attn_implementation=flash_attention_2", Kernels(attention="flash")),
        ("model.attn_implementation=sdpa", Kernels(attention="sdpa")),
        ("model.attn_implementation=eager", Kernels(attention="eager")),
        ("parallel.ep_plan.use_npu_fused_ops=false", Kernels(attention="flash", fused=False)),
        ("model.use_grouped_expert_matmul=false", Kernels(attention="flash", grouped=False)),
    ],
)
def test_the_configs_switches_reach_the_model(override, kernels, models, process):
    model = create_model(pictures(models, override), read_model_config(pictures(models)))
    assert {module.kernels for module in model.modules() if hasattr(module, "kernels")} == {kernels}
