"""The model as training needs it: created without memory, sharded, then filled from the checkpoint."""

from pathlib import Path

import torch
from torch import nn

from glmv.checkpoint.dcp import read_metadata
from glmv.checkpoint.paths import ASSETS
from glmv.checkpoint.training import LoadReport, load_model, resolve_checkpoint
from glmv.config import Config, ConfigError, torch_dtype
from glmv.config.features import FeaturesConfig
from glmv.config.parallel import ParallelConfig
from glmv.model import Glm4vMoeForConditionalGeneration, ModelConfig
from glmv.ops.chunked_loss import ChunkSize
from glmv.ops.kernels import Kernels
from glmv.parallel.context_parallel import apply_context_parallel
from glmv.parallel.expert_parallel import apply_expert_parallel
from glmv.parallel.fsdp import apply_fsdp
from glmv.parallel.mesh import Meshes, build_meshes
from glmv.parallel.process import Process, on_all_ranks
from glmv.train.optimizer import freeze
from glmv.train.recompute import apply_recompute

# `flash_attention_2` asks for the device's own fused kernel.
ATTENTION = {"flash_attention_2": "flash"}


def master_dtype(config: Config) -> torch.dtype:
    """Dtype of stored weights, gradients and optimizer state: fp32, or float64 where the compute dtype is."""
    return torch.promote_types(torch.float32, torch_dtype(config.parallel.fsdp_plan.param_dtype) or torch.float32)


def checkpoint_to_load(config: Config) -> Path:
    """The iteration that `training.load` points at.

    Raises:
        ConfigError: the config names none.   CheckpointError: there is none.
    """
    if config.training.load is None:
        raise ConfigError(
            "training.load is not set, and glmv never trains from random weights.\n"
            "Convert a Hugging Face directory with `glmv convert hf-to-dcp` and name the result there."
        )
    return resolve_checkpoint(config.training.load)


def read_model_config(config: Config) -> ModelConfig:
    """config.json of `model.model_name_or_path`, a Hugging Face directory or a checkpoint, which carries one."""
    named = Path(config.model.model_name_or_path)
    return ModelConfig.from_hf_dir(named if (named / "config.json").is_file() else resolve_checkpoint(named) / ASSETS)


def create_model(config: Config, model_config: ModelConfig) -> Glm4vMoeForConditionalGeneration:
    """The model on the meta device, in its master dtype, with frozen parameters marked.

    Raises:
        PatternError: a pattern of `model.freeze` matches nothing.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(master_dtype(config))
    try:
        with torch.device("meta"):
            model = Glm4vMoeForConditionalGeneration(
                model_config,
                Kernels(
                    grouped=config.model.use_grouped_expert_matmul,
                    attention=ATTENTION.get(config.model.attn_implementation, config.model.attn_implementation),
                    fused=config.parallel.ep_plan.use_npu_fused_ops,
                ),
            )
    finally:
        torch.set_default_dtype(before)
    freeze(model, config.model.freeze)
    return model


def parallelize(model: nn.Module, parallel: ParallelConfig, features: FeaturesConfig, meshes: Meshes) -> list[str]:
    """Spread a model over ranks, in place: sequences and experts first, then recomputation, then FSDP around both.

    Args:
        model: on any device, meta included; what is frozen is marked already.
    Returns:
        Names of the FSDP units, parents first.
    Raises:
        PatternError: a pattern matches nothing.   ParallelError: sizes do not fit the model.
    """
    apply_context_parallel(model, parallel, meshes)
    experts = apply_expert_parallel(model, parallel, features, meshes)
    apply_recompute(model, features)
    # In chunks the loss is computed inside the model, which returns it in place of logits.
    return apply_fsdp(model, parallel, meshes, experts, returns_loss=chunk_size_of(features) is not None)


def chunk_size_of(features: FeaturesConfig) -> ChunkSize | None:
    """How many tokens' logits may exist at a time; None for no limit."""
    plan = features.chunkloss_plan
    if features.enable_chunk_loss:
        return ChunkSize(plan.chunk_size, per_row=True)
    if features.enable_dynamic_chunk_loss:
        return ChunkSize(plan.total_chunk_size, per_row=False)
    return None


def build_model(
    config: Config, process: Process, directory: Path, buffers: torch.dtype | None = None
) -> tuple[Glm4vMoeForConditionalGeneration, LoadReport]:
    """Collective: the sharded model on this rank's device, with the weights of a checkpoint.

    Args:
        directory: one iteration of a training checkpoint (what `resolve_checkpoint` returns).
        buffers: dtype that the rotary frequencies are rounded to; None leaves them exact.
    Raises:
        AgreedError: a pattern matches nothing, config or checkpoint cannot be read, or the checkpoint's tensors are not
            the model's, by name.
    """
    meshes = build_meshes(config.parallel, process)
    with on_all_ranks():
        model = create_model(config, read_model_config(config))
        parallelize(model, config.parallel, config.features, meshes)
        # Read here too, so that a rank without the files fails before the others wait for it to load.
        read_metadata(directory)
    model.to_empty(device=process.device)
    # No checkpoint holds the rotary frequencies, and after to_empty they are whatever was in memory.
    model.reset_buffers(buffers)
    with on_all_ranks():
        report = load_model(model, directory)
    return model, report
