"""The machine's operators on an NPU, and the same by the contract on the CPU: outputs and gradients by name."""
# Shapes: T tokens, H hidden, K experts per token, R rows.

from collections.abc import Callable
from dataclasses import dataclass

import torch
from expert_cases import ROUTINGS
from op_cases import draw
from torch import Tensor

from glmv.ops.attention import attention, segment_attention
from glmv.ops.experts import Order, combine, permute
from glmv.ops.kernels import Kernels
from glmv.ops.norm import rms_norm
from glmv.ops.npu.grouped_matmul import grouped_matmul
from glmv.ops.npu.swiglu import swiglu_of_halves
from glmv.ops.rope import rotate
from spec.npu_ops import OPERATORS

FUSED = Kernels(attention="flash")
ROUTING = torch.tensor(ROUTINGS["balanced"])
EPS = 1e-5
ANGLES = draw(2, 5, 8, seed=3).repeat(1, 1, 2)[:, None]
LENGTHS = [3, 1, 4]
FUTURE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


@dataclass(frozen=True)
class Case:
    """One operator of the machine.

    Attributes:
        operator: the operator of torch_npu behind it, as in `STANDARD`.   inputs: float64, by name.
        run: the machine's operator on those inputs.   law: the contract's forward and gradient of them:
            (outputs, gradients of inputs that have one), both by name.
        fixed: names of inputs that get no gradient.   wide: of those that stay fp32 beside 16-bit ones.
    """

    operator: str
    inputs: dict[str, Tensor]
    run: Callable[..., Tensor]
    law: Callable[[dict[str, Tensor], Tensor], tuple[Tensor, dict[str, Tensor]]]
    fixed: tuple[str, ...] = ()
    wide: tuple[str, ...] = ()

    def grad(self, output: Tensor) -> Tensor:
        """The gradient that comes back."""
        return draw(*output.shape, seed=9).to(output.dtype)

    def on_device(self, dtype: torch.dtype, device: torch.device) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Output and gradients of the machine."""
        given = {name: value.to(device) for name, value in self.given(dtype).items()}
        leaves = {name: value.requires_grad_() for name, value in given.items() if name not in self.fixed}
        output = self.run(**given)
        output.backward(self.grad(output.cpu()).to(device))
        return {"output": output.detach()}, {name: value.grad for name, value in leaves.items()}

    def by_contract(self, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The same by the contract, in the device's dtype or in float64."""
        given = self.given(dtype)
        output, found = self.law(given, self)
        return {"output": output}, {n: g.to(given[n].dtype) for n, g in found.items() if n not in self.fixed}

    def given(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The inputs, floating ones in `dtype` or, where they are `wide`, at least in fp32."""
        wide = torch.promote_types(dtype, torch.float32)
        dtypes = {name: wide if name in self.wide else dtype for name in self.inputs}
        return {n: x.to(dtypes[n], copy=True) if x.is_floating_point() else x for n, x in self.inputs.items()}


def contract(name: str, *arguments: str, **options: object) -> Callable:
    """A law that is one operator of the contract: its tensor arguments are the inputs of these names."""

    def law(given, case):
        operator = OPERATORS[name]
        args = tuple(given[argument] for argument in arguments)
        outputs = operator.forward(*args, **options)
        output = outputs[0] if isinstance(outputs, tuple) else outputs
        grads = operator.backward((case.grad(output),), args, options, outputs)
        return output, {n: g for n, g in zip(arguments, grads) if g is not None}

    return law


def partial_rotary_law(given, case):
    """The contract on the channels that turn; the others pass through, and so do their gradients."""
    width = given["cos"].shape[-1]
    turned = {**given, "states": given["states"][..., :width]}
    output = torch.cat(
        [OPERATORS["npu_rotary_mul"].forward(*turned.values()), given["states"][..., width:]], dim=-1
    )  # fmt: skip
    grad = case.grad(output)
    back = OPERATORS["npu_rotary_mul_backward"].forward(grad[..., :width], *turned.values())[0]
    return output, {"states": torch.cat([back, grad[..., width:]], dim=-1)}


def products_law(given, case):
    """One product a group; sums in fp32 (float64 for the truth), rounded once."""
    rows, weight = given["rows"], given["weight"]
    wide = torch.promote_types(rows.dtype, torch.float32)
    spans = rows.split(given["counts"].tolist())
    output = torch.cat([part.to(wide) @ w.to(wide) for part, w in zip(spans, weight)]).to(rows.dtype)
    grads = case.grad(output).split(given["counts"].tolist())
    to_rows = torch.cat([grad.to(wide) @ w.to(wide).T for grad, w in zip(grads, weight)])
    to_weight = torch.stack([part.to(wide).T @ grad.to(wide) for part, grad in zip(spans, grads)])
    return output, {"rows": to_rows, "weight": to_weight}


def segments_law(given, case):
    """Each segment alone, as a batch of one, by the contract with another layout."""
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    states = [given[name].transpose(0, 1) for name in ("query", "key", "value")]
    options = {"scale": 16**-0.5, "actual_seq_qlen": ends, "actual_seq_kvlen": ends}
    operator = OPERATORS["npu_fusion_attention"]
    args = (*states, given["query"].shape[0], "TND")
    outputs = operator.forward(*args, **options)
    output = outputs[0].transpose(0, 1)
    grads = operator.backward((case.grad(output).transpose(0, 1),), args, options, outputs)
    return output, {name: g.transpose(0, 1) for name, g in zip(("query", "key", "value"), grads)}


def attention_law(given, case):
    """Causal, written as a mask of the whole sequence."""
    length = given["query"].shape[2]
    operator, args = OPERATORS["npu_fusion_attention"], (*given.values(), given["query"].shape[1], "BNSD")
    options = {"scale": 16**-0.5, "atten_mask": FUTURE[:length, :length], "sparse_mode": 0}
    outputs = operator.forward(*args, **options)
    grads = operator.backward((case.grad(outputs[0]),), args, options, outputs)
    return outputs[0], dict(zip(("query", "key", "value"), grads))


def permuted(hidden: Tensor, index: Tensor) -> Tensor:
    return permute(hidden, index, 6, kernels=FUSED).rows_RH


def combined(rows: Tensor, weight: Tensor, inverse: Tensor) -> Tensor:
    return combine(rows, weight, Order(inverse.int()), kernels=FUSED)


CASES = {
    "permute": Case(
        "npu_moe_token_permute",
        {"hidden": draw(7, 24), "index": ROUTING},
        permuted,
        contract("npu_moe_token_permute", "hidden", "index"),
        fixed=("index",),
    ),
    "combine": Case(
        "npu_moe_token_unpermute",
        {"rows": draw(14, 24), "inverse": ROUTING.flatten().argsort(stable=True).argsort().int(), "weight": draw(7, 2)},
        combined,
        contract("npu_moe_token_unpermute", "rows", "inverse", "weight"),
        fixed=("inverse",),
        wide=("weight",),
    ),
    "grouped_matmul": Case(
        "npu_grouped_matmul",
        {"rows": draw(14, 24), "weight": draw(4, 24, 20, seed=1), "counts": torch.tensor([5, 0, 8, 1])},
        lambda rows, weight, counts: grouped_matmul(rows, weight, counts),
        products_law,
        fixed=("counts",),
    ),
    "swiglu": Case(
        "npu_swiglu", {"halves": draw(7, 40)}, lambda halves: swiglu_of_halves(halves), contract("npu_swiglu", "halves")
    ),
    "rms_norm": Case(
        "npu_rms_norm",
        {"hidden": draw(2, 5, 24), "weight": draw(24, seed=1)},
        lambda hidden, weight: rms_norm(hidden, weight, EPS, kernels=FUSED),
        contract("npu_rms_norm", "hidden", "weight", epsilon=EPS),
    ),
    "rotate_some_channels": Case(
        "npu_rotary_mul",
        {"states": draw(2, 3, 5, 24), "cos": ANGLES.cos(), "sin": ANGLES.sin()},
        lambda states, cos, sin: rotate(states, cos, sin, kernels=FUSED),
        partial_rotary_law,
        fixed=("cos", "sin"),
    ),
    "rotate_patches": Case(
        "npu_rotary_mul",
        {"states": draw(5, 3, 16), "cos": ANGLES[0, 0, :, None].cos(), "sin": ANGLES[0, 0, :, None].sin()},
        lambda states, cos, sin: rotate(states, cos, sin, kernels=FUSED),
        partial_rotary_law,
        fixed=("cos", "sin"),
    ),
    "causal_attention": Case(
        "npu_fusion_attention",
        {"query": draw(2, 6, 7, 16), "key": draw(2, 2, 7, 16, seed=1), "value": draw(2, 2, 7, 16, seed=2)},
        lambda query, key, value: attention(query, key, value, None, implementation="flash", causal=True),
        attention_law,
    ),
    "attention_in_segments": Case(
        "npu_fusion_attention",
        {"query": draw(6, 8, 16), "key": draw(6, 8, 16, seed=1), "value": draw(6, 8, 16, seed=2)},
        lambda query, key, value: segment_attention(query, key, value, LENGTHS, implementation="flash"),
        segments_law,
    ),
}  # fmt: skip
