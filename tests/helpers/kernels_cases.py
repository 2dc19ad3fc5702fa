"""What our batch-norm kernels must agree with, for tests on a CPU (interpreted) and on a GPU."""

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from deat.engine.kernels.batch_norm import fused_batch_norm

Answer = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
LAST = torch.channels_last


class Case(NamedTuple):
    channels: int
    dtype: torch.dtype
    place: str  # of the sum: "before", "behind" or ""
    batch: bool
    relu: bool


def cases(*dtypes: torch.dtype, channels: tuple[int, ...] = (64, 24)) -> list[Case]:
    both = (True, False)
    return [Case(*how) for how in product(channels, dtypes, ("", "before", "behind"), both, both)]


def compare(case: Case, device: str, images: int) -> tuple[list[Tensor], list[Tensor]]:
    """(torch's, ours): outputs, gradients by both inputs, weight and bias, and running statistics."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    shape = (images, case.channels, 5, 5)
    exact = torch.promote_types(case.dtype, torch.float32)
    x, other, by_y, by_total = (draw(*shape).add(1).contiguous(memory_format=LAST) for _ in range(4))
    weight, bias, mean = (draw(case.channels, dtype=exact) for _ in range(3))
    var = draw(case.channels, dtype=exact).abs() + 0.5
    if case.relu:  # at the ReLU's edge rounding decides whether it is open
        by_y = torch.where(_behind(case, x, other, weight, bias, mean, var).abs() < 1e-4, 0, by_y)

    def run(answer: Callable[..., tuple[Tensor, Tensor]]) -> list[Tensor]:
        leaves = [t.clone(memory_format=torch.preserve_format).requires_grad_() for t in (x, other, weight, bias)]
        stats = [mean.clone(), var.clone()]
        y, total = answer(*leaves, *stats)
        grads = torch.autograd.grad((y, total), leaves, (by_y, by_total), allow_unused=True)
        return [y.detach(), total.detach(), *(g for g in grads if g is not None), *stats]

    def torchs(a: Tensor, b: Tensor, w: Tensor, c: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        total = a + b if case.place == "before" else a.clone(memory_format=torch.preserve_format)
        y = F.batch_norm(total, m, v, w, c, case.batch, 0.1, 1e-5)
        y = y + b if case.place == "behind" else y
        return (F.relu(y) if case.relu else y), total

    def ours(a: Tensor, b: Tensor, w: Tensor, c: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        before, behind = b if case.place == "before" else None, b if case.place == "behind" else None
        return fused_batch_norm(a, before, m, v, w, c, case.batch, 0.1, 1e-5, residual=behind, relu=case.relu)

    return run(torchs), run(ours)


def _behind(case: Case, x: Tensor, other: Tensor, *columns: Tensor) -> Tensor:
    """What goes into the ReLU, in float64."""
    x, other, weight, bias, mean, var = (t.double() for t in (x, other, *columns))
    total = x + other if case.place == "before" else x
    y = F.batch_norm(total, mean.clone(), var.clone(), weight, bias, case.batch, 0.1, 1e-5)
    return y + other if case.place == "behind" else y


def distance(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / one.double().norm().clamp_min(1e-30))
