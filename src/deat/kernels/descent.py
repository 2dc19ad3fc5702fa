"""SGD's step as one pass over each large weight, rather than five."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

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


def descend(
    weights: list[Tensor],
    velocities: list[Tensor],
    grads: list[Tensor],
    lr: Tensor,
    momentum: Tensor,
    decay: float,
    copies: list[Tensor | None],
    rest: Callable[..., None],
) -> None:
    """A step of every weight, and of its copy if it has one; `rest` steps the small ones."""
    small: list[tuple[Any, ...]] = []
    for w, v, g, copy in zip(weights, velocities, grads, copies, strict=True):
        if w.numel() >= LARGE and w.dtype == v.dtype and _aligned(w, v, g, w if copy is None else copy):
            grid, held = (-(-w.numel() // BLOCK),), (w, v, g, w if copy is None else copy)
            how: dict[str, Any] = {"DECAY": decay, "COPY": copy is not None, "BLOCK": BLOCK, "num_warps": 8}
            _descend[grid](*held, lr, momentum, w.numel(), **how)
        else:
            small.append((w, v, g, copy))
    if small:
        *columns, kept = (list(column) for column in zip(*small, strict=True))
        rest(*columns, lr, momentum, decay, kept)


def _aligned(*tensors: Tensor) -> bool:
    """Whether the same place in memory is the same number in all."""
    dense = all(t.is_contiguous() or t.is_contiguous(memory_format=torch.channels_last) for t in tensors)
    return dense and len({t.stride() for t in tensors}) == 1
