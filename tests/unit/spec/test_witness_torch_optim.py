"""torch's AdamW and clip_grad_norm_ say the same as the law's, on the same gradients."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spec.optimizer import Hyper, State, adamw, clip, grad_norm

HYPER = Hyper(lr=3e-3, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.1, clip_grad=1.0)


def draw_tensors(seed: int) -> tuple[dict, dict]:
    random = torch.Generator().manual_seed(seed)
    shapes = {"matrix": (5, 3), "bias": (7,), "unused": (2, 2)}
    weights = {n: torch.randn(s, generator=random, dtype=torch.float64) for n, s in shapes.items()}
    gradients = {n: torch.randn(s, generator=random, dtype=torch.float64) * 3 for n, s in shapes.items()}
    return weights, gradients | {"unused": torch.zeros(2, 2, dtype=torch.float64)}


def torch_steps(weights, all_gradients):
    parameters = {n: w.clone().requires_grad_() for n, w in weights.items()}
    h = HYPER
    optimizer = torch.optim.AdamW(
        parameters.values(), lr=h.lr, betas=(h.beta1, h.beta2), eps=h.eps, weight_decay=h.weight_decay
    )
    norms = []
    for gradients in all_gradients:
        for name, p in parameters.items():
            p.grad = gradients[name].clone()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters.values(), h.clip_grad))
        optimizer.step()
    return {n: p.detach() for n, p in parameters.items()}, norms


def law_steps(weights, all_gradients, widen):
    weights = {n: widen(w) for n, w in weights.items()}
    state, norms = State.zeros(weights), []
    for gradients in all_gradients:
        gradients = {n: widen(g) for n, g in gradients.items()}
        norms.append(grad_norm(gradients))
        new, state = adamw(weights, clip(gradients, norms[-1], HYPER.clip_grad), state, HYPER)
        weights = weights | new
    return weights, norms


@settings(max_examples=20)
@given(seed=st.integers(0, 10_000))
def test_three_steps_of_clip_and_adamw(seed):
    weights, first = draw_tensors(seed)
    steps = [first, draw_tensors(seed + 1)[1], {n: g * 1e-3 for n, g in first.items()}]
    found, norms = torch_steps(weights, steps)
    said, law_norms = law_steps(weights, steps, lambda t: t)
    ulps = 64 * torch.finfo(torch.float64).eps
    assert torch.allclose(torch.stack(norms), torch.stack(law_norms), rtol=ulps, atol=0)
    for name in weights:
        assert ((found[name] - said[name]).abs() <= ulps * (1 + weights[name].abs())).all(), name


def test_decay_reaches_weights_without_a_gradient():
    weights, gradients = draw_tensors(3)
    new, _ = adamw(weights, gradients, State.zeros(weights), HYPER)
    assert new["unused"].equal(weights["unused"] * (1 - HYPER.lr * HYPER.weight_decay))


def test_a_small_norm_is_not_scaled_up():
    gradients = {"w": torch.tensor([0.3, 0.4])}
    assert clip(gradients, grad_norm(gradients), 1.0)["w"].equal(gradients["w"])
