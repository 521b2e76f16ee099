"""The training loop."""

import time
from pathlib import Path

import torch

from glmv.checkpoint.errors import some
from glmv.checkpoint.manifest import read_manifest
from glmv.checkpoint.paths import ASSETS
from glmv.checkpoint.training import LoadReport, load_optimizer, save_checkpoint
from glmv.config import Config
from glmv.parallel.balance import LoadMeter
from glmv.parallel.grad_norm import clip_grad_norm
from glmv.parallel.mesh import Sizes
from glmv.parallel.process import current, on_all_ranks
from glmv.train.assets import refuse_other_assets
from glmv.train.batches import Batches, SampledBatches
from glmv.train.build import build_model, checkpoint_to_load, chunk_size_of
from glmv.train.metrics import Reporter, StepMetrics
from glmv.train.observer import Observer
from glmv.train.optimizer import apply_config, build_optimizer, optimizer_step
from glmv.train.schedule import Schedule
from glmv.train.seed import seed_everything
from glmv.train.step import accumulate_gradients, global_targets, stop_if_not_finite


class Trainer:
    """Builds everything that a config names, and trains. All of its methods are collective.

    Public: `config`, `rank`, `process`, `model` (sharded), `optimizer`, `batches`, `iteration` (steps done).

    Args:
        config: a config that `glmv.config.unbuilt` has nothing against.
        observer: called before, in and after every step; see `glmv.train.observer`.
        batches: where micro-batches come from; None for the config's data set.
        buffers: round the rotary frequencies to this dtype, to compare with frameworks that do.
    Raises:
        GlmvError: anything the user must mend. Every rank raises, with the same message.
    """

    def __init__(
        self,
        config: Config,
        observer: Observer | None = None,
        *,
        batches: Batches | None = None,
        buffers: torch.dtype | None = None,
    ) -> None:
        self.config = config
        self.observer = observer or Observer()
        self.process = current()
        self.rank = self.process.rank
        training = config.training
        seed_everything(training.seed, deterministic=training.use_deter_comp)
        with on_all_ranks():
            self.sharers = Sizes.of(config.parallel, self.process.world_size).sharers
            self.directory = checkpoint_to_load(config)
            self.iteration = read_manifest(self.directory).iteration
            if batches is None:
                refuse_other_assets(config, self.directory)
            self.batches = batches or SampledBatches(config, self.process)
        self.model, report = build_model(config, self.process, self.directory, buffers)
        self.loads = LoadMeter(self.model)
        self.optimizer = build_optimizer(self.model, training)
        # What was converted from Hugging Face (iteration 0) has no optimizer state to load.
        if self.iteration > 0 and not training.no_load_optim:
            with on_all_ranks():
                load_optimizer(self.model, self.optimizer, self.directory)
            apply_config(self.optimizer, training)
        self.schedule = Schedule.from_config(training)
        self.saved: Path | None = None
        self.reporter = Reporter(
            active=self.process.is_main,
            train_iters=training.train_iters,
            log_interval=training.log_interval,
            directory=Path(training.save) if training.save else None,
            resumed_at=self.iteration,
        )
        self._introduce(report)

    @property
    def global_batch_size(self) -> int:
        """Samples of one optimizer step, over all ranks."""
        training = self.config.training
        return (
            training.micro_batch_size * training.gradient_accumulation_steps * self.process.world_size // self.sharers
        )

    def run(self) -> list[StepMetrics]:
        """Train to `training.train_iters`, saving on the way and once at the end; return what every step reported."""
        training = self.config.training
        with self.reporter as reporter:
            while self.iteration < training.train_iters:
                reporter.report(self.train_step(self.iteration + 1))
                if self.iteration % training.save_interval == 0 or self.iteration == training.train_iters:
                    self.save()
            reporter.summary(self.saved)
        return reporter.history

    def train_step(self, step: int) -> StepMetrics:
        """Take optimizer step `step` (counted from 1).

        Raises:
            AgreedError: some rank cannot make its batch, or loss or gradients are not finite; weights are unchanged.
        """
        began = time.perf_counter()
        with on_all_ranks():
            micro_batches = self.batches.step(step - 1)
        self.observer.before_step(self, step, micro_batches)
        targets = global_targets(micro_batches, self.sharers)
        if targets == 0:
            self.reporter.say(
                f"warning: step {step}: no sample of the global batch has a label to learn; loss and gradients are 0. "
                "Look at cutoff_len and at the labels of your data."
            )
        self.loads.reset()
        features, device = self.config.features, self.process.device
        how = features.loss_cfg.loss_type, chunk_size_of(features)
        loss, partial = accumulate_gradients(self.model, micro_batches, targets, device, *how)
        self.observer.after_backward(self, step, loss)
        training = self.config.training
        norm = float(clip_grad_norm(self.model.parameters(), training.clip_grad, foreach=training.clip_grad_foreach))
        stop_if_not_finite(step, loss, partial, norm, self.model, micro_batches)
        lr = self.schedule.lr_at(step - 1)
        optimizer_step(self.optimizer, lr)
        self.iteration = step
        expert_load, expert_load_balanced = self.loads.read()
        metrics = StepMetrics(
            step=step,
            loss=loss,
            lr=lr,
            grad_norm=norm,
            tokens=targets,
            global_batch_size=self.global_batch_size,
            consumed_samples=step * self.global_batch_size,
            time_ms=(time.perf_counter() - began) * 1000,
            expert_load=expert_load,
            expert_load_balanced=expert_load_balanced,
        )
        self.observer.after_step(self, step, metrics)
        self.optimizer.zero_grad(set_to_none=True)
        return metrics

    def save(self) -> None:
        """Write a checkpoint of the steps done so far, if `training.save` names a place."""
        training = self.config.training
        if training.save is None:
            return
        state = {"consumed_samples": self.iteration * self.global_batch_size}
        optimizer = None if training.no_save_optim else self.optimizer
        with on_all_ranks():
            self.saved = save_checkpoint(
                training.save, self.iteration, self.model, optimizer, state=state, assets_from=self.directory / ASSETS
            )

    def _introduce(self, report: LoadReport) -> None:
        """Say what will be trained, on what."""
        parameters = list(self.model.parameters())
        trainable = sum(p.numel() for p in parameters if p.requires_grad)
        self.reporter.say(
            f"ranks       {self.process.world_size} x {self.process.device.type}\n"
            f"model       {trainable} of {sum(p.numel() for p in parameters)} parameters are trained\n"
            f"weights     {self.directory} ({report.tensors} tensors)\n"
            f"data        {self.batches}, {self.global_batch_size} a step"
        )
        if report.lossy:
            self.reporter.say(f"warning     {len(report.lossy)} tensors are rounded: {some(report.lossy)}")
