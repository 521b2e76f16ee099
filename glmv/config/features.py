"""`features`: how the loss is normalised, and what is given up for memory."""

from typing import Literal

from pydantic import field_validator, model_validator

from glmv.config.section import Count, ModulePlan, Section


class LossConfig(Section):
    """`features.loss_cfg`."""

    loss_type: Literal["raw", "default", "per_sample_loss", "per_token_loss"] = "raw"
    """What the sum of token losses is divided by; `per_token_loss` = valid targets of the whole global batch."""
    router_aux_loss_coef: float = 0.0
    """Always 0: GLM-4.5V balances its experts by `e_score_correction_bias`."""

    @field_validator("router_aux_loss_coef")
    @classmethod
    def _routing_is_aux_free(cls, value: float) -> float:
        if value != 0:
            raise ValueError("must be 0: GLM-4.5V has no auxiliary routing loss (e_score_correction_bias balances it)")
        return value


class ChunkLossPlan(Section):
    """`features.chunkloss_plan`: the loss computed in pieces, so that logits never exist as a whole."""

    apply_module: Literal["lm_head"] = "lm_head"
    """The output projection whose logits are computed in chunks; GLM-4.5V has one."""
    chunk_size: Count = 1024
    """Tokens of a chunk for every sequence of a micro-batch (static chunks)."""
    total_chunk_size: Count = 4096
    """Tokens of a chunk over all sequences of a micro-batch (dynamic chunks)."""


class RecomputePlan(ModulePlan):
    """`features.recompute_plan`: what is recomputed; no modules named: every text layer and vision block."""

    use_reentrant: bool = False
    """Use torch's reentrant checkpointing."""


class EpBalancePlan(Section):
    """`features.ep_balance_plan`."""

    max_dup_experts_num: Count = 2
    """How many copies of other ranks' hot experts one rank may hold at a time."""


class FeaturesConfig(Section):
    """`features`."""

    loss_cfg: LossConfig = LossConfig()
    """Loss normalisation."""
    enable_chunk_loss: bool = False
    """Compute the loss in chunks of `chunkloss_plan.chunk_size` tokens."""
    enable_dynamic_chunk_loss: bool = False
    """Compute the loss in chunks of `chunkloss_plan.total_chunk_size` tokens, however many sequences there are."""
    chunkloss_plan: ChunkLossPlan = ChunkLossPlan()
    """Chunk sizes."""
    recompute: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    recompute_plan: RecomputePlan = RecomputePlan()
    """What is recomputed."""
    enable_activation_offload: bool = False
    """Move activations to host memory between forward and backward pass."""
    activation_offload_plan: ModulePlan = ModulePlan()
    """Whose activations are moved."""
    enable_ep_balance: bool = False
    """Copy hot experts to idle expert-parallel ranks, for a layer and a pass at a time."""
    ep_balance_plan: EpBalancePlan = EpBalancePlan()
    """Limits of the copying."""

    @model_validator(mode="after")
    def _one_kind_of_chunk(self) -> "FeaturesConfig":
        if self.enable_chunk_loss and self.enable_dynamic_chunk_loss:
            raise ValueError(
                "enable_chunk_loss = true and enable_dynamic_chunk_loss = true exclude each other.\n"
                "Turn one of them off"
            )
        return self
