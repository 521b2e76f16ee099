"""The output projection."""
# Shapes: B batch, S sequence, H hidden, V vocab.

from torch import Tensor

from glmv.model.layers import Linear
from glmv.ops.chunked_loss import Targets, chunked_cross_entropy


class Head(Linear):
    """Logits, or the loss of them. Either is made inside `forward`, where FSDP2 has gathered the weight."""

    def forward(self, hidden_BSH: Tensor, targets: Targets | None = None) -> Tensor:
        """Logits [B, S, V]; with targets the loss, a scalar, and no more logits at a time than a chunk's."""
        if targets is None:
            return super().forward(hidden_BSH)
        return chunked_cross_entropy(hidden_BSH, self.weight, targets)
