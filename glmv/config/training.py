"""`training`: steps, schedule, optimizer and checkpoints."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from glmv.config.section import Count, Positive, Ratio, Section

KNOWN_PLUGINS = ("mindspeed_mm/fsdp/models/glm4_5v", "mindspeed_mm/fsdp/data/datasets/huggingface")
"""Plugins that published configs name. What they register there is built in here, so nothing is loaded."""

Beta = Annotated[float, Field(ge=0, lt=1)]


class TrainingConfig(Section):
    """`training`."""

    micro_batch_size: Count = 1
    """Samples per rank in one forward pass."""
    gradient_accumulation_steps: Count = 1
    """Micro-batches per rank in one optimizer step."""
    train_iters: Count = 10000
    """Optimizer steps of the whole training."""
    train_epochs: Count | None = None
    """Passes over the data set; where given it takes the place of `train_iters`."""
    seed: Annotated[int, Field(ge=0)] = 42
    """Seed of sample order and of every random number; the same on all ranks."""

    lr: Positive = 5e-5
    """Highest learning rate, reached at the end of the warmup."""
    lr_min: Positive = 0.0
    """Learning rate at the end of the decay."""
    lr_start: Positive = 0.0
    """Learning rate of the first warmup step."""
    lr_warmup_ratio: Ratio = 0.0
    """Share of all steps that warm up."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after the warmup."""
    lr_decay_ratio: Ratio = 1.0
    """Share of all steps at whose end the decay has ended."""

    optimizer: Literal["adamw", "adamw_swap", "muon"] = "adamw"
    """Optimizer."""
    adam_fused: bool = True
    """Use the device's fused AdamW kernel where it has one."""
    adam_beta1: Beta = 0.9
    """AdamW's decay of the first moment."""
    adam_beta2: Beta = 0.999
    """AdamW's decay of the second moment."""
    adam_eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's addend in the denominator."""
    weight_decay: Positive = 0.0
    """Decoupled weight decay."""
    clip_grad: Positive = 1.0
    """Largest global gradient norm; 0 measures the norm and clips nothing."""
    clip_grad_foreach: bool = True
    """Scale gradients by multi-tensor kernels when clipping."""

    init_model_with_meta_device: bool = False
    """Create the model without memory and load the checkpoint into its shards."""
    load: str | None = None
    """Checkpoint root to start from."""
    load_format: Literal["auto", "hf", "dcp"] = "auto"
    """Format of the checkpoint to load."""
    load_strict: bool = False
    """Stop on missing and on unexpected keys."""
    load_rank0_and_broadcast: bool = False
    """Read the checkpoint on rank 0 and broadcast it."""
    no_load_optim: bool = False
    """Leave the optimizer state of the checkpoint; start it anew."""
    no_load_rng: bool = False
    """Leave the random state of the checkpoint."""
    save: str | None = None
    """Checkpoint root to write to; null saves nothing."""
    save_format: Literal["auto", "hf", "dcp"] = "auto"
    """Format of written checkpoints."""
    save_interval: Count = 1
    """Steps between checkpoints; the last step is always saved."""
    save_async: bool = False
    """Write checkpoints while training goes on."""
    no_save_optim: bool = False
    """Write checkpoints without optimizer state."""
    no_save_rng: bool = False
    """Write checkpoints without random state."""
    log_interval: Count = 1
    """Steps between log lines."""
    use_deter_comp: bool = False
    """Use deterministic algorithms only."""
    plugin: list[str] = Field(default_factory=list)
    """Accepted because published configs carry it; see `KNOWN_PLUGINS`."""

    @field_validator("plugin")
    @classmethod
    def _plugins_are_built_in(cls, value: list[str]) -> list[str]:
        unknown = [name for name in value if name.strip("./") not in KNOWN_PLUGINS]
        if unknown:
            raise ValueError(
                f"names {', '.join(unknown)}, and glmv loads no plugins; it accepts {' and '.join(KNOWN_PLUGINS)}, "
                "whose parts are built in"
            )
        return value

    @model_validator(mode="after")
    def _schedule_rises_to_lr(self) -> "TrainingConfig":
        for name in ("lr_start", "lr_min"):
            if getattr(self, name) > self.lr:
                raise ValueError(f"{name} = {getattr(self, name)} must not be larger than lr = {self.lr}")
        return self

    @model_validator(mode="after")
    def _hf_holds_weights_only(self) -> "TrainingConfig":
        if self.load_format == "hf" and not (self.no_load_optim and self.no_load_rng):
            raise ValueError(
                "load_format = 'hf' brings weights only.\n"
                "Set no_load_optim and no_load_rng to true, or load_format to dcp"
            )
        return self
