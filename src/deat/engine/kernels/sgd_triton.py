"""SGD's step as one pass over each large weight, rather than five, and one over all small ones."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

SMALL_BLOCK_NUMBERS, TABLE_COLUMNS = 1024, 5
TableRows = tuple[tuple[int, ...], ...]
TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class WeightUpdate(NamedTuple):
    """A weight, its velocity, its gradient, and its copy in half precision, if it has one."""

    weight: Tensor
    velocity: Tensor
    grad: Tensor
    copy: Tensor | None


@triton.jit
def sgd_small_weights_kernel(
    table, g, lr, momentum, DECAY: tl.constexpr, COPY: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
) -> None:  # fmt: skip
    """v = momentum v + (g + decay w); w = w - lr v, and a copy of it where there is one, over one row of the table."""
    row = table + tl.program_id(0) * COLUMNS
    w, v = tl.load(row).to(tl.pointer_type(tl.float32)), tl.load(row + 1).to(tl.pointer_type(tl.float32))
    copy, at = tl.load(row + 2), tl.arange(0, BLOCK)
    ok = at < tl.load(row + 4)
    weight = tl.load(w + at, mask=ok, other=0)
    grad = tl.load(g + tl.load(row + 3) + at, mask=ok, other=0).to(tl.float32)
    velocity = tl.load(momentum) * tl.load(v + at, mask=ok, other=0) + (grad + DECAY * weight)
    weight -= tl.load(lr) * velocity
    tl.store(v + at, velocity, mask=ok)
    tl.store(w + at, weight, mask=ok)
    copied = ok & (tl.zeros((BLOCK,), tl.int64) + copy != 0)
    tl.store(copy.to(tl.pointer_type(COPY)) + at, weight.to(COPY), mask=copied)


class SmallWeightSGD:
    """Steps small weights together. Every table it made is kept: recordings know where it is."""

    def __init__(self) -> None:
        self._tables: dict[TableRows, Tensor] = {}

    def step(self, steps: list[WeightUpdate], lr: Tensor, momentum: Tensor, decay: float) -> None:
        """A step of each weight, and of its copy."""
        for dtype in dict.fromkeys(step.grad.dtype for step in steps):
            alike = [step for step in steps if step.grad.dtype == dtype]
            copy = next((step.copy.dtype for step in alike if step.copy is not None), torch.float32)
            table, grads = self._table(alike), torch.cat([flatten_in_memory_order(step.grad) for step in alike])
            how = {"DECAY": decay, "COPY": TRITON_DTYPES[copy], "COLUMNS": TABLE_COLUMNS, "BLOCK": SMALL_BLOCK_NUMBERS}
            sgd_small_weights_kernel[(len(table),)](table, grads, lr, momentum, **how)

    def _table(self, steps: list[WeightUpdate]) -> Tensor:
        rows = build_table_rows(steps)
        if rows not in self._tables:
            self._tables[rows] = torch.tensor(rows, device=steps[0].weight.device)
        return self._tables[rows]


def build_table_rows(steps: list[WeightUpdate]) -> TableRows:
    """A row for each block of each weight: three addresses, where its gradients begin, and how many numbers it has."""
    rows, begin = [], 0
    for step in steps:
        held = (step.weight, step.velocity, step.copy)
        for start in range(0, step.weight.numel(), SMALL_BLOCK_NUMBERS):
            places = [0 if t is None else t.data_ptr() + start * t.element_size() for t in held]
            rows.append((*places, begin + start, min(SMALL_BLOCK_NUMBERS, step.weight.numel() - start)))
        begin += step.weight.numel()
    return tuple(rows)


def can_step_together(step: WeightUpdate) -> bool:
    """Whether a weight can be listed: in float32, with gradients and a copy of types that are known."""
    kinds = {step.grad.dtype, step.grad.dtype if step.copy is None else step.copy.dtype} <= set(TRITON_DTYPES)
    return kinds and step.weight.dtype == step.velocity.dtype == torch.float32


def flatten_in_memory_order(x: Tensor) -> Tensor:
    """A dense tensor's numbers as they lie in memory."""
    return x.as_strided((x.numel(),), (1,))


BLOCK_NUMBERS = 4096
MIN_LARGE_WEIGHT_NUMBERS = 1 << 15
"""Weights of fewer numbers are stepped all together."""


@triton.jit
def sgd_kernel(
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


class FusedSGD:
    """A step of every weight, and of its copy if it has one: a launch for each large one, one for all small ones."""

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
        """Step them; `rest` steps those whose numbers lie in another order than their gradients'."""
        steps = list(map(WeightUpdate, weights, velocities, grads, copies))
        aligned = [step for step in steps if _has_same_layout(step)]
        small = [step for step in aligned if step.weight.numel() < MIN_LARGE_WEIGHT_NUMBERS and can_step_together(step)]
        large = [step for step in aligned if step.weight.numel() >= MIN_LARGE_WEIGHT_NUMBERS]
        for step in large:
            _step_large_weight(step, lr, momentum, decay)
        if small:
            self._small_weight_sgd.step(small, lr, momentum, decay)
        done = {id(step) for step in (*small, *large)}
        if odd := [step for step in steps if id(step) not in done]:
            *columns, kept = (list(column) for column in zip(*odd, strict=True))
            self.fallback(*columns, lr, momentum, decay, kept)


def _step_large_weight(step: WeightUpdate, lr: Tensor, momentum: Tensor, decay: float) -> None:
    w, copies = step.weight, step.copy is not None
    held = (w, step.velocity, step.grad, step.copy if step.copy is not None else w)
    grid, how = (-(-w.numel() // BLOCK_NUMBERS),), {"DECAY": decay, "COPY": copies, "BLOCK": BLOCK_NUMBERS}
    sgd_kernel[grid](*held, lr, momentum, w.numel(), num_warps=8, **how)


def _has_same_layout(step: WeightUpdate) -> bool:
    """Whether the same place in memory is the same number in all."""
    tensors = [t for t in step if t is not None]
    dense = all(t.is_contiguous() or t.is_contiguous(memory_format=torch.channels_last) for t in tensors)
    return dense and len({_memory_order(t) for t in tensors}) == 1 and step.weight.dtype == step.velocity.dtype


def _memory_order(x: Tensor) -> tuple[int, ...]:
    """How a tensor's numbers lie; along a side of one number there is no order."""
    return tuple(stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1)
