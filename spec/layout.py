"""How the machine stores experts, against how they are published.

Stacked: `experts.gate_up_proj` [E, H, 2I] (gate columns first) and `experts.down_proj` [E, I, H], used as x @ W.
Published: per expert `gate_proj.weight` and `up_proj.weight` [I, H], `down_proj.weight` [H, I], used as x @ W^T.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def per_expert(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stacked names to published names; everything else as it is."""
    published: dict[str, Tensor] = {}
    for name, w in weights.items():
        if name.endswith("experts.gate_up_proj"):
            prefix, inner = name.removesuffix("gate_up_proj"), w.shape[-1] // 2
            for expert in range(w.shape[0]):
                published[f"{prefix}{expert}.gate_proj.weight"] = w[expert, :, :inner].T
                published[f"{prefix}{expert}.up_proj.weight"] = w[expert, :, inner:].T
        elif name.endswith("experts.down_proj"):
            prefix = name.removesuffix("down_proj")
            for expert in range(w.shape[0]):
                published[f"{prefix}{expert}.down_proj.weight"] = w[expert].T
        else:
            published[name] = w
    return published


def stacked(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Published names to stacked names; everything else as it is."""
    result: dict[str, Tensor] = {}
    for name, w in weights.items():
        if ".mlp.experts." not in name:
            result[name] = w
        elif ".experts.0.down_proj." in name:
            prefix = name.removesuffix("0.down_proj.weight")
            count = sum(1 for other in weights if other.startswith(prefix) and other.endswith("down_proj.weight"))
            gate, up, down = (
                [weights[f"{prefix}{expert}.{part}_proj.weight"].T for expert in range(count)]
                for part in ("gate", "up", "down")
            )
            result[f"{prefix}gate_up_proj"] = torch.cat([torch.stack(gate), torch.stack(up)], -1)
            result[f"{prefix}down_proj"] = torch.stack(down)
    return result
