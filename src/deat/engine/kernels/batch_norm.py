"""Batch norm with its neighbours as one differentiable function, run by our own kernels where they apply."""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

COLUMNS = 64
"""Columns of a tile: 128 bytes of half precision, a line of the cache."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
Pair = tuple[Tensor, Tensor]


class Shape(NamedTuple):
    """How a kernel is cut: rows of a tile, warps of a program, and about how many programs there are."""

    rows: int
    warps: int
    programs: int


GATHER, WRITE = Shape(128, 4, 264), Shape(128, 4, 528)


def norm_relu(
    x: Tensor,
    other: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    beside: Tensor | None = None,
    relu: bool = False,
    sums: Tensor | None = None,
) -> Pair:
    """(y, total): total is x + other, or x, and y is its batch norm + beside, behind a ReLU if wanted.

    `sums` is what blank_sums gives, to be used once.
    """
    if serves(x, other, beside, weight, bias):
        batch = training or running_mean is None
        (sums,) = (sums,) if sums is not None else blank_sums(x, x.shape[1])
        how = (sums, batch, momentum, eps, relu)
        found: Pair = Normed.apply(x, other, beside, weight, bias, running_mean, running_var, *how)  # type: ignore[no-untyped-call]
        return found
    total = x if other is None else x + other
    y = F.batch_norm(total, running_mean, running_var, weight, bias, training, momentum, eps)
    y = y if beside is None else y + beside
    return F.relu(y) if relu else y, total


def blank_sums(like: Tensor, *channels: int) -> tuple[Tensor, ...]:
    """Room for two pairs of sums by channel, for the ways forth and back, of each batch norm; zeroed all at once."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    room = torch.zeros(4 * sum(channels), dtype=dtype, device=like.device)
    return tuple(part.view(2, 2, -1) for part in torch.split(room, [4 * c for c in channels]))


def serves(x: Tensor, other: Tensor | None, beside: Tensor | None, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether the kernels can take these: a GPU's tensors, channels last, of one type, whose indices fit 32 bits.

    Their sums come in any order, so they stand aside where every bit must repeat.
    """
    if torch.are_deterministic_algorithms_enabled():
        return False
    alike = all(t is None or (_fits(t) and t.shape == x.shape and t.dtype == x.dtype) for t in (other, beside))
    return weight is not None and bias is not None and _fits(x) and alike


def _fits(x: Tensor) -> bool:
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return x.is_cuda and last and x.dtype in DTYPES and _rows(x) > 1 and x.numel() < 2**31


class Normed(torch.autograd.Function):
    """The function and its gradient. A sum behind the norm needs its output kept, to know where the ReLU was open."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        other: Tensor | None,
        beside: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        sums: Tensor,
        batch: bool,
        momentum: float,
        eps: float,
        relu: bool,
    ) -> Pair:
        """(y, total)."""
        y, total = torch.empty_like(x), x.view_as(x) if other is None else torch.empty_like(x)
        mean, spread = x.new_empty((2, x.shape[1]), dtype=sums.dtype) if batch else (running_mean, running_var)
        track = batch and running_mean is not None
        running = (running_mean, running_var) if track or not batch else (mean, spread)
        tensors = (x, x if other is None else other, total, x if beside is None else beside, y, sums[0])
        how: dict[str, Any] = {
            "ADD": other is not None,
            "BESIDE": beside is not None,
            "RELU": relu,
            "BATCH": batch,
            "TRACK": track,
        }
        how |= {"MOMENTUM": momentum, "EPS": eps}
        _launch("forth", x, (*tensors, mean, spread, *running, weight, bias), how, gathers=batch)
        gate = y if relu and beside is not None else None
        ctx.save_for_backward(total, gate, sums, mean, spread, weight, bias)
        ctx.options = {"RELU": relu, "GATED": gate is not None, "BATCH": batch, "EPS": eps}
        ctx.set_materialize_grads(False)
        ctx.went_back = False
        return y, total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor | None, more: Tensor | None) -> tuple[Any, ...]:
        """Gradients by x and other, which are the same, by beside, by weight and by bias."""
        x, gate, sums, *columns = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if dy is None:
            return more, more if needs[1] else None, *[None] * 10
        dy, more = _laid_out(dy), None if more is None else _laid_out(more)
        learns, batch = any(needs[3:5]), ctx.options["BATCH"]
        if ctx.went_back:  # the room is full
            (sums,) = blank_sums(x, x.shape[1])
        ctx.went_back = True
        dx, by_beside = torch.empty_like(x), dy if gate is None else torch.empty_like(x)
        tensors = (dy, x, dy if gate is None else gate, dy if more is None else more, dx, by_beside, sums[1])
        how = {**ctx.options, "ADD": more is not None}
        _launch("back", x, (*tensors, *columns), how, gathers=batch or learns)
        by_bias, by_weight = (total.to(columns[2].dtype) for total in sums[1]) if learns else (None, None)
        return dx, dx if needs[1] else None, by_beside if needs[2] else None, by_weight, by_bias, *[None] * 7


def _launch(name: str, x: Tensor, tensors: tuple[Any, ...], how: dict[str, Any], gathers: bool) -> None:
    """Gather sums, if they are needed, and write."""
    from deat.engine.kernels import batch_norm_triton

    early = gathers and how["BATCH"] and _has_early(x.device)
    for gather in (True, False) if gathers else (False,):
        grid, cut = _cut(x, GATHER if gather else WRITE)
        flags = {**how, **UNASKED[name]} if gather else how
        launch = {"launch_pdl": True} if early else {}
        rows = cut.pop("rows")
        getattr(batch_norm_triton, name)[grid](
            *tensors, _rows(x), x.shape[1], rows, GATHER=gather, EARLY=early, **flags, **cut, **launch
        )


@cache
def _has_early(device: torch.device) -> bool:
    """Whether a launch can begin before the one before it has ended: on NVIDIA's GPUs since Hopper."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


UNASKED = {"forth": {"BESIDE": False, "RELU": False, "TRACK": False}, "back": {"ADD": False}}
"""What only writing asks for: the same for all that gather, so that fewer kernels are built."""


def _cut(x: Tensor, shape: Shape) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid, and the rows that a program walks over with the sizes of its tile."""
    columns = min(COLUMNS, 1 << (x.shape[1] - 1).bit_length())
    groups, tiles = -(-x.shape[1] // columns), -(-_rows(x) // shape.rows)
    rows = shape.rows * -(-tiles // min(tiles, max(1, shape.programs // groups)))
    sizes = {"rows": rows, "BM": shape.rows, "BC": columns, "ACC": _acc(x), "num_warps": shape.warps}
    return (-(-_rows(x) // rows), groups), sizes


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[1]


def _laid_out(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _acc(x: Tensor) -> Any:
    """What sums are taken in, as Triton calls it."""
    import triton.language as tl

    return tl.float64 if x.dtype == torch.float64 else tl.float32
