"""The convolution of standardised images with few channels as two Triton kernels: forward and input gradient.

A pixel's patch of a few channels is a short row, so a tile of output pixels is one small matrix product of rows that
are read directly from the images. For the input gradient, a tile of gradients is multiplied once for each row of the
kernel, with the taps of that row as columns; the products are then moved to their pixels and summed.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from deat.engine.kernels.kernel_utils import Size2d, ceil_div, next_power_of_two

FORWARD_TILE_PIXELS, BACKWARD_TILE_PIXELS = 128, 64
"""Pixels of a tile."""


@triton.jit
def first_conv_forward_kernel(
    x, weight, bias, shift, scale, y, M, xn, xc, xh, xw, wo, wc, wh, ww,
    BIAS: tl.constexpr, SHIFT: tl.constexpr, SCALE: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
) -> None:  # fmt: skip
    """Write y, M pixels of CO channels: patches of (x - shift) / scale, padded with zeros, times weight, plus bias."""
    pixel, out = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    n, top, left = pixel // (OH * OW), pixel // OW % OH - PH, pixel % OW - PW
    acc = tl.zeros((BM, BN), tl.float32)
    for start in tl.static_range(0, KH * KW * CI, BK):
        k = start + tl.arange(0, BK)
        k_mask, c, i, j = k < KH * KW * CI, k % CI, k // (KW * CI), k // CI % KW
        h, w = top[:, None] + i[None, :], left[:, None] + j[None, :]
        mask = (h >= 0) & (h < H) & (w >= 0) & (w < W) & (pixel < M)[:, None] & k_mask[None, :]
        at = (n * xn + top * xh + left * xw)[:, None] + (c * xc + i * xh + j * xw)[None, :]
        v = tl.load(x + at, mask=mask, other=0).to(tl.float32)
        if SHIFT:
            v = tl.where(mask, v - _pick_by_channel(shift, c, CI, False)[None, :], 0.0)
        if SCALE:
            v *= _pick_by_channel(scale, c, CI, True)[None, :]
        at = (c * wc + i * wh + j * ww)[:, None] + (out * wo)[None, :]
        weight_tile = tl.load(weight + at, mask=k_mask[:, None] & (out < CO)[None, :], other=0)
        acc = tl.dot(v.to(y.dtype.element_ty), weight_tile.to(y.dtype.element_ty), acc)
    if BIAS:
        acc += tl.load(bias + out, mask=out < CO, other=0).to(tl.float32)[None, :]
    mask = (pixel < M)[:, None] & (out < CO)[None, :]
    tl.store(y + pixel[:, None] * CO + out[None, :], acc.to(y.dtype.element_ty), mask=mask)


@triton.jit
def first_conv_input_gradient_kernel(
    dy, weight, scale, dx, M, xn, xc, xh, xw, wo, wc, wh, ww,
    SCALE: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, SPAN: tl.constexpr, TAPS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
) -> None:  # fmt: skip
    """Write the gradient with respect to x, over M pixels in lines of length SPAN, the larger of the widths of x and dy.

    Column c * TAPS + t of a product is channel c through tap t. Tiles overlap by KW - 1 pixels.
    """
    row, column = tl.arange(0, BM), tl.arange(0, BN)
    pixel = tl.program_id(0) * (BM - KW + 1) + row - (KW - 1 - PW)
    n, h, w = pixel // (H * SPAN), pixel // SPAN % H, pixel % SPAN
    c, tap = column // TAPS, column % TAPS
    acc = tl.zeros((BM, BN), tl.float32)
    for i in tl.static_range(KH):
        line = h + PH - i
        mask = (pixel >= 0) & (pixel < M) & (line >= 0) & (line < OH) & (w < OW)
        for start in range(0, CO, BK):
            out = start + tl.arange(0, BK)
            at = ((n * OH + line) * OW + w)[:, None] * CO + out[None, :]
            grad = tl.load(dy + at, mask=mask[:, None] & (out < CO)[None, :], other=0)
            at = (out * wo + i * wh)[:, None] + (c * wc + tap * ww)[None, :]
            weight_mask = (out < CO)[:, None] & ((c < CI) & (tap < KW))[None, :]
            acc = tl.dot(grad, tl.load(weight + at, mask=weight_mask, other=0).to(dy.dtype.element_ty), acc)
    source, x_of_dy = row[:, None] + PW - tap[None, :], w[:, None] + PW - tap[None, :]
    in_line = (x_of_dy >= 0) & (x_of_dy < OW) & (tap < KW)[None, :]
    moved = tl.gather(acc, tl.minimum(tl.maximum(source, 0), BM - 1), 0)
    v = tl.sum(tl.reshape(tl.where(in_line, moved, 0.0), (BM, BN // TAPS, TAPS)), 2)
    c = tl.arange(0, BN // TAPS)
    if SCALE:
        v *= _pick_by_channel(scale, c, CI, True)[None, :]
    own_mask = (row >= KW - 1 - PW) & (row < BM - PW) & (pixel < M) & (w < W)
    at = (n * xn + h * xh + w * xw)[:, None] + (c * xc)[None, :]
    tl.store(dx + at, v.to(dx.dtype.element_ty), mask=own_mask[:, None] & (c < CI)[None, :])


@triton.jit
def _pick_by_channel(values, c, CI: tl.constexpr, OVER: tl.constexpr) -> "tl.tensor":
    """Return values[c] or its reciprocal. Picking from CI numbers costs less than a load for each column."""
    picked = tl.zeros_like(c).to(tl.float32)
    for i in tl.static_range(CI):
        value = tl.load(values + i).to(tl.float32)
        picked = tl.where(c == i, 1.0 / value if OVER else value, picked)
    return picked


def first_conv_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    shift: Tensor | None,
    scale: Tensor | None,
    y: Tensor,
    padding: Size2d,
) -> None:
    """Write the convolution of (x - shift) / scale to y, which is in channels-last order."""
    rows, columns, sizes = len(y) * y[0, 0].numel(), _tile_side(y.shape[1], 64), _constexpr_sizes(x, weight, y, padding)
    sizes |= {"BM": FORWARD_TILE_PIXELS, "BN": columns, "BK": _tile_side(weight[0].numel(), 32)}
    flags = {"BIAS": bias is not None, "SHIFT": shift is not None, "SCALE": scale is not None}
    tensors = x, weight, *(x if t is None else t for t in (bias, shift, scale)), y
    grid = ceil_div(rows, FORWARD_TILE_PIXELS), ceil_div(y.shape[1], columns)
    first_conv_forward_kernel[grid](*tensors, rows, *x.stride(), *weight.stride(), **flags, **sizes)


def first_conv_input_gradient(dy: Tensor, weight: Tensor, scale: Tensor | None, dx: Tensor, padding: Size2d) -> None:
    """Write the gradient with respect to x to dx; dy is in channels-last order, and the padding smaller than the kernel."""
    span, taps = max(dx.shape[3], dy.shape[3]), next_power_of_two(weight.shape[3])
    sizes = _constexpr_sizes(dx, weight, dy, padding) | {"SPAN": span, "TAPS": taps, "SCALE": scale is not None}
    sizes |= {
        "BM": BACKWARD_TILE_PIXELS,
        "BN": max(16, next_power_of_two(dx.shape[1]) * taps),
        "BK": _tile_side(dy.shape[1], 64),
    }
    rows = len(dx) * dx.shape[2] * span
    grid = (ceil_div(rows, BACKWARD_TILE_PIXELS - weight.shape[3] + 1),)
    tensors = dy, weight, dy if scale is None else scale, dx
    first_conv_input_gradient_kernel[grid](*tensors, rows, *dx.stride(), *weight.stride(), **sizes)


def _constexpr_sizes(x: Tensor, weight: Tensor, y: Tensor, padding: Size2d) -> dict[str, Any]:
    """The sizes for which both kernels are compiled."""
    names = "CI", "H", "W", "CO", "OH", "OW", "KH", "KW", "PH", "PW"
    values = *x.shape[1:], *y.shape[1:], *weight.shape[2:], *padding
    return dict(zip(names, values, strict=True))


def _tile_side(size: int, max_side: int) -> int:
    """A side of a tile: a power of two from 16, as matrix units require."""
    return min(max_side, max(16, next_power_of_two(size)))


COPY_TILE_ROWS = 512


@triton.jit
def _copy_channels_kernel(
    x, out, shift, scale, M,
    CX: tl.constexpr, CO: tl.constexpr, SHIFT: tl.constexpr, SCALE: tl.constexpr, BC: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Write (x - shift) / scale, rows of CX columns, to out, rows of CO columns; additional columns are zero."""
    row, col = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BC)
    row_mask, col_mask = (row < M)[:, None], (col < CX) & (col < CO)
    v = tl.load(x + row[:, None] * CX + col[None, :], mask=row_mask & col_mask[None, :], other=0)
    if SHIFT:
        v -= tl.load(shift + col, mask=col_mask, other=0)[None, :]
    if SCALE:
        v = v / tl.load(scale + col, mask=col_mask, other=1)[None, :]
    tl.store(out + row[:, None] * CO + col[None, :], v.to(out.dtype.element_ty), mask=row_mask & (col < CO)[None, :])


def copy_channels(x: Tensor, out: Tensor, shift: Tensor | None = None, scale: Tensor | None = None) -> None:
    """Copy (x - shift) / scale to out, which may have another number of channels; both in channels-last order."""
    rows, max_channels = x.numel() // x.shape[1], max(x.shape[1], out.shape[1])
    sizes = {"CX": x.shape[1], "CO": out.shape[1], "BC": next_power_of_two(max_channels), "ROWS": COPY_TILE_ROWS}
    flags = {"SHIFT": shift is not None, "SCALE": scale is not None}
    _copy_channels_kernel[(ceil_div(rows, COPY_TILE_ROWS),)](
        x, out, x if shift is None else shift, x if scale is None else scale, rows, **flags, **sizes
    )
