import pytest
import torch
from op_cases import draw, leaf

from glmv.ops import grouped_matmul as module
from glmv.ops.grouped_matmul import grouped_matmul, why_unsupported
from spec.numerics import linear

IN, OUT = 24, 16
SPLITS = [[3, 1, 2], [0, 4, 1], [2, 0, 5], [1, 2, 0], [0, 0, 6], [4, 0, 0], [16, 0, 257]]
DTYPES = [torch.float32, torch.bfloat16]


def answers(rows, weight, output, grad):
    output.backward(grad)
    return {"output": output.detach(), "rows": rows.grad, "weight": weight.grad}


@pytest.fixture(params=["native", "wide"])
def cpu(request, monkeypatch):
    """A CPU with 16-bit instructions, and one without."""
    monkeypatch.setattr(module, "cpu_multiplies_wide", lambda dtype: request.param == "wide" and dtype.itemsize == 2)


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_product_and_gradients(split, dtype, device, judge):
    rows_RM, weight_EMN, grad_RN = (
        draw(sum(split), IN),
        draw(len(split), IN, OUT, seed=1),
        draw(sum(split), OUT, seed=2),
    )

    def law(policy):
        rows, weight = leaf(rows_RM, policy.wide), leaf(weight_EMN, policy.wide)
        groups = zip(policy.enter(rows).split(split), weight, strict=True)
        return answers(
            rows, weight, torch.cat([linear(r, w.T, None, policy) for r, w in groups]), policy.round(grad_RN)
        )

    rows, weight = leaf(rows_RM, dtype, device), leaf(weight_EMN, dtype, device)
    output = grouped_matmul(rows, weight, torch.tensor(split, device=device))
    judge(answers(rows, weight, output, grad_RN.to(dtype).to(device)), law, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_expanded_gradient(dtype, device):
    rows, weight = draw(6, IN).to(dtype).to(device), leaf(draw(3, IN, OUT), dtype, device)
    counts = torch.tensor([2, 0, 4], device=device)
    grouped_matmul(rows, weight, counts).sum().backward()
    expanded, weight.grad = weight.grad, None
    grouped_matmul(rows, weight, counts).backward(torch.ones(6, OUT, dtype=dtype, device=device))
    assert expanded.equal(weight.grad)


@pytest.mark.parametrize("frozen", ["rows", "weight"])
def test_only_the_gradient_that_is_needed(frozen, device):
    rows, weight = leaf(draw(6, IN), torch.float32, device), leaf(draw(3, IN, OUT), torch.float32, device)
    still, moving = (rows, weight) if frozen == "rows" else (weight, rows)
    still.requires_grad_(False)
    grouped_matmul(rows, weight, torch.tensor([2, 0, 4], device=device)).sum().backward()
    assert still.grad is None
    assert moving.grad.any()


@pytest.mark.parametrize(
    ("shape", "dtype", "why"),
    [
        ((2, 8, 16), torch.bfloat16, None),
        ((2, 4, 8), torch.float32, None),
        ((2, 4, 8), torch.bfloat16, "a row of 4 elements"),
        ((2, 8, 6), torch.float32, "a row of 6 elements"),
        ((2, 8, 16), torch.float64, "dtype float64 has no grouped kernel"),
    ],
)
def test_what_the_kernel_takes(shape, dtype, why):
    said = why_unsupported(torch.zeros(shape, dtype=dtype))
    assert (said is None) if why is None else said.startswith(why)
