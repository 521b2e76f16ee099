"""Ascend's accuracy classes see wrong results, and nothing in right ones."""

import pytest
import torch

from glmv.verify.npu_accuracy import EXACT, LEVELS, STANDARD, ULP, judge, judge_all, ulps
from spec.npu_ops import OPERATORS

BF16, FP32 = torch.bfloat16, torch.float32
DTYPES = [torch.float16, BF16, FP32]


def numbers(seed=0, size=4096):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rounded(dtype):
    """A benchmark of one rounding, and its truth."""
    truth = numbers()
    return truth.to(dtype), truth


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("standard", [*LEVELS, ULP, EXACT])
def test_a_result_like_the_benchmark_passes(standard, dtype):
    benchmark, truth = rounded(dtype)
    assert judge(standard, benchmark.clone(), benchmark, truth) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", ["L0", "L1"])
def test_a_result_that_is_rounded_twice_here_and_there_passes(level, dtype):
    benchmark, truth = rounded(dtype)
    neighbour = torch.where(numbers(1) > 0, torch.inf, -torch.inf).to(dtype)
    other = torch.where(numbers(2) > 2, benchmark.nextafter(neighbour), benchmark)
    assert not other.equal(benchmark)
    assert judge(level, other, benchmark, truth) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("standard", [*LEVELS, EXACT])
@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (lambda x: x * (1 + 16 * torch.finfo(x.dtype).eps), "relative"),
        (lambda x: x.flip(0), "rms"),
        (lambda x: torch.cat([x[:-1], -x[-1:]]), "max relative"),
        (lambda x: x.masked_fill(x > 3, float("nan")), "not finite"),
        (lambda x: x + torch.finfo(x.dtype).eps * x.abs(), "balance"),
        (lambda x: x[:-1], "expected"),
        (lambda x: x.double(), "expected"),
    ],
    ids=["scaled", "reordered", "one wrong sign", "nan", "biased", "shape", "dtype"],
)
def test_a_wrong_result_fails(fault, named, standard, dtype):
    benchmark, truth = rounded(dtype)
    found = judge(standard, fault(benchmark.clone()), benchmark, truth)
    assert found
    assert standard == EXACT or any(named in said for said in found), found


def test_noise_on_small_values_fails():
    truth = numbers() * 2**-14
    benchmark = truth.to(BF16)
    found = judge("L0", benchmark + 2**-15, benchmark, truth)
    assert any("small values" in said for said in found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_wrong_product_fails(dtype):
    benchmark, truth = rounded(dtype)
    assert judge(ULP, benchmark.flip(0), benchmark, truth)
    assert judge(ULP, benchmark * (1 + 256 * torch.finfo(dtype).eps), benchmark, truth)


def test_one_wrong_element_of_a_thousand_16_bit_products_fails():
    benchmark, truth = rounded(BF16)
    wrong = benchmark.clone()
    wrong[::500] *= 1.5
    assert "more than 1 ulp" in judge(ULP, wrong, benchmark, truth)[0]


def test_units_in_the_last_place():
    truth = torch.tensor([1.0, 1.5, 3.0, -4.0], dtype=torch.float64)
    assert ulps((truth + 2 * truth.sign() * 2**-7).to(BF16), truth).tolist() == [2, 2, 1, 0]


def test_a_comparison_that_could_not_fail_is_refused():
    with pytest.raises(ValueError, match="could not fail"):
        judge("L0", torch.zeros(3), torch.zeros(3), torch.zeros(3, dtype=torch.float64))


def test_a_gradient_that_must_be_zero_is():
    zero, truth = torch.zeros(3), torch.zeros(3, dtype=torch.float64)
    assert judge_all("L0", {"dW": zero}, {"dW": zero}, {"dW": truth}) == []
    assert judge_all("L0", {"dW": zero + 1e-30}, {"dW": zero}, {"dW": truth}) == ["dW: must be exactly zero"]


def test_a_missing_tensor_is_no_pass():
    with pytest.raises(KeyError, match="not the same tensors"):
        judge_all("L0", {}, {"dW": torch.ones(1)}, {"dW": torch.ones(1)})


def test_every_standard_is_of_an_operator_of_the_contract():
    assert {name.removesuffix(".backward") for name in STANDARD} <= OPERATORS.keys()
