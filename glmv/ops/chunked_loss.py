"""The loss without the logits: the head's matmul, cross entropy and their gradients, a few tokens at a time.

The forward pass makes the logits of one chunk, takes loss and gradients from them, and forgets them; the backward pass
only scales what forward left, the gradients of hidden states and of the head's weight. Of all logits [B, S, V] no more
than a chunk's ever exists. A token's share in the loss is fixed before anything is cut (see `glmv.ops.loss`), so that
chunks are summed and their number is in no result.
"""
# Shapes: B batch, S sequence, N = B S tokens, C tokens of a chunk, H hidden, V vocab.

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from glmv.ops.loss import IGNORE_INDEX
from glmv.ops.precision import at_least_fp32


@dataclass(frozen=True)
class ChunkSize:
    """How many tokens a chunk has.

    Attributes:
        size: `chunkloss_plan.chunk_size`, or `total_chunk_size`.
        per_row: `size` counts for each row of the batch (static chunks), not for all rows together (dynamic ones).
    """

    size: int
    per_row: bool

    def tokens(self, rows: int) -> int:
        """Tokens of a chunk over all rows of a batch."""
        return self.size * rows if self.per_row else self.size


class Targets:
    """What a head needs to return the loss instead of logits.

    No dataclass, tuple or dict: FSDP2 looks into those among a module's inputs, and rounds shares to the compute dtype.

    Attributes:
        target_BS: int64, what each position must predict (see `glmv.ops.loss.shift`), on the model's device; -100 where
            there is nothing to predict.
        share_BS: float64 from `glmv.ops.loss.shares`, on the host, which leaves out chunks that have nothing to learn.
        chunk_tokens: tokens of a chunk, over all rows.
    """

    def __init__(self, target_BS: Tensor, share_BS: Tensor, chunk_tokens: int) -> None:
        self.target_BS = target_BS
        self.share_BS = share_BS
        self.chunk_tokens = chunk_tokens


def chunked_cross_entropy(hidden_BSH: Tensor, weight_VH: Tensor, targets: Targets) -> Tensor:
    """Sum over all targets of share x cross entropy of `hidden @ weight^T`, a scalar in fp32 (float64 in float64).

    Logits are in the dtype of hidden states and weight. A chunk's gradient of the weight is a product in that dtype,
    like that of any matmul; over chunks it is summed in fp32 (float64 in float64) and rounded once.

    Returns:
        The same as `glmv.ops.loss.cross_entropy` of the whole logits; 0 with a graph when there is no target.
    Raises:
        ValueError: there is not one target and one share for each hidden state.
    """
    if not hidden_BSH.shape[:-1] == targets.target_BS.shape == targets.share_BS.shape:
        shapes = [tuple(t.shape) for t in (hidden_BSH, targets.target_BS, targets.share_BS)]
        raise ValueError("hidden states {}, targets {} and shares {} differ in shape".format(*shapes))
    wanted = [torch.is_grad_enabled() and tensor.requires_grad for tensor in (hidden_BSH, weight_VH)]
    return _ChunkedCrossEntropy.apply(hidden_BSH.flatten(0, -2), weight_VH, targets, *wanted)


class Context(FunctionCtx):
    """What forward leaves for backward."""

    saved_tensors: tuple[Tensor | None, ...]


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Gradients are made in forward, of what wants one; they are saved as tensors, so that checkpointing drops them."""

    @staticmethod
    def forward(
        ctx: Context, hidden_NH: Tensor, weight_VH: Tensor, targets: Targets, wants_hidden: bool, wants_weight: bool
    ) -> Tensor:
        wide = at_least_fp32(hidden_NH.dtype)
        loss = hidden_NH.new_zeros((), dtype=wide)
        grad_hidden_NH = torch.zeros_like(hidden_NH) if wants_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=wide) if wants_weight else None
        target_N, share_N = targets.target_BS.flatten(), targets.share_BS.flatten()
        for first in range(0, len(hidden_NH), targets.chunk_tokens):
            chunk = slice(first, first + targets.chunk_tokens)
            if not share_N[chunk].any():
                continue
            hidden_CH, share_C = hidden_NH[chunk], share_N[chunk].to(wide).to(hidden_NH.device)
            part, grad_logits_CV = _loss_and_gradient(F.linear(hidden_CH, weight_VH), target_N[chunk], share_C)
            loss += part
            if grad_hidden_NH is not None:
                grad_hidden_NH[chunk] = grad_logits_CV @ weight_VH
            if grad_weight_VH is not None:
                grad_weight_VH += grad_logits_CV.T @ hidden_CH
        rounded_VH = None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype)
        ctx.save_for_backward(grad_hidden_NH, rounded_VH)  # type: ignore[arg-type] # None may be saved
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden_NH, grad_weight_VH = (None if grad is None else grad * grads[0] for grad in ctx.saved_tensors)
        return grad_hidden_NH, grad_weight_VH, None, None, None


def _loss_and_gradient(logits_CV: Tensor, target_C: Tensor, share_C: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of share x cross entropy in the shares' dtype, and its gradient share x (p - [target]) in the logits'."""
    log_p_CV = logits_CV.log_softmax(-1, dtype=share_C.dtype)
    loss_C = F.nll_loss(log_p_CV, target_C, ignore_index=IGNORE_INDEX, reduction="none")
    # In place: beside the logits there is one tensor of their shape, and then the rounded gradient.
    grad_CV = log_p_CV.exp_().mul_(share_C[:, None])
    # Without a target the share is 0, whatever place it is taken from.
    grad_CV.scatter_add_(-1, target_C.clamp(min=0)[:, None], -share_C[:, None])
    return (loss_C * share_C).sum(), grad_CV.to(logits_CV.dtype)
