"""`glmv verify`: write a tiny GLM-4.5V, convert it, train it over ranks, judge each step, export it, let HF load it."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import glmv
from glmv.checkpoint.dcp_to_hf import dcp_to_hf
from glmv.checkpoint.hf_to_dcp import hf_to_dcp
from glmv.config import Config as TrainConfig
from glmv.config import load_config
from glmv.errors import GlmvError
from glmv.parallel.launch import launch
from glmv.tiny.make import make_tiny
from glmv.train.metrics import METRICS_FILE
from glmv.verify.export import judge_export, judge_hf_logits, judge_start
from glmv.verify.judge import Finding
from glmv.verify.owner import Layout
from glmv.verify.steps import Recipe, StepVerdict, judge_run
from glmv.verify.trace import Trace
from spec.config import Config
from spec.optimizer import Hyper, Schedule

POLICIES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# How ranks share sequences: a run in fp32 shows one way, the run in bf16 the other.
SEQUENCE = {"fp32": "ring_attention_size", "bf16": "ulysses_parallel_size"}
# What rotary frequencies are rounded to: nothing that shows, or bf16 as in Megatron.
BUFFERS = {"fp32": None, "bf16": torch.bfloat16}
PICTURES = Path(glmv.__file__).parents[1] / "examples" / "pictures"
MARKER = ".glmv-verify"
# A training run of the tiny model takes seconds; this ends one that hangs.
TIMEOUT_S = 600.0
POLL_S = 0.25


@dataclass(frozen=True)
class Options:
    """What the command was asked for."""

    out: Path
    world_size: int = 4
    steps: int = 20
    seed: int = 0
    pictures: Path = PICTURES
    policies: tuple[str, ...] = tuple(POLICIES)
    buffers: str = "fp32"

    @property
    def sharers(self) -> int:
        """Ranks that share a sequence: two, where there are enough to have samples of their own besides."""
        return 2 if self.world_size % 4 == 0 else 1

    @property
    def layout(self) -> Layout:
        """Two expert-parallel ranks where the number of ranks allows them; all else sharded over all."""
        ep = 2 if self.world_size % 2 == 0 else 1
        return Layout(self.world_size, shards=self.world_size, ep=ep, efsdp=self.world_size // ep)


@dataclass
class PolicyResult:
    """All verdicts on one training run."""

    policy: str
    steps: list[StepVerdict]
    mean: Finding
    start: list[Finding]
    export: list[Finding]
    hf_logits: list[Finding]

    @property
    def missed(self) -> list[str]:
        """A line for everything over budget: tensor, step, rank, figures."""
        looks = [(verdict.step, verdict.explanation) for verdict in self.steps if verdict.explanation]
        lines = [f"{self.policy} step {step}: it looks as if {explanation}" for step, explanation in looks]
        lines += [f"{self.policy} run: {self.mean}"] if self.mean.used > 1 else []
        lines += [f"{self.policy} start: {finding}" for finding in self.start if finding.used > 1]
        for verdict in self.steps:
            lines += [f"{self.policy} step {verdict.step}: {finding}" for finding in verdict.missed]
        lines += [f"{self.policy} export: {finding}" for finding in self.export if finding.used > 1]
        return lines + [f"{self.policy} HF's logits of the export: {f}" for f in self.hf_logits if f.used > 1]


@dataclass
class Result:
    """The whole verification."""

    options: Options
    policies: list[PolicyResult] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def missed(self) -> list[str]:
        """Everything over budget, over both policies."""
        return [line for policy in self.policies for line in policy.missed]


def verify(options: Options, console: Console) -> Result:
    """Run all stages; progress goes to `console`.

    Raises:
        GlmvError: a stage could not run (a rank died, the pictures are missing); a miss is not an error but a result.
    """
    began = time.monotonic()
    prepare(options.out)
    result = Result(options)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress, judges() as pool:
        hub, dcp = options.out / "hf", options.out / "dcp"
        task = progress.add_task("tiny GLM-4.5V: write and convert", total=2)
        make_tiny(hub, seed=options.seed, force=True)
        progress.advance(task)
        hf_to_dcp(hub, dcp)
        progress.advance(task)
        for policy in options.policies:
            result.policies.append(_verify_policy(policy, options, progress, pool))
    result.seconds = time.monotonic() - began
    return result


def judges() -> ProcessPoolExecutor:
    """One process a core; they are started afresh, for torch's threads do not survive a fork."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["glmv.verify.steps"])
    return ProcessPoolExecutor(mp_context=context, initializer=torch.set_num_threads, initargs=(1,))


def prepare(out: Path) -> None:
    """An empty directory for this run; what an earlier run left there is removed.

    Raises:
        GlmvError: the directory holds something else.
    """
    marker = out / MARKER
    if marker.exists():
        shutil.rmtree(out)
    elif out.exists() and any(out.iterdir()):
        raise GlmvError(f"{out} is not empty, and no earlier `glmv verify` wrote it. Choose another --out.")
    out.mkdir(parents=True, exist_ok=True)
    marker.touch()


def _verify_policy(policy: str, options: Options, progress: Progress, pool: Executor) -> PolicyResult:
    work, hub = options.out / policy, options.out / "hf"
    config_path, overrides = options.pictures / "train.yaml", _overrides(policy, options)
    config = load_config(config_path, overrides)
    task = progress.add_task(f"{policy}: train on {options.world_size} ranks", total=options.steps)
    command = ["-m", "glmv.verify.candidate", str(work / "trace"), options.buffers, str(config_path), *overrides]
    _train(command, options, lambda done: progress.update(task, completed=done), work / "dcp" / METRICS_FILE)
    trace = Trace(work / "trace")
    task = progress.add_task(f"{policy}: judge", total=2 * len(trace.steps))
    recipe = _recipe(config, hub, policy, options)
    verdicts, mean = judge_run(trace, recipe, pool, lambda: progress.advance(task))
    task = progress.add_task(f"{policy}: export and load with HF", total=2)
    dcp_to_hf(work / "dcp", work / "hf")
    progress.advance(task)
    final = trace.weights(trace.steps[-1])
    picture = next(m for m in trace.read(1).micro_batches if m.batch.pixel_values is not None)
    found = PolicyResult(
        policy=policy,
        steps=verdicts,
        mean=mean,
        start=judge_start(trace.weights(0), hub),
        export=judge_export(final, hub, work / "hf"),
        hf_logits=judge_hf_logits(work / "hf", picture.batch),
    )
    progress.advance(task)
    return found


def _overrides(policy: str, options: Options) -> list[str]:
    work = options.out / policy
    return [
        f"data.dataset_param.preprocess_parameters.model_name_or_path={options.out / 'hf'}",
        f"data.dataset_param.basic_parameters.dataset={options.pictures / 'conversations.json'}",
        f"model.model_name_or_path={options.out / 'hf'}",
        f"parallel.fsdp_plan.param_dtype={policy}",
        f"parallel.expert_parallel_size={options.layout.ep}",
        f"parallel.{SEQUENCE[policy]}={options.sharers}",
        f"training.load={options.out / 'dcp'}",
        f"training.save={work / 'dcp'}",
        f"training.train_iters={options.steps}",
        f"training.save_interval={options.steps}",
        f"training.seed={options.seed}",
    ]


def _train(command: list[str], options: Options, progress: Callable[[int], None], metrics: Path) -> None:
    with ThreadPoolExecutor(1) as waiting:
        run = waiting.submit(launch, command, nproc=options.world_size, timeout_s=TIMEOUT_S)
        while not run.done():
            time.sleep(POLL_S)
            progress(_lines(metrics))
    if not run.result().ok:
        raise GlmvError(f"training ended before its last step.\n{run.result().describe()}")


def _lines(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n") if path.exists() else 0


def _recipe(config: TrainConfig, hub: Path, policy: str, options: Options) -> Recipe:
    training = config.training
    schedule = Schedule(
        lr=training.lr,
        train_iters=training.train_iters,
        lr_min=training.lr_min,
        lr_start=training.lr_start,
        lr_warmup_ratio=training.lr_warmup_ratio,
        lr_decay_style=training.lr_decay_style,
        lr_decay_ratio=training.lr_decay_ratio,
    )
    hyper = Hyper(
        lr=training.lr,
        beta1=training.adam_beta1,
        beta2=training.adam_beta2,
        eps=training.adam_eps,
        weight_decay=training.weight_decay,
        clip_grad=training.clip_grad,
    )
    mapping = json.loads((hub / "config.json").read_text(encoding="utf-8"))
    return Recipe(
        config=Config.from_hf(mapping),
        schedule=schedule,
        hyper=hyper,
        dtype=POLICIES[policy],
        layout=options.layout,
        loss_type=config.features.loss_cfg.loss_type,
        buffers=BUFFERS[options.buffers],
    )


def versions() -> dict[str, str]:
    """What took part, for the report."""
    return {"glmv": glmv.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
