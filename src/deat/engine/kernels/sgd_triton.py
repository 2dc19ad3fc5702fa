"""SGD as one kernel launch for each large weight, instead of five, and one for all small weights."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from deat.engine.kernels.kernel_utils import ceil_div

SMALL_BLOCK_NUMBERS, TABLE_COLUMNS = 1024, 5
TableRows = tuple[tuple[int, ...], ...]
TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class WeightUpdate(NamedTuple):
    """A weight, its velocity, its gradient, and its half-precision copy, if it has one."""

    weight: Tensor
    velocity: Tensor
    grad: Tensor
    copy: Tensor | None


@triton.jit
def sgd_small_weights_kernel(
    table, g, lr, momentum, DECAY: tl.constexpr, COPY: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
) -> None:  # fmt: skip
    """v = momentum v + (g + decay w); w = w - lr v, and its copy if it has one, for the block of one table row."""
    row = table + tl.program_id(0) * COLUMNS
    w, v = tl.load(row).to(tl.pointer_type(tl.float32)), tl.load(row + 1).to(tl.pointer_type(tl.float32))
    copy, at = tl.load(row + 2), tl.arange(0, BLOCK)
    mask = at < tl.load(row + 4)
    weight = tl.load(w + at, mask=mask, other=0)
    grad = tl.load(g + tl.load(row + 3) + at, mask=mask, other=0).to(tl.float32)
    velocity = tl.load(momentum) * tl.load(v + at, mask=mask, other=0) + (grad + DECAY * weight)
    weight -= tl.load(lr) * velocity
    tl.store(v + at, velocity, mask=mask)
    tl.store(w + at, weight, mask=mask)
    copied = mask & (tl.zeros((BLOCK,), tl.int64) + copy != 0)
    tl.store(copy.to(tl.pointer_type(COPY)) + at, weight.to(COPY), mask=copied)


class SmallWeightSGD:
    """Steps small weights together. Its tables are never freed, since recordings hold their addresses."""

    def __init__(self) -> None:
        self._tables: dict[TableRows, Tensor] = {}

    def step(self, steps: list[WeightUpdate], lr: Tensor, momentum: Tensor, decay: float) -> None:
        """Step each weight, and its copy."""
        for dtype in dict.fromkeys(step.grad.dtype for step in steps):
            same_dtype = [step for step in steps if step.grad.dtype == dtype]
            copy = next((step.copy.dtype for step in same_dtype if step.copy is not None), torch.float32)
            table, grads = (
                self._table(same_dtype),
                torch.cat([flatten_in_memory_order(step.grad) for step in same_dtype]),
            )
            constants = {
                "DECAY": decay,
                "COPY": TRITON_DTYPES[copy],
                "COLUMNS": TABLE_COLUMNS,
                "BLOCK": SMALL_BLOCK_NUMBERS,
            }
            sgd_small_weights_kernel[(len(table),)](table, grads, lr, momentum, **constants)

    def _table(self, steps: list[WeightUpdate]) -> Tensor:
        rows = build_table_rows(steps)
        if rows not in self._tables:
            self._tables[rows] = torch.tensor(rows, device=steps[0].weight.device)
        return self._tables[rows]


def build_table_rows(steps: list[WeightUpdate]) -> TableRows:
    """Return a row for each block of each weight: three addresses, the offset of its gradient, and its size."""
    rows, offset = [], 0
    for step in steps:
        tensors = (step.weight, step.velocity, step.copy)
        for start in range(0, step.weight.numel(), SMALL_BLOCK_NUMBERS):
            addresses = [0 if t is None else t.data_ptr() + start * t.element_size() for t in tensors]
            rows.append((*addresses, offset + start, min(SMALL_BLOCK_NUMBERS, step.weight.numel() - start)))
        offset += step.weight.numel()
    return tuple(rows)


def can_step_together(step: WeightUpdate) -> bool:
    """Whether a weight can be stepped with others: float32, with gradient and copy of supported dtypes."""
    has_supported_dtypes = {step.grad.dtype, step.grad.dtype if step.copy is None else step.copy.dtype} <= set(
        TRITON_DTYPES
    )
    return has_supported_dtypes and step.weight.dtype == step.velocity.dtype == torch.float32


def flatten_in_memory_order(x: Tensor) -> Tensor:
    """Return a dense tensor's numbers in the order of memory."""
    return x.as_strided((x.numel(),), (1,))


BLOCK_NUMBERS = 4096
MIN_LARGE_WEIGHT_NUMBERS = 1 << 15
"""Weights with fewer numbers are stepped together."""


@triton.jit
def sgd_kernel(
    w, v, g, copy, lr, momentum, n, DECAY: tl.constexpr, COPY: tl.constexpr, BLOCK: tl.constexpr
) -> None:  # fmt: skip
    """v = momentum v + (g + decay w); w = w - lr v, and its copy in another dtype."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    weight = tl.load(w + at, mask=mask)
    grad = tl.load(g + at, mask=mask).to(weight.dtype)
    velocity = tl.load(momentum) * tl.load(v + at, mask=mask) + (grad + DECAY * weight)
    weight -= tl.load(lr) * velocity
    tl.store(v + at, velocity, mask=mask)
    tl.store(w + at, weight, mask=mask)
    if COPY:
        tl.store(copy + at, weight.to(copy.dtype.element_ty), mask=mask)


class FusedSGD:
    """Steps weights and their copies: one launch for each large weight, one for all small weights.

    Args:
        fallback: Steps the weights whose memory layout differs from that of their gradients, with the same arguments.
    """

    def __init__(self, fallback: Callable[..., None]) -> None:
        self.fallback, self._small_weight_sgd = fallback, SmallWeightSGD()

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
        """Step the weights, their velocities and their copies in place.

        Args:
            weights: The weights.
            velocities: The velocity of each weight.
            grads: The gradient of each weight.
            lr: The learning rate, as a device scalar.
            momentum: The momentum, as a device scalar.
            decay: The weight decay.
            copies: The half-precision copy of each weight, or None.
        """
        steps = list(map(WeightUpdate, weights, velocities, grads, copies))
        aligned = [step for step in steps if _has_same_layout(step)]
        small = [step for step in aligned if step.weight.numel() < MIN_LARGE_WEIGHT_NUMBERS and can_step_together(step)]
        large = [step for step in aligned if step.weight.numel() >= MIN_LARGE_WEIGHT_NUMBERS]
        for step in large:
            _step_large_weight(step, lr, momentum, decay)
        if small:
            self._small_weight_sgd.step(small, lr, momentum, decay)
        done = {id(step) for step in (*small, *large)}
        if remaining := [step for step in steps if id(step) not in done]:
            *columns, remaining_copies = (list(column) for column in zip(*remaining, strict=True))
            self.fallback(*columns, lr, momentum, decay, remaining_copies)


def _step_large_weight(step: WeightUpdate, lr: Tensor, momentum: Tensor, decay: float) -> None:
    w, has_copy = step.weight, step.copy is not None
    tensors = (w, step.velocity, step.grad, step.copy if step.copy is not None else w)
    grid, constants = (ceil_div(w.numel(), BLOCK_NUMBERS),), {"DECAY": decay, "COPY": has_copy, "BLOCK": BLOCK_NUMBERS}
    sgd_kernel[grid](*tensors, lr, momentum, w.numel(), num_warps=8, **constants)


def _has_same_layout(step: WeightUpdate) -> bool:
    """Whether all tensors are dense and store their numbers in the same order."""
    tensors = [t for t in step if t is not None]
    is_dense = all(t.is_contiguous() or t.is_contiguous(memory_format=torch.channels_last) for t in tensors)
    return is_dense and len({_memory_order(t) for t in tensors}) == 1 and step.weight.dtype == step.velocity.dtype


def _memory_order(x: Tensor) -> tuple[int, ...]:
    """The strides of a tensor, without those of dimensions of size 1, which have no order."""
    return tuple(stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1)
