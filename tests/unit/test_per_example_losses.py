"""Per-example losses of logits, against the formulas written out one example at a time."""

import math

import pytest
import torch
from torch import Tensor

from deat.tasks.per_example_losses import (
    boosted_cross_entropy,
    cross_entropy,
    kl_divergence,
    margin_loss,
    mart_regulariser,
)

B, CLASSES = 7, 5


def logits(seed: int, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(B, CLASSES, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


Y = torch.tensor([0, 1, 2, 3, 4, 0, 2])


def probabilities(row: list[float]) -> list[float]:
    top = max(row)
    weights = [math.exp(z - top) for z in row]
    return [w / sum(weights) for w in weights]


def wrong(values: list[float], y: int) -> float:
    return max(v for c, v in enumerate(values) if c != y)


def slow_cross_entropy(z: list[float], y: int) -> float:
    return -math.log(probabilities(z)[y])


def slow_margin(z: list[float], y: int) -> float:
    return wrong(z, y) - z[y]


def slow_boosted(z: list[float], y: int) -> float:
    return slow_cross_entropy(z, y) - math.log(1.0001 - wrong(probabilities(z), y) + 1e-12)


def slow_kl(reference: list[float], z: list[float]) -> float:
    pairs = zip(probabilities(reference), probabilities(z), strict=True)
    return sum(p * (math.log(p) - math.log(q)) for p, q in pairs)


def slow_mart(natural: list[float], z: list[float], y: int) -> float:
    p, q = probabilities(natural), probabilities(z)
    divergence = sum(a * (math.log(a) - math.log(b + 1e-12)) for a, b in zip(p, q, strict=True))
    return divergence * (1.0000001 - p[y])


def as_float64(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


LABELLED = [
    (cross_entropy, slow_cross_entropy),
    (margin_loss, slow_margin),
    (boosted_cross_entropy, slow_boosted),
]
CALLS = {
    "cross_entropy": lambda z, r: cross_entropy(z, Y),
    "margin": lambda z, r: margin_loss(z, Y),
    "boosted_cross_entropy": lambda z, r: boosted_cross_entropy(z, Y),
    "kl": lambda z, r: kl_divergence(r, z),
    "mart_regulariser": lambda z, r: mart_regulariser(r, z, Y),
}
every_loss = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())


@pytest.mark.parametrize(("loss", "slow"), LABELLED, ids=[loss.__name__ for loss, _ in LABELLED])
def test_labelled_loss_equals_slow_reference(loss, slow):
    z = logits(0)
    expected = [slow(row, y) for row, y in zip(z.tolist(), Y.tolist(), strict=True)]
    torch.testing.assert_close(loss(z, Y), as_float64(expected))


def test_kl_equals_slow_reference_with_the_reference_first():
    r, z = logits(1), logits(2)
    expected = [slow_kl(a, b) for a, b in zip(r.tolist(), z.tolist(), strict=True)]
    torch.testing.assert_close(kl_divergence(r, z), as_float64(expected))
    torch.testing.assert_close(kl_divergence(z, z), torch.zeros(B, dtype=torch.float64))


def test_mart_regulariser_equals_slow_reference():
    r, z = logits(3), logits(4)
    expected = [slow_mart(a, b, y) for a, b, y in zip(r.tolist(), z.tolist(), Y.tolist(), strict=True)]
    torch.testing.assert_close(mart_regulariser(r, z, Y), as_float64(expected))


@every_loss
def test_gradients_equal_finite_differences(call):
    z, r = logits(5).requires_grad_(), logits(6).requires_grad_()
    # A zero of the other argument keeps losses that ignore it differentiable in it.
    assert torch.autograd.gradcheck(lambda a, b: call(a, b) + 0 * b.sum(1), (z, r))


def test_divergences_send_gradient_into_both_branches():
    for call in (CALLS["kl"], CALLS["mart_regulariser"]):
        z, r = logits(7).requires_grad_(), logits(8).requires_grad_()
        call(z, r).sum().backward()
        assert z.grad.abs().sum() > 0
        assert r.grad.abs().sum() > 0


def test_margin_is_positive_exactly_where_the_prediction_is_wrong():
    z = logits(9)
    assert torch.equal(margin_loss(z, Y) > 0, z.argmax(1) != Y)


@every_loss
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_logits_give_finite_float32_losses(call, dtype):
    z, r = logits(10).to(dtype).requires_grad_(), (20 * logits(11)).to(dtype)
    loss = call(z, r)
    loss.sum().backward()
    assert loss.dtype == torch.float32
    assert loss.shape == (B,)
    assert torch.isfinite(loss).all()
    assert torch.isfinite(z.grad).all()


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_extreme_logits_give_finite_losses_and_gradients(call, dtype):
    z = torch.full((B, CLASSES), -1e4, dtype=dtype)
    z[torch.arange(B), (Y + torch.arange(B)) % CLASSES] = 1e4
    z.requires_grad_()
    r = (-z).detach().requires_grad_()
    loss = call(z, r)
    (loss + 0 * r.sum(1)).sum().backward()
    assert loss.dtype == dtype
    assert torch.isfinite(loss).all()
    assert torch.isfinite(z.grad).all()
    assert torch.isfinite(r.grad).all()


def test_a_certain_wrong_answer_costs_boosted_cross_entropy_a_bounded_extra():
    z = torch.tensor([[1e4, -1e4]])
    y = torch.tensor([1])
    extra = boosted_cross_entropy(z, y) - cross_entropy(z, y)
    assert extra.item() == pytest.approx(-math.log(1e-4), rel=0.01)
