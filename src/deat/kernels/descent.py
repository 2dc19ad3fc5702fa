"""SGD's step as one pass over each large weight, rather than five."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
LARGE = 1 << 15
"""Weights of fewer numbers are stepped all together."""


@triton.jit
def _descend(w, v, g, lr, momentum, n, DECAY: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """v = momentum v + (g + decay w); w = w - lr v."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = at < n
    weight = tl.load(w + at, mask=ok)
    velocity = tl.load(momentum) * tl.load(v + at, mask=ok) + (tl.load(g + at, mask=ok) + DECAY * weight)
    tl.store(v + at, velocity, mask=ok)
    tl.store(w + at, weight - tl.load(lr) * velocity, mask=ok)


def descend(
    weights: list[Tensor],
    velocities: list[Tensor],
    grads: list[Tensor],
    lr: Tensor,
    momentum: Tensor,
    decay: float,
    rest: Callable[..., None],
) -> None:
    """A step of every weight; `rest` steps the small ones."""
    small: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    for w, v, g in zip(weights, velocities, grads, strict=True):
        if w.numel() >= LARGE and _aligned(w, v, g):
            grid = (-(-w.numel() // BLOCK),)
            _descend[grid](w, v, g, lr, momentum, w.numel(), DECAY=decay, BLOCK=BLOCK, num_warps=8)
        else:
            for held, tensor in zip(small, (w, v, g), strict=True):
                held.append(tensor)
    if small[0]:
        rest(*small, lr, momentum, decay)


def _aligned(*tensors: Tensor) -> bool:
    """Whether the same place in memory is the same number in all."""
    dense = all(t.is_contiguous() or t.is_contiguous(memory_format=torch.channels_last) for t in tensors)
    return dense and len({(t.stride(), t.dtype) for t in tensors}) == 1
