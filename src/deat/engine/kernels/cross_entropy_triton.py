"""The cross-entropy of each image, or its mean over a batch, and its gradient, as one Triton kernel each."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from deat.engine.kernels.kernel_utils import ceil_div, next_power_of_two

TILE_LOGITS = 4096
"""Logits of a tile, which holds all classes of its images; one program computes a mean, tile by tile."""


@triton.jit
def cross_entropy_forward_kernel(
    logits, label, loss, N, rows, CO: tl.constexpr, MEAN: tl.constexpr, BN: tl.constexpr, BO: tl.constexpr
) -> None:  # fmt: skip
    """Write the log of the sum of exponentials, minus the label's logit."""
    total = tl.zeros((BN,), tl.float32)
    for start in range(0, rows, BN):
        v, is_label, n, counts = _load_tile(logits, label, start, N, rows, CO, BN, BO)
        top = tl.max(v, 1)
        nll = tl.log(tl.sum(tl.exp(v - top[:, None]), 1)) + top - tl.sum(tl.where(is_label, v, 0.0), 1)
        nll = tl.where(counts == 0, 0.0, nll * counts)
        if MEAN:
            total += nll
        else:
            tl.store(loss + n, nll, mask=n < N)
    if MEAN:
        tl.store(loss, tl.sum(total, 0) / N)


@triton.jit
def cross_entropy_backward_kernel(
    logits, label, grad_out, grad, N, rows, CO: tl.constexpr, MEAN: tl.constexpr, BN: tl.constexpr, BO: tl.constexpr
) -> None:  # fmt: skip
    """Write grad_out * (p - 1 at the label), divided by N for a mean."""
    v, is_label, n, counts = _load_tile(logits, label, 0, N, rows, CO, BN, BO)
    p = tl.exp(v - tl.max(v, 1)[:, None])
    p = p / tl.sum(p, 1)[:, None] - tl.where(is_label, 1.0, 0.0)
    if MEAN:
        weight = tl.zeros((BN,), tl.float32) + tl.load(grad_out) / N
    else:
        weight = tl.load(grad_out + n, mask=n < N, other=0)
    p = p * (weight * counts)[:, None]
    out = tl.arange(0, BO)
    mask = (n < N)[:, None] & (out < CO)[None, :]
    tl.store(grad + n[:, None] * CO + out[None, :], p.to(grad.dtype.element_ty), mask=mask)


@triton.jit
def _load_tile(
    logits, label, start, N, rows, CO: tl.constexpr, BN: tl.constexpr, BO: tl.constexpr
) -> "tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]":  # fmt: skip
    """Load a tile: its logits, the mask of its labels, its images, and the weight of each image.

    As in torch, a label of -100 has weight 0. Any other label without a class gives NaN, not an error.
    """
    n, out = tl.program_id(0) * rows + start + tl.arange(0, BN), tl.arange(0, BO)
    mask = (n < N)[:, None] & (out < CO)[None, :]
    v = tl.load(logits + n[:, None] * CO + out[None, :], mask=mask, other=0).to(tl.float32)
    v = tl.where((out < CO)[None, :], v, float("-inf"))
    y = tl.load(label + n, mask=n < N, other=-100)
    counts = tl.where(y == -100, 0.0, tl.where((y >= 0) & (y < CO), 1.0, float("nan")))
    return v, out[None, :] == y[:, None], n, counts


def cross_entropy_forward(logits: Tensor, label: Tensor, loss: Tensor) -> None:
    """Write the cross-entropies of logits (N, classes) to loss, or their mean if loss is a scalar."""
    sizes = _constexpr_sizes(logits, loss.dim() == 0)
    rows = len(logits) if sizes["MEAN"] else sizes["BN"]
    cross_entropy_forward_kernel[(ceil_div(len(logits), rows),)](logits, label, loss, len(logits), rows, **sizes)


def cross_entropy_backward(logits: Tensor, label: Tensor, grad_out: Tensor, grad: Tensor) -> None:
    """Write the gradients with respect to the logits, times grad_out."""
    sizes = _constexpr_sizes(logits, grad_out.dim() == 0)
    rows = sizes["BN"]
    cross_entropy_backward_kernel[(ceil_div(len(logits), rows),)](
        logits, label, grad_out, grad, len(logits), rows, **sizes
    )


def _constexpr_sizes(logits: Tensor, mean: bool) -> dict[str, Any]:
    count, classes = (next_power_of_two(size) for size in logits.shape)
    classes = max(2, classes)
    return {"CO": logits.shape[1], "MEAN": mean, "BN": max(1, min(count, TILE_LOGITS // classes)), "BO": classes}
