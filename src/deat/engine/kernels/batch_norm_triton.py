"""Batch norm, the sums around it and a ReLU as two Triton kernels over rows of channels: forward and backward.

A batch in channels-last order is a matrix of N·H·W rows and C columns, which the kernels process in tiles. Each
kernel is launched twice: first to gather sums over the rows, by column, then to write its output. The output is
written from the last tile to the first, since the last tile is still in the cache. With EARLY, the programs that write
start before the sums are complete, and load their first tile meanwhile. Programs add their sums atomically, in any
order. Sums are float32 (float64 for float64). They are sums of differences to the first row: squares of large numbers
would hide small variances.
"""

import triton
import triton.language as tl

Tile = tuple[tl.tensor, tl.tensor]


@triton.jit
def batch_norm_forward_kernel(
    x, other, total, residual, y, sums, mean, inv_std_or_var, running_mean, running_var, weight, bias, M, C, rows,
    GATHER: tl.constexpr, ADD: tl.constexpr, RESIDUAL: tl.constexpr, RELU: tl.constexpr,
    BATCH: tl.constexpr, TRACK: tl.constexpr, MOMENTUM: tl.constexpr, EPS: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr, EARLY: tl.constexpr, ACC: tl.constexpr,
) -> None:  # fmt: skip
    """y = relu((total - mean) / deviation * weight + bias + residual), where total = x + other, or x.

    mean and 1 / deviation are those of the batch, which are gathered first and stored, or the running ones.
    """
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = cols < C
    if GATHER:
        _allow_dependent_launch(EARLY)
    if BATCH:
        origin = tl.load(x + cols, mask=inside, other=0).to(ACC)
        if ADD:
            origin += tl.load(other + cols, mask=inside, other=0).to(ACC)
            origin = origin.to(total.dtype.element_ty).to(ACC)
    if GATHER:
        first, second = tl.zeros((BM, BC), ACC), tl.zeros((BM, BC), ACC)
        for start in range(0, rows, BM):
            at, mask = _tile_offsets(start, rows, M, C, cols, inside, BM)
            v = _add_and_store(tl.load(x + at, mask=mask, other=0), other, total, at, mask, ADD, ACC)
            d = tl.where(mask, v - origin[None, :], 0.0)
            first += d
            second += d * d
        _add_sums(sums, first, second, cols, inside, C)
    else:
        w, c = _load_affine(weight, bias, cols, inside, ACC)
        at, mask = _tile_offsets(rows - BM, rows, M, C, cols, inside, BM)
        ahead = tl.load(x + at, mask=mask, other=0)
        if BATCH:
            _wait_for_previous_launch(EARLY)
            m, r = _finish_statistics(
                sums, origin, mean, inv_std_or_var, running_mean, running_var, M, C, cols, inside, MOMENTUM, EPS, TRACK
            )
        else:
            m, r = _load_statistics(running_mean, running_var, cols, inside, EPS, True, ACC)
        source = x
        if BATCH and ADD:
            source = total
            ahead = tl.load(total + at, mask=mask, other=0)
        for start in range(0, rows, BM):
            v = _add_and_store(ahead, other, total, at, mask, ADD and not BATCH, ACC)
            v = (v - m) * r * w + c
            if RESIDUAL:
                v += tl.load(residual + at, mask=mask, other=0).to(ACC)
            if RELU:
                v = tl.maximum(v, 0.0, propagate_nan=tl.PropagateNan.ALL)
            stored_at, stored_mask = at, mask
            at, mask = _tile_offsets(rows - 2 * BM - start, rows, M, C, cols, inside, BM)
            ahead = tl.load(source + at, mask=mask, other=0)
            tl.store(y + stored_at, v.to(y.dtype.element_ty), mask=stored_mask)


@triton.jit
def batch_norm_backward_kernel(
    dy, x, gate, extra_dx, dx, grad_residual, sums, mean, inv_std_or_var, weight, bias, M, C, rows,
    GATHER: tl.constexpr, ADD: tl.constexpr, RELU: tl.constexpr, GATED: tl.constexpr,
    BATCH: tl.constexpr, EPS: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr, EARLY: tl.constexpr, ACC: tl.constexpr,
) -> None:  # fmt: skip
    """The gradient with respect to x, plus `extra_dx`; with the statistics of the batch, the gradient flows through them as well.

    It needs the gradients with respect to bias and weight: the sums by column of dy before the ReLU, and of that times
    the normalised x. The ReLU passes the gradient where the batch norm, or `gate`, the ReLU's output, is positive.
    """
    cols = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = cols < C
    if GATHER:
        _allow_dependent_launch(EARLY)
    m, r = _load_statistics(mean, inv_std_or_var, cols, inside, EPS, not BATCH, ACC)
    w, c = _load_affine(weight, bias, cols, inside, ACC)
    if GATHER:
        first, second = tl.zeros((BM, BC), ACC), tl.zeros((BM, BC), ACC)
        for start in range(0, rows, BM):
            at, mask = _tile_offsets(start, rows, M, C, cols, inside, BM)
            tiles = tl.load(dy + at, mask=mask, other=0), tl.load(x + at, mask=mask, other=0)
            grad, v = _gradient_before_relu(tiles[0], tiles[1], gate, at, mask, m, r, w, c, RELU, GATED, ACC)
            first += grad
            second += grad * v
        _add_sums(sums, first, second, cols, inside, C)
    else:
        at, mask = _tile_offsets(rows - BM, rows, M, C, cols, inside, BM)
        ahead_dy, ahead_x = tl.load(dy + at, mask=mask, other=0), tl.load(x + at, mask=mask, other=0)
        if BATCH:
            _wait_for_previous_launch(EARLY)
            grad_bias, grad_weight = _load_sums(sums, cols, inside, C)
            grad_bias, grad_weight = (grad_bias / M)[None, :], (grad_weight / M)[None, :]
        for start in range(0, rows, BM):
            grad, v = _gradient_before_relu(ahead_dy, ahead_x, gate, at, mask, m, r, w, c, RELU, GATED, ACC)
            if GATED:
                tl.store(grad_residual + at, grad.to(dx.dtype.element_ty), mask=mask)
            if BATCH:
                grad = grad - grad_bias - v * grad_weight
            grad = grad * r * w
            if ADD:
                grad += tl.load(extra_dx + at, mask=mask, other=0).to(ACC)
            stored_at, stored_mask = at, mask
            at, mask = _tile_offsets(rows - 2 * BM - start, rows, M, C, cols, inside, BM)
            ahead_dy, ahead_x = tl.load(dy + at, mask=mask, other=0), tl.load(x + at, mask=mask, other=0)
            tl.store(dx + stored_at, grad.to(dx.dtype.element_ty), mask=stored_mask)


@triton.jit
def _tile_offsets(start, rows, M, C, cols, inside, BM: tl.constexpr) -> "Tile":
    """The offsets of a tile's numbers, and the mask of those inside the matrix."""
    line = start + tl.arange(0, BM)
    row = tl.program_id(0) * rows + line
    return row[:, None] * C + cols[None, :], ((line >= 0) & (row < M))[:, None] & inside[None, :]


@triton.jit
def _add_and_store(tile, other, total, at, mask, ADD: tl.constexpr, ACC: tl.constexpr) -> "tl.tensor":
    """A tile of x, or of x + other, which is rounded and stored."""
    v = tile.to(ACC)
    if ADD:
        v += tl.load(other + at, mask=mask, other=0).to(ACC)
        rounded = v.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=mask)
        v = rounded.to(ACC)
    return v


@triton.jit
def _gradient_before_relu(
    dy, x, gate, at, mask, m, r, w, c, RELU: tl.constexpr, GATED: tl.constexpr, ACC: tl.constexpr
) -> "Tile":  # fmt: skip
    """A tile of dy before the ReLU, and of the normalised x."""
    grad, v = dy.to(ACC), (x.to(ACC) - m) * r
    if GATED:
        grad = tl.where(tl.load(gate + at, mask=mask, other=0) > 0, grad, 0.0)
    elif RELU:
        grad = tl.where(v * w + c > 0, grad, 0.0)
    return grad, v


@triton.jit
def _finish_statistics(
    sums, origin, mean, inv_std_or_var, running_mean, running_var, M, C, cols, inside,
    MOMENTUM: tl.constexpr, EPS: tl.constexpr, TRACK: tl.constexpr,
) -> "Tile":  # fmt: skip
    """mean and 1 / deviation from the sums; one program stores them, and updates the running statistics."""
    a, b = _load_sums(sums, cols, inside, C)
    a, b = a / M, b / M
    var = tl.maximum(b - a * a, 0.0, propagate_nan=tl.PropagateNan.ALL)
    centre, r = origin + a, 1.0 / tl.sqrt(var + EPS)
    if tl.program_id(0) == 0:
        tl.store(mean + cols, centre, mask=inside)
        tl.store(inv_std_or_var + cols, r, mask=inside)
        if TRACK:
            old = tl.load(running_mean + cols, mask=inside, other=0)
            tl.store(running_mean + cols, old + MOMENTUM * (centre - old), mask=inside)
            old = tl.load(running_var + cols, mask=inside, other=0)
            tl.store(running_var + cols, old + MOMENTUM * (var * M / (M - 1) - old), mask=inside)
    return centre[None, :], r[None, :]


@triton.jit
def _load_statistics(
    mean, inv_std_or_var, cols, inside, EPS: tl.constexpr, IS_VAR: tl.constexpr, ACC: tl.constexpr
) -> "Tile":
    """mean and 1 / deviation of a tile's columns; inv_std_or_var may hold the variance instead."""
    m = tl.load(mean + cols, mask=inside, other=0).to(ACC)
    r = tl.load(inv_std_or_var + cols, mask=inside, other=1).to(ACC)
    if IS_VAR:
        r = 1.0 / tl.sqrt(r + EPS)
    return m[None, :], r[None, :]


@triton.jit
def _load_affine(weight, bias, cols, inside, ACC: tl.constexpr) -> "Tile":
    """weight and bias of a tile's columns."""
    w = tl.load(weight + cols, mask=inside, other=0).to(ACC)
    c = tl.load(bias + cols, mask=inside, other=0).to(ACC)
    return w[None, :], c[None, :]


@triton.jit
def _add_sums(sums, first, second, cols, inside, C) -> None:
    """Add this program's two sums to those of all programs."""
    tl.atomic_add(sums + cols, tl.sum(first, 0), mask=inside, sem="relaxed")
    tl.atomic_add(sums + C + cols, tl.sum(second, 0), mask=inside, sem="relaxed")


@triton.jit
def _load_sums(sums, cols, inside, C) -> "Tile":
    """The two sums of all programs."""
    return tl.load(sums + cols, mask=inside, other=0), tl.load(sums + C + cols, mask=inside, other=0)


@triton.jit
def _allow_dependent_launch(EARLY: tl.constexpr) -> None:
    """Let the next launch begin during this one, after the previous one has ended."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _wait_for_previous_launch(EARLY: tl.constexpr) -> None:
    """Wait until the previous launch has ended."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
