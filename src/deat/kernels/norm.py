"""Batch norm, a sum before or behind it and a ReLU, as four Triton kernels over rows of channels.

A batch in channels-last order is a matrix of N·H·W rows and C columns, which these kernels walk in tiles. Two gather
sums over the rows, by column: every program adds up its rows and adds that to what the others have, in whatever order
they come. Two write a matrix of the same shape. Sums are taken in float32 (float64 for float64), of differences to the
first row, since squares of large numbers would swallow small variances.
"""

import triton
import triton.language as tl


@triton.jit
def measure(
    x, other, total, sums, M, C, rows,
    ADD: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Sums of x and of its square by column, or of total = x + other; both counted from the first row."""
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = cols < C
    origin = tl.load(x + cols, mask=inside, other=0).to(ACC)
    if ADD:
        origin += tl.load(other + cols, mask=inside, other=0).to(ACC)
        origin = origin.to(total.dtype.element_ty).to(ACC)
    first, second = tl.zeros((BM, BC), ACC), tl.zeros((BM, BC), ACC)
    for start in range(0, rows, BM):
        row = tl.program_id(0) * rows + start + tl.arange(0, BM)
        at, ok = row[:, None] * C + cols[None, :], (row < M)[:, None] & inside[None, :]
        v = tl.load(x + at, mask=ok, other=0).to(ACC)
        if ADD:
            v += tl.load(other + at, mask=ok, other=0).to(ACC)
            rounded = v.to(total.dtype.element_ty)
            tl.store(total + at, rounded, mask=ok)
            v = rounded.to(ACC)
        d = tl.where(ok, v - origin[None, :], 0.0)
        first += d
        second += d * d
    tl.atomic_add(sums + cols, tl.sum(first, 0), mask=inside, sem="relaxed")
    tl.atomic_add(sums + C + cols, tl.sum(second, 0), mask=inside, sem="relaxed")


@triton.jit
def apply(
    x, other, total, beside, y, sums, mean, spread, running_mean, running_var, weight, bias, M, C, rows,
    MOMENTUM: tl.constexpr, EPS: tl.constexpr, ADD: tl.constexpr, BESIDE: tl.constexpr, RELU: tl.constexpr,
    BATCH: tl.constexpr, TRACK: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """y = relu((x - mean) / deviation * weight + bias + beside), of x or of total = x + other.

    mean and 1 / deviation are the batch's own, and are written down, or the running ones.
    """
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = cols < C
    if BATCH:
        a = tl.load(sums + cols, mask=inside, other=0) / M
        b = tl.load(sums + C + cols, mask=inside, other=0) / M
        var = tl.maximum(b - a * a, 0.0)
        centre = tl.load(x + cols, mask=inside, other=0).to(ACC) + a
        m, r = centre[None, :], (1.0 / tl.sqrt(var + EPS))[None, :]
        if tl.program_id(0) == 0:
            tl.store(mean + cols, centre, mask=inside)
            tl.store(spread + cols, 1.0 / tl.sqrt(var + EPS), mask=inside)
            if TRACK:
                old = tl.load(running_mean + cols, mask=inside, other=0)
                tl.store(running_mean + cols, old + MOMENTUM * (centre - old), mask=inside)
                old = tl.load(running_var + cols, mask=inside, other=0)
                tl.store(running_var + cols, old + MOMENTUM * (var * M / (M - 1) - old), mask=inside)
    else:
        m, r = _statistics(running_mean, running_var, cols, inside, EPS, True, ACC)
    w, c = _affine(weight, bias, cols, inside, ACC)
    for start in range(0, rows, BM):
        row = tl.program_id(0) * rows + start + tl.arange(0, BM)
        at, ok = row[:, None] * C + cols[None, :], (row < M)[:, None] & inside[None, :]
        v = tl.load(x + at, mask=ok, other=0).to(ACC)
        if ADD:
            v += tl.load(other + at, mask=ok, other=0).to(ACC)
            rounded = v.to(total.dtype.element_ty)
            tl.store(total + at, rounded, mask=ok)
            v = rounded.to(ACC)
        v = (v - m) * r * w + c
        if BESIDE:
            v += tl.load(beside + at, mask=ok, other=0).to(ACC)
        if RELU:
            v = tl.maximum(v, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(y + at, v.to(y.dtype.element_ty), mask=ok)


@triton.jit
def slopes(
    dy, x, gate, sums, mean, spread, weight, bias, M, C, rows,
    EPS: tl.constexpr, RELU: tl.constexpr, GATED: tl.constexpr, BATCH: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The gradients by bias and by weight: sums by column of dy before the ReLU, and of it times normalised x.

    The ReLU was open where the batch norm is positive, or where `gate`, its output, is.
    """
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = cols < C
    m, r = _statistics(mean, spread, cols, inside, EPS, not BATCH, ACC)
    w, c = _affine(weight, bias, cols, inside, ACC)
    first, second = tl.zeros((BM, BC), ACC), tl.zeros((BM, BC), ACC)
    for start in range(0, rows, BM):
        row = tl.program_id(0) * rows + start + tl.arange(0, BM)
        at, ok = row[:, None] * C + cols[None, :], (row < M)[:, None] & inside[None, :]
        grad = tl.load(dy + at, mask=ok, other=0).to(ACC)
        v = (tl.load(x + at, mask=ok, other=0).to(ACC) - m) * r
        if GATED:
            grad = tl.where(tl.load(gate + at, mask=ok, other=0) > 0, grad, 0.0)
        elif RELU:
            grad = tl.where(v * w + c > 0, grad, 0.0)
        first += grad
        second += grad * v
    tl.atomic_add(sums + cols, tl.sum(first, 0), mask=inside, sem="relaxed")
    tl.atomic_add(sums + C + cols, tl.sum(second, 0), mask=inside, sem="relaxed")


@triton.jit
def back(
    dy, x, gate, more, dx, by_beside, sums, mean, spread, weight, bias, M, C, rows,
    EPS: tl.constexpr, ADD: tl.constexpr, RELU: tl.constexpr, GATED: tl.constexpr, BATCH: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The gradient by x, with `more` added; where the statistics were the batch's own, through them as well."""
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = cols < C
    m, r = _statistics(mean, spread, cols, inside, EPS, not BATCH, ACC)
    w, c = _affine(weight, bias, cols, inside, ACC)
    if BATCH:
        by_bias = (tl.load(sums + cols, mask=inside, other=0) / M)[None, :]
        by_weight = (tl.load(sums + C + cols, mask=inside, other=0) / M)[None, :]
    for start in range(0, rows, BM):
        row = tl.program_id(0) * rows + start + tl.arange(0, BM)
        at, ok = row[:, None] * C + cols[None, :], (row < M)[:, None] & inside[None, :]
        grad = tl.load(dy + at, mask=ok, other=0).to(ACC)
        v = (tl.load(x + at, mask=ok, other=0).to(ACC) - m) * r
        if GATED:
            grad = tl.where(tl.load(gate + at, mask=ok, other=0) > 0, grad, 0.0)
            tl.store(by_beside + at, grad.to(dx.dtype.element_ty), mask=ok)
        elif RELU:
            grad = tl.where(v * w + c > 0, grad, 0.0)
        if BATCH:
            grad = grad - by_bias - v * by_weight
        grad = grad * r * w
        if ADD:
            grad += tl.load(more + at, mask=ok, other=0).to(ACC)
        tl.store(dx + at, grad.to(dx.dtype.element_ty), mask=ok)


@triton.jit
def _statistics(mean, spread, cols, inside, EPS: tl.constexpr, IS_VAR: tl.constexpr, ACC: tl.constexpr):
    """mean and 1 / deviation of a tile's columns; spread may hold the variance instead."""
    m = tl.load(mean + cols, mask=inside, other=0).to(ACC)
    r = tl.load(spread + cols, mask=inside, other=1).to(ACC)
    if IS_VAR:
        r = 1.0 / tl.sqrt(r + EPS)
    return m[None, :], r[None, :]


@triton.jit
def _affine(weight, bias, cols, inside, ACC: tl.constexpr):
    """weight and bias of a tile's columns."""
    w = tl.load(weight + cols, mask=inside, other=0).to(ACC)
    c = tl.load(bias + cols, mask=inside, other=0).to(ACC)
    return w[None, :], c[None, :]
