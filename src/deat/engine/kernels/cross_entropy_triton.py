"""Cross-entropy of each image, or of a batch on average, and its gradient, as a Triton kernel each."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

TILE_LOGITS = 4096
"""Logits of a tile, which holds all classes of its images; a mean is taken by one program, tile after tile."""


@triton.jit
def cross_entropy_forward_kernel(
    logits, label, loss, N, rows, CO: tl.constexpr, MEAN: tl.constexpr, BN: tl.constexpr, BO: tl.constexpr
) -> None:  # fmt: skip
    """log of the sum of exponentials, less the label's logit."""
    total = tl.zeros((BN,), tl.float32)
    for start in range(0, rows, BN):
        v, mine, n, counts = _load_tile(logits, label, start, N, rows, CO, BN, BO)
        top = tl.max(v, 1)
        found = tl.log(tl.sum(tl.exp(v - top[:, None]), 1)) + top - tl.sum(tl.where(mine, v, 0.0), 1)
        found = tl.where(counts == 0, 0.0, found * counts)
        if MEAN:
            total += found
        else:
            tl.store(loss + n, found, mask=n < N)
    if MEAN:
        tl.store(loss, tl.sum(total, 0) / N)


@triton.jit
def cross_entropy_backward_kernel(
    logits, label, slope, grad, N, rows, CO: tl.constexpr, MEAN: tl.constexpr, BN: tl.constexpr, BO: tl.constexpr
) -> None:  # fmt: skip
    """slope (p - 1 at the label), over N where the mean was taken."""
    v, mine, n, counts = _load_tile(logits, label, 0, N, rows, CO, BN, BO)
    p = tl.exp(v - tl.max(v, 1)[:, None])
    p = p / tl.sum(p, 1)[:, None] - tl.where(mine, 1.0, 0.0)
    if MEAN:  # noqa: SIM108 - Triton builds one of the two
        weight = tl.zeros((BN,), tl.float32) + tl.load(slope) / N
    else:
        weight = tl.load(slope + n, mask=n < N, other=0)
    p = p * (weight * counts)[:, None]
    out = tl.arange(0, BO)
    ok = (n < N)[:, None] & (out < CO)[None, :]
    tl.store(grad + n[:, None] * CO + out[None, :], p.to(grad.dtype.element_ty), mask=ok)


@triton.jit
def _load_tile(
    logits, label, start, N, rows, CO: tl.constexpr, BN: tl.constexpr, BO: tl.constexpr
) -> "tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]":  # fmt: skip
    """A tile of a program's logits, where its labels are, whose it is, and what each counts.

    As torch has it, a label of -100 counts nothing; one that no class has is NaN, not an error.
    """
    n, out = tl.program_id(0) * rows + start + tl.arange(0, BN), tl.arange(0, BO)
    known = (n < N)[:, None] & (out < CO)[None, :]
    v = tl.load(logits + n[:, None] * CO + out[None, :], mask=known, other=0).to(tl.float32)
    v = tl.where((out < CO)[None, :], v, float("-inf"))
    y = tl.load(label + n, mask=n < N, other=-100)
    counts = tl.where(y == -100, 0.0, tl.where((y >= 0) & (y < CO), 1.0, float("nan")))
    return v, out[None, :] == y[:, None], n, counts


def cross_entropy_forward(logits: Tensor, label: Tensor, loss: Tensor) -> None:
    """Write the cross-entropies of logits (N, classes), or, where there is room for one number, their mean."""
    sizes = _constexpr_sizes(logits, loss.dim() == 0)
    rows = len(logits) if sizes["MEAN"] else sizes["BN"]
    cross_entropy_forward_kernel[(-(-len(logits) // rows),)](logits, label, loss, len(logits), rows, **sizes)


def cross_entropy_backward(logits: Tensor, label: Tensor, slope: Tensor, grad: Tensor) -> None:
    """Write their gradients by the logits, times slope."""
    sizes = _constexpr_sizes(logits, slope.dim() == 0)
    rows = sizes["BN"]
    cross_entropy_backward_kernel[(-(-len(logits) // rows),)](logits, label, slope, grad, len(logits), rows, **sizes)


def _constexpr_sizes(logits: Tensor, mean: bool) -> dict[str, Any]:
    count, classes = (1 << (size - 1).bit_length() for size in logits.shape)
    classes = max(2, classes)
    return {"CO": logits.shape[1], "MEAN": mean, "BN": max(1, min(count, TILE_LOGITS // classes)), "BO": classes}
