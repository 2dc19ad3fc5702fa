"""SGD's step as one pass over each large weight, rather than five, and one over all small ones."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from deat.kernels.listed import Listed, Step, fits

BLOCK = 4096
LARGE = 1 << 15
"""Weights of fewer numbers are stepped all together."""


@triton.jit
def _descend(
    w, v, g, copy, lr, momentum, n, DECAY: tl.constexpr, COPY: tl.constexpr, BLOCK: tl.constexpr
) -> None:  # fmt: skip
    """v = momentum v + (g + decay w); w = w - lr v, and a copy of it in another type."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = at < n
    weight = tl.load(w + at, mask=ok)
    grad = tl.load(g + at, mask=ok).to(weight.dtype)
    velocity = tl.load(momentum) * tl.load(v + at, mask=ok) + (grad + DECAY * weight)
    weight -= tl.load(lr) * velocity
    tl.store(v + at, velocity, mask=ok)
    tl.store(w + at, weight, mask=ok)
    if COPY:
        tl.store(copy + at, weight.to(copy.dtype.element_ty), mask=ok)


class Descent:
    """A step of every weight, and of its copy if it has one: a launch for each large one, one for all small ones."""

    def __init__(self, rest: Callable[..., None]) -> None:
        self.rest, self._listed = rest, Listed()

    def __call__(
        self,
        weights: list[Tensor],
        velocities: list[Tensor],
        grads: list[Tensor],
        lr: Tensor,
        momentum: Tensor,
        decay: float,
        copies: list[Tensor | None],
    ) -> None:
        """Step them; `rest` steps those whose numbers lie in another order than their gradients'."""
        steps = list(map(Step, weights, velocities, grads, copies))
        aligned = [step for step in steps if _aligned(step)]
        small = [step for step in aligned if step.weight.numel() < LARGE and fits(step)]
        large = [step for step in aligned if step.weight.numel() >= LARGE]
        for step in large:
            _step_one(step, lr, momentum, decay)
        if small:
            self._listed.step(small, lr, momentum, decay)
        done = {id(step) for step in (*small, *large)}
        if odd := [step for step in steps if id(step) not in done]:
            *columns, kept = (list(column) for column in zip(*odd, strict=True))
            self.rest(*columns, lr, momentum, decay, kept)


def _step_one(step: Step, lr: Tensor, momentum: Tensor, decay: float) -> None:
    w, copies = step.weight, step.copy is not None
    held = (w, step.velocity, step.grad, step.copy if step.copy is not None else w)
    grid, how = (-(-w.numel() // BLOCK),), {"DECAY": decay, "COPY": copies, "BLOCK": BLOCK}
    _descend[grid](*held, lr, momentum, w.numel(), num_warps=8, **how)


def _aligned(step: Step) -> bool:
    """Whether the same place in memory is the same number in all."""
    tensors = [t for t in step if t is not None]
    dense = all(t.is_contiguous() or t.is_contiguous(memory_format=torch.channels_last) for t in tensors)
    return dense and len({_order(t) for t in tensors}) == 1 and step.weight.dtype == step.velocity.dtype


def _order(x: Tensor) -> tuple[int, ...]:
    """How a tensor's numbers lie; along a side of one number there is no order."""
    return tuple(stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1)
