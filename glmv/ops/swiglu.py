"""The gated activation of every MLP in the model."""

import torch.nn.functional as F
from torch import Tensor


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, elementwise, in the dtype of the arguments."""
    return F.silu(gate) * up
