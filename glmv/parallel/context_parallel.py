"""Context parallel: several ranks share one sequence, each computes its part of it.

    8 ranks, ring_attention_size 2, ulysses_parallel_size 2           ranks 0 to 3 share one micro-batch, 4 to 7 another
        ring rank 0: ulysses ranks 0 1      ring rank 1: ulysses ranks 2 3

Applied from outside the model. Everything that needs its neighbours is computed on the whole micro-batch, which every
rank of a group has, and split then: M-RoPE positions, which feature belongs to which token, shifted labels and their
shares in the loss. So no label, position or picture knows where a border is, and no divisor changes: losses and
gradients of all ranks are summed, as they are without.
"""
# Shapes: B batch, S sequence, L places of this rank, N heads, D head dim, M features, H hidden.

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from glmv.config.parallel import ParallelConfig
from glmv.model import Glm4vMoeForConditionalGeneration
from glmv.model.positions import TEXT
from glmv.model.text import DecoderLayer
from glmv.ops.attention import Visible, text_attention
from glmv.ops.loss import IGNORE_INDEX
from glmv.parallel.mesh import Meshes, ParallelError
from glmv.parallel.ring import Ring
from glmv.parallel.sequence import PADDING, Degrees, Partition
from glmv.parallel.ulysses import Ulysses, head_fault
from glmv.parallel.vision_parallel import SharedVision

KEY = "parallel.ulysses_parallel_size"


@dataclass(frozen=True)
class VisibleInPart(Visible):
    """What a token sees where ranks share the sequence; all of it follows from the partition."""

    partition: Partition | None = None


class ContextParallel:
    """This rank among those that share a sequence.

    Attributes:
        degrees: how many they are.   rank: which of them this is.
        ulysses, ring: the exchanges of attention; None where the degree is 1.
        vision: runs the vision tower.
        partition: of the last micro-batch that the model ran.
    """

    def __init__(self, meshes: Meshes, merge: int) -> None:
        assert meshes.sequence is not None, "no ranks share a sequence"
        assert meshes.context is not None, "no ranks share a sequence"
        ring, ulysses, context = meshes.sequence["ring"], meshes.sequence["ulysses"], meshes.context["context"]
        self.degrees = Degrees(ring.size(), ulysses.size())
        self.rank = context.get_local_rank()
        self.ulysses = Ulysses(ulysses.get_group()) if self.degrees.ulysses > 1 else None
        self.ring = Ring(ring.get_group()) if self.degrees.ring > 1 else None
        self.vision = SharedVision(context.get_group(), merge)
        self.partition: Partition | None = None

    def partition_of(self, document_BS: Tensor) -> Partition:
        """This rank's part of a micro-batch; `document_BS` from `Batch.document_ids`."""
        return Partition.of(document_BS, self.degrees, self.rank)

    def split(
        self,
        input_ids_BS: Tensor,
        features: dict[int, Tensor],
        types_BS: Tensor,
        positions_3BS: Tensor,
        document_BS: Tensor,
    ) -> tuple[Tensor, dict[int, Tensor], Tensor, Tensor, VisibleInPart]:
        """What this rank's text decoder gets, in the order of its arguments.

        Args:
            input_ids_BS: on the model's device, as the features are; the others are on the host.
            features: [M, H] by token type, of all tokens of the micro-batch.
        """
        partition = self.partition = self.partition_of(document_BS)
        device, own_types_BL = input_ids_BS.device, partition.split(types_BS, TEXT)
        own_features = {}
        for kind, features_MH in features.items():
            is_kind_BS = types_BS == kind
            # Counted over the whole batch: a picture that straddles a border goes on where it was cut.
            number_BS = is_kind_BS.flatten().cumsum(0).view_as(types_BS) - 1
            own_M = partition.split(number_BS, PADDING)[own_types_BL == kind]
            own_features[kind] = features_MH.index_select(0, own_M.to(device))
        return (
            partition.split(input_ids_BS, 0),
            own_features,
            own_types_BL.to(device),
            partition.split(positions_3BS, 0).to(device),
            VisibleInPart(partition=partition),
        )

    def split_targets(self, document_BS: Tensor, target_BS: Tensor, share_BS: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's targets and shares [B, L], from those of the whole micro-batch; nothing at padding."""
        partition = self.partition_of(document_BS)
        return partition.split(target_BS, IGNORE_INDEX), partition.split(share_BS, 0)

    def attend(
        self, query_BNLD: Tensor, key_BNLD: Tensor, value_BNLD: Tensor, visible: Visible, *, implementation: str
    ) -> Tensor:
        """Collective, in place of `glmv.ops.attention.text_attention`: [B, N, L, D]; anything at padding."""
        assert isinstance(visible, VisibleInPart), "the model did not split its batch"
        assert visible.partition is not None, "the model did not split its batch"
        documents, states = visible.partition.documents, (query_BNLD, key_BNLD, value_BNLD)
        if self.ulysses is not None:
            states = self.ulysses.to_heads(*states)
        output = self._attend(*states, documents, implementation)
        return output if self.ulysses is None else self.ulysses.to_sequence(output)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, documents: tuple[int, ...], implementation: str
    ) -> Tensor:
        """Among ring ranks; states are those of one ring rank, of some heads."""
        if self.ring is None:
            # Padding stands behind all tokens of a row: a causal mask hides it.
            packed = Visible(documents=list(documents) if len(documents) > 1 else None)
            return text_attention(query, key, value, packed, implementation=implementation)
        end, length = sum(documents), query.shape[2]
        query, key, value = (part[:, :, :end] for part in (query, key, value))
        output = self.ring.attend(query, key, value, documents, implementation=implementation)
        return F.pad(output, (0, 0, 0, length - end))


def apply_context_parallel(model: nn.Module, config: ParallelConfig, meshes: Meshes) -> None:
    """Let the ranks of `meshes.context` share sequences, in place; nothing where the degree is 1.

    Args:
        model: on any device, meta included, not sharded yet.
    Raises:
        ParallelError: Ulysses' ranks do not divide the query heads; the same on every rank.
    """
    if config.ring_attention_size * config.ulysses_parallel_size == 1:
        return
    assert isinstance(model, Glm4vMoeForConditionalGeneration)
    if fault := head_fault(model.config.text.num_attention_heads, config.ulysses_parallel_size, KEY):
        raise ParallelError(fault)
    context = ContextParallel(meshes, model.config.vision.spatial_merge_size)
    model.model.context = context
    for layer in model.model.language_model.layers:
        assert isinstance(layer, DecoderLayer)
        layer.self_attn.attend = context.attend


def context_of(model: nn.Module) -> ContextParallel | None:
    """What `apply_context_parallel` gave a model; None where every rank has its own sequences."""
    context = getattr(getattr(model, "model", None), "context", None)
    assert context is None or isinstance(context, ContextParallel)
    return context
