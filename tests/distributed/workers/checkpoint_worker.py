"""Load a release into a sharded model, take a step, save it, and try what must fail on every rank.

Usage: checkpoint_worker.py ROOT OUT_DIRECTORY
Writes messages_<rank>.json, and from rank 0 the full tensors that were loaded and saved.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from glmv.checkpoint.errors import CheckpointError
from glmv.checkpoint.training import load_model, load_optimizer, save_checkpoint
from glmv.model import Glm4vMoeForConditionalGeneration, ModelConfig
from glmv.parallel.process import process_group


def sharded_model(directory):
    with torch.device("meta"):
        model = Glm4vMoeForConditionalGeneration(ModelConfig.from_hf_dir(directory / "hf_assets"))
    for layer in (*model.model.language_model.layers, *model.model.visual.blocks, model):
        fully_shard(layer)
    model.to_empty(device="cpu")
    model.reset_buffers()
    return model


def full(tensors):
    """Whole tensors of a dictionary of shards. Collective."""
    return {key: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for key, t in tensors.items()}


def optimizer_tensors(model, optimizer):
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {f"{names[p]}.{entry}": value for p, state in optimizer.state.items() for entry, value in state.items()}


def random_step(model, optimizer):
    torch.manual_seed(dist.get_rank())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


def message_of(action):
    try:
        action()
    except CheckpointError as error:
        return str(error)
    return "nothing was raised"


def missing_layer(release):
    model = sharded_model(release)
    del model.model.language_model.layers[2]
    load_model(model, release)


def main(root, out):
    release = root / "release"
    model = sharded_model(release)
    load_model(model, release)
    results = {"loaded": full(model.state_dict())}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    random_step(model, optimizer)
    saved = save_checkpoint(root, 1, model, optimizer, state={"a": 1}, assets_from=release)
    results |= {"model": full(model.state_dict()), "optimizer": full(optimizer_tensors(model, optimizer))}

    again = sharded_model(release)
    load_model(again, saved)
    resumed = torch.optim.AdamW(again.parameters())
    load_optimizer(again, resumed, saved)
    results |= {"model again": full(again.state_dict()), "optimizer again": full(optimizer_tensors(again, resumed))}

    messages = {"missing layer": message_of(lambda: missing_layer(release))}
    if dist.get_rank() == 0:
        torch.save(results, out / "results.pt")
        shutil.rmtree(release / "hf_assets")
    dist.barrier()
    messages["rank 0 alone fails"] = message_of(
        lambda: save_checkpoint(root, 2, model, None, state={}, assets_from=release)
    )
    (out / f"messages_{dist.get_rank()}.json").write_text(json.dumps(messages))


if __name__ == "__main__":
    with process_group():
        main(*map(Path, sys.argv[1:]))
