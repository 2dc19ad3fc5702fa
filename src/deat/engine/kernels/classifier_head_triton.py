"""Global average pooling and a linear layer as three Triton kernels: forward, input gradient, weight gradient.

A program reads an image's last features once. There are few classes, so a tile holds them all.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deat.engine.kernels.kernel_utils import ceil_div, next_power_of_two

FORWARD_TILE_CHANNELS, BACKWARD_TILE_CHANNELS, TILE_IMAGES, TILE_PIXELS = 512, 128, 64, 16
"""Sizes of tiles: channels in the forward and the input-gradient kernel, images for the weight gradient, pixels."""


@triton.jit
def head_forward_kernel(
    x, weight, bias, pooled, y, HW, C,
    CO: tl.constexpr, BIAS: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr, BO: tl.constexpr,
) -> None:  # fmt: skip
    """Write an image's means over pixels and its logits."""
    n, out, pixel = tl.program_id(0), tl.arange(0, BO), tl.arange(0, BH)
    acc = tl.zeros((BO,), tl.float32)
    for start in range(0, C, BC):
        c = start + tl.arange(0, BC)
        weight_mask = (out < CO)[:, None] & (c < C)[None, :]
        weight_tile = tl.load(weight + out[:, None] * C + c[None, :], mask=weight_mask, other=0)
        total = tl.zeros((BH, BC), tl.float32)
        for first in range(0, HW, BH):
            mask = (first + pixel < HW)[:, None] & (c < C)[None, :]
            at = (n * HW + first + pixel)[:, None] * C + c[None, :]
            total += tl.load(x + at, mask=mask, other=0).to(tl.float32)
        mean = (tl.sum(total, 0) / HW).to(pooled.dtype.element_ty)
        tl.store(pooled + n * C + c, mean, mask=c < C)
        weight_tile = weight_tile.to(pooled.dtype.element_ty).to(tl.float32)
        acc += tl.sum(weight_tile * mean.to(tl.float32)[None, :], 1)
    if BIAS:
        acc += tl.load(bias + out, mask=out < CO, other=0).to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + n * CO + out, acc.to(y.dtype.element_ty), mask=out < CO)


@triton.jit
def head_input_gradient_kernel(
    dy, weight, dx, HW, C, CO: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr, BO: tl.constexpr
) -> None:  # fmt: skip
    """Write the gradient with respect to an image's last features: the same for all of its pixels."""
    n, out, pixel = tl.program_id(0), tl.arange(0, BO), tl.arange(0, BH)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    weight_mask = (out < CO)[:, None] & (c < C)[None, :]
    weight_tile = (
        tl.load(weight + out[:, None] * C + c[None, :], mask=weight_mask, other=0)
        .to(dy.dtype.element_ty)
        .to(tl.float32)
    )
    grad_out = tl.load(dy + n * CO + out, mask=out < CO, other=0).to(tl.float32)
    grad = tl.sum(weight_tile * grad_out[:, None], 0).to(dx.dtype.element_ty).to(tl.float32) / HW
    grad_tile = tl.zeros((BH, BC), tl.float32) + grad[None, :]
    for first in range(0, HW, BH):
        mask = (first + pixel < HW)[:, None] & (c < C)[None, :]
        at = (n * HW + first + pixel)[:, None] * C + c[None, :]
        tl.store(dx + at, grad_tile.to(dx.dtype.element_ty), mask=mask)


@triton.jit
def head_weight_gradient_kernel(
    dy, pooled, grad_weight, grad_bias, N, C,
    CO: tl.constexpr, BIAS: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BO: tl.constexpr,
) -> None:  # fmt: skip
    """Write the gradients with respect to weight and bias, summed over all images."""
    out, c = tl.arange(0, BO), tl.program_id(0) * BC + tl.arange(0, BC)
    acc, total = tl.zeros((BO, BC), tl.float32), tl.zeros((BO, BN), tl.float32)
    for first in range(0, N, BN):
        n = first + tl.arange(0, BN)
        grad_out = tl.load(dy + n[None, :] * CO + out[:, None], mask=(n < N)[None, :] & (out < CO)[:, None], other=0)
        mean = tl.load(pooled + n[:, None] * C + c[None, :], mask=(n < N)[:, None] & (c < C)[None, :], other=0)
        grad_out = grad_out.to(tl.float32)
        acc = tl.dot(grad_out, mean.to(tl.float32), acc)  # exact in TF32, whose mantissa holds those of half precision
        total += grad_out
    mask = (out < CO)[:, None] & (c < C)[None, :]
    tl.store(grad_weight + out[:, None] * C + c[None, :], acc.to(grad_weight.dtype.element_ty), mask=mask)
    if BIAS:  # noqa: SIM102 - a constexpr condition must stand alone
        if tl.program_id(0) == 0:
            tl.store(grad_bias + out, tl.sum(total, 1).to(grad_bias.dtype.element_ty), mask=out < CO)


def head_forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (logits, means over pixels) of channels-last features, in their dtype."""
    pooled, y = x.new_empty((len(x), x.shape[1])), x.new_empty((len(x), len(weight)))
    sizes = _constexpr_sizes(weight, FORWARD_TILE_CHANNELS) | {"BIAS": bias is not None, "BH": TILE_PIXELS}
    head_forward_kernel[(len(x),)](
        x, weight, x if bias is None else bias, pooled, y, x[0, 0].numel(), x.shape[1], **sizes
    )
    return y, pooled


def head_input_gradient(dy: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
    """Return the gradient with respect to features of a shape, in channels-last order."""
    dx = torch.empty(shape, dtype=dy.dtype, device=dy.device, memory_format=torch.channels_last)
    sizes = _constexpr_sizes(weight, BACKWARD_TILE_CHANNELS) | {"BH": TILE_PIXELS}
    grid = len(dx), ceil_div(shape[1], sizes["BC"])
    head_input_gradient_kernel[grid](dy, weight, dx, shape[2] * shape[3], shape[1], **sizes)
    return dx


def head_weight_gradient(
    dy: Tensor, pooled: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients with respect to weight and bias, in their dtypes."""
    grad_weight, grad_bias = torch.empty_like(weight), None if bias is None else torch.empty_like(bias)
    sizes = _constexpr_sizes(weight, TILE_IMAGES) | {"BIAS": bias is not None, "BN": TILE_IMAGES}
    tensors = dy, pooled, grad_weight, grad_weight if grad_bias is None else grad_bias
    head_weight_gradient_kernel[(ceil_div(weight.shape[1], sizes["BC"]),)](*tensors, len(dy), weight.shape[1], **sizes)
    return grad_weight, grad_bias


def _constexpr_sizes(weight: Tensor, max_channels: int) -> dict[str, Any]:
    classes, channels = (max(16, next_power_of_two(size)) for size in weight.shape)
    # Larger tiles would not fit the registers.
    return {"CO": len(weight), "BC": min(max_channels * 16 // classes, channels), "BO": classes}
