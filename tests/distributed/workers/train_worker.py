"""Train the tiny model in every way that `test_train.py` asks about; rank 0 writes what each rank saw.

Usage: train_worker.py TINY_HF_DIR CHECKPOINT_ROOT WORK_DIR
"""

import hashlib
import math
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import glmv.train.trainer as trainer_module
from glmv.config import load_config
from glmv.errors import GlmvError
from glmv.model import Glm4vMoeForConditionalGeneration
from glmv.parallel.process import process_group
from glmv.train.observer import Observer
from glmv.train.trainer import Trainer

EXAMPLE = Path(__file__).parents[3] / "examples" / "pictures" / "train.yaml"
HF, ROOT, WORK = map(Path, sys.argv[1:4])
LOSS_TYPES = ["per_token_loss", "default", "per_sample_loss"]
RANK_1_ONLY = "missing on rank 1"


def settings(*overrides):
    return load_config(
        EXAMPLE,
        [
            f"training.load={ROOT}",
            f"model.model_name_or_path={ROOT}",
            f"data.dataset_param.preprocess_parameters.model_name_or_path={HF}",
            f"data.dataset_param.basic_parameters.dataset={EXAMPLE.parent}/conversations.json",
            "data.dataset_param.basic_parameters.max_samples=6",
            "parallel.fsdp_plan.param_dtype=fp32",
            "training.gradient_accumulation_steps=1",
            "training.no_load_optim=false",
            *overrides,
        ],
    )


class Watcher(Observer):
    """Remembers which samples came; can spoil a step on one rank."""

    def __init__(self, spoil=None):
        self.spoil, self.sample_ids, self.weights, self.saved = spoil, [], [], {}

    def before_step(self, trainer, step, micro_batches):
        self.sample_ids.append([i for batch in micro_batches for i in batch.sample_ids])
        if step == 2 and self.spoil:
            self.weights.append(fingerprint(trainer.model))
            self.saved = digests(Path(trainer.config.training.save))
            if self.spoil == "input" and trainer.rank == 1:
                batch = next(b for b in micro_batches if b.pixel_values is not None)
                batch.pixel_values[0, 0] = math.inf

    def after_backward(self, trainer, step, loss):
        if step == 2 and self.spoil == "gradient" and trainer.rank == 1:
            next(iter(trainer.model.lm_head.parameters())).grad.to_local()[0, 0] = math.nan


def fingerprint(model):
    """A digest of this rank's shards."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        digest.update(local.contiguous().view(torch.uint8).numpy().tobytes() if local.numel() else b"")
    return digest.hexdigest()


def digests(directory):
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != "metrics.jsonl")
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def everyone(thing):
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, thing)
    return gathered


def train(*overrides, observer=None, buffers=None):
    """Run a training; what this rank knows afterwards."""
    saves, save_checkpoint = [], trainer_module.save_checkpoint

    def recorded(root, iteration, *args, **kwargs):
        saves.append(iteration)
        return save_checkpoint(root, iteration, *args, **kwargs)

    trainer_module.save_checkpoint = recorded
    try:
        trainer = Trainer(settings(*overrides), observer, buffers=buffers)
        history = trainer.run()
    finally:
        trainer_module.save_checkpoint = save_checkpoint
    steps = [(m.step, m.loss, m.lr, m.grad_norm, m.tokens) for m in history]
    return trainer, {"steps": steps, "saves": saves, "weights": fingerprint(trainer.model)}


def refused(*overrides):
    """The message of a training that must not start."""
    try:
        Trainer(settings(*overrides))
    except GlmvError as error:
        return str(error)
    return None


def uninterrupted():
    watcher = Watcher()
    trainer, seen = train("training.train_iters=4", f"training.save={WORK}/whole", observer=watcher)
    trainable = sum(p.requires_grad for p in trainer.model.parameters())
    seen |= {"samples": watcher.sample_ids, "without_state": trainable - len(trainer.optimizer.state)}
    fresh = Glm4vMoeForConditionalGeneration(trainer.model.config)
    names = [name for name, _ in fresh.named_buffers() if name not in fresh.state_dict()]
    buffers = dict(trainer.model.named_buffers())
    wrong = [n for n in names if not torch.equal(buffers[n], fresh.get_buffer(n))]
    return seen | {"computed_buffers": len(names), "wrong_buffers": wrong}


def first_loss(loss_type):
    overrides = "training.train_iters=1", "training.save=null", "training.micro_batch_size=2"
    return train(*overrides, f"features.loss_cfg.loss_type={loss_type}")[1]["steps"][0][1]


def rounded_buffers():
    """A run with bf16 buffers; names of those that are not rounded, or not in fp32."""
    trainer, seen = train("training.train_iters=1", f"training.save={WORK}/late", buffers=torch.bfloat16)
    exact = Glm4vMoeForConditionalGeneration(trainer.model.config)
    frequencies = {name: buffer for name, buffer in trainer.model.named_buffers() if name.endswith("inv_freq")}
    wrong = [n for n, b in frequencies.items() if not b.equal(exact.get_buffer(n).bfloat16().float())]
    return seen | {"rounded_buffers": len(frequencies), "wrong_buffers": wrong}


def resumed():
    """Two steps, then two more from what was saved; the schedule is that of four steps in both."""
    train("training.train_iters=4", f"training.save={WORK}/first", "training.save_interval=2")
    return train("training.train_iters=4", f"training.load={WORK}/first/iter_0000002", "training.save=null")[1]


def resumed_with_another_decay():
    trainer = Trainer(settings(f"training.load={WORK}/first/iter_0000002", "training.weight_decay=0.5"))
    return [group["weight_decay"] for group in trainer.optimizer.param_groups]


def spoiled(spoil):
    """One rank's input or gradient is not finite in step 2."""
    watcher, save = Watcher(spoil), WORK / spoil
    message = None
    trainer = Trainer(settings(f"training.save={save}", "training.save_interval=1", "training.train_iters=3"), watcher)
    try:
        trainer.run()
    except GlmvError as error:
        message = str(error)
    return {
        "message": message,
        "steps_done": trainer.iteration,
        "weights_unchanged": watcher.weights == [fingerprint(trainer.model)],
        "checkpoint_untouched": bool(watcher.saved) and watcher.saved == digests(save),
        "samples": watcher.sample_ids[-1],
    }


def different_on_rank_1(rank):
    """A training whose files are complete on rank 0 and not on rank 1."""
    broken = WORK / "broken" / "release"
    if rank == 0:
        shutil.copytree(ROOT / "release", broken)
        next(iter(sorted(broken.glob("*.distcp")))).unlink()
    dist.barrier()
    pictures = "data.dataset_param.basic_parameters.dataset_dir"
    return {
        "missing picture": refused(*([f"{pictures}={WORK / RANK_1_ONLY}"] if rank == 1 else [])),
        "missing shard": refused(*([f"training.load={broken}"] if rank == 1 else [])),
        "missing checkpoint": refused(*([f"training.load={WORK / RANK_1_ONLY}"] if rank == 1 else [])),
    }


def main():
    with process_group("cpu") as process:
        # Garbage in the allocator, so that memory nobody initialised does not look right by luck.
        garbage = [torch.full((size,), 7e7) for size in (4, 8, 16, 64, 4096) for _ in range(64)]
        del garbage
        result = {
            "uninterrupted": uninterrupted(),
            "resumed": resumed(),
            "resumed with another decay": resumed_with_another_decay(),
            "five steps": train("training.train_iters=5", "training.save_interval=2", f"training.save={WORK}/five")[1],
            "late interval": rounded_buffers(),
            "no save": train("training.train_iters=1", "training.save=null")[1],
            "losses": {loss_type: first_loss(loss_type) for loss_type in LOSS_TYPES},
            "input": spoiled("input"),
            "gradient": spoiled("gradient"),
            **different_on_rank_1(process.rank),
            "three ranks asked for": refused("parallel.fully_shard_parallel_size=3"),
            "dead pattern": refused("parallel.fsdp_plan.apply_modules=[lm_head, model.visul]"),
            "no weights": refused("training.load=null"),
        }
        results = everyone(result)
        if process.is_main:
            torch.save(results, WORK / "results.pt")


if __name__ == "__main__":
    main()
