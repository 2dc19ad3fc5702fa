"""Batch norm with its neighbours as one differentiable function, run by our own kernels where they apply."""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

MAX_TILE_COLUMNS = 64
"""Columns of a tile: 128 bytes of half precision, a line of the cache."""
SUPPORTED_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
TensorPair = tuple[Tensor, Tensor]


class LaunchShape(NamedTuple):
    """How a kernel is cut: rows of a tile, warps of a program, and about how many programs there are."""

    rows: int
    warps: int
    programs: int


SUMS_LAUNCH, OUTPUT_LAUNCH = LaunchShape(128, 4, 264), LaunchShape(128, 4, 528)


def fused_batch_norm(
    x: Tensor,
    addend: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    relu: bool = False,
    sums: Tensor | None = None,
) -> TensorPair:
    """(y, total): total is x + other, or x, and y is its batch norm + beside, behind a ReLU if wanted.

    `sums` is what blank_sums gives, to be used once.
    """
    if is_supported(x, addend, residual, weight, bias):
        batch = training or running_mean is None
        (sums,) = (sums,) if sums is not None else allocate_sums(x, x.shape[1])
        how = (sums, batch, momentum, eps, relu)
        found: TensorPair = BatchNormFunction.apply(x, addend, residual, weight, bias, running_mean, running_var, *how)  # type: ignore[no-untyped-call]
        return found
    total = x if addend is None else x + addend
    y = F.batch_norm(total, running_mean, running_var, weight, bias, training, momentum, eps)
    y = y if residual is None else y + residual
    return F.relu(y) if relu else y, total


def allocate_sums(like: Tensor, *channels: int) -> tuple[Tensor, ...]:
    """Room for two pairs of sums by channel, for the ways forth and back, of each batch norm; zeroed all at once."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    room = torch.zeros(4 * sum(channels), dtype=dtype, device=like.device)
    return tuple(part.view(2, 2, -1) for part in torch.split(room, [4 * c for c in channels]))


def is_supported(
    x: Tensor, addend: Tensor | None, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None
) -> bool:
    """Whether the kernels can take these: a GPU's tensors, channels last, of one type, whose indices fit 32 bits.

    Their sums come in any order, so they stand aside where every bit must repeat.
    """
    if torch.are_deterministic_algorithms_enabled():
        return False
    alike = all(
        t is None or (_is_supported_tensor(t) and t.shape == x.shape and t.dtype == x.dtype) for t in (addend, residual)
    )
    return weight is not None and bias is not None and _is_supported_tensor(x) and alike


def _is_supported_tensor(x: Tensor) -> bool:
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return x.is_cuda and last and x.dtype in SUPPORTED_DTYPES and _num_rows(x) > 1 and x.numel() < 2**31


class BatchNormFunction(torch.autograd.Function):
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
    ) -> TensorPair:
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
        _launch("batch_norm_forward_kernel", x, (*tensors, mean, spread, *running, weight, bias), how, needs_sums=batch)
        gate = y if relu and beside is not None else None
        ctx.save_for_backward(total, gate, sums, mean, spread, weight, bias)
        ctx.options = {"RELU": relu, "GATED": gate is not None, "BATCH": batch, "EPS": eps}
        ctx.set_materialize_grads(False)
        ctx.sums_used = False
        return y, total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor | None, more: Tensor | None) -> tuple[Any, ...]:
        """Gradients by x and other, which are the same, by beside, by weight and by bias."""
        x, gate, sums, *columns = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if dy is None:
            return more, more if needs[1] else None, *[None] * 10
        dy, more = _to_channels_last(dy), None if more is None else _to_channels_last(more)
        learns, batch = any(needs[3:5]), ctx.options["BATCH"]
        if ctx.sums_used:  # the room is full
            (sums,) = allocate_sums(x, x.shape[1])
        ctx.sums_used = True
        dx, by_beside = torch.empty_like(x), dy if gate is None else torch.empty_like(x)
        tensors = (dy, x, dy if gate is None else gate, dy if more is None else more, dx, by_beside, sums[1])
        how = {**ctx.options, "ADD": more is not None}
        _launch("batch_norm_backward_kernel", x, (*tensors, *columns), how, needs_sums=batch or learns)
        by_bias, by_weight = (total.to(columns[2].dtype) for total in sums[1]) if learns else (None, None)
        return dx, dx if needs[1] else None, by_beside if needs[2] else None, by_weight, by_bias, *[None] * 7


def _launch(name: str, x: Tensor, tensors: tuple[Any, ...], options: dict[str, Any], needs_sums: bool) -> None:
    """Gather sums, if they are needed, and write."""
    from deat.engine.kernels import batch_norm_triton

    early = needs_sums and options["BATCH"] and _has_dependent_launch(x.device)
    for gather in (True, False) if needs_sums else (False,):
        grid, cut = _grid_and_sizes(x, SUMS_LAUNCH if gather else OUTPUT_LAUNCH)
        flags = {**options, **OUTPUT_ONLY_FLAGS[name]} if gather else options
        launch = {"launch_pdl": True} if early else {}
        rows = cut.pop("rows")
        getattr(batch_norm_triton, name)[grid](
            *tensors, _num_rows(x), x.shape[1], rows, GATHER=gather, EARLY=early, **flags, **cut, **launch
        )


@cache
def _has_dependent_launch(device: torch.device) -> bool:
    """Whether a launch can begin before the one before it has ended: on NVIDIA's GPUs since Hopper."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


OUTPUT_ONLY_FLAGS = {
    "batch_norm_forward_kernel": {"BESIDE": False, "RELU": False, "TRACK": False},
    "batch_norm_backward_kernel": {"ADD": False},
}
"""What only writing asks for: the same for all that gather, so that fewer kernels are built."""


def _grid_and_sizes(x: Tensor, launch_shape: LaunchShape) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid, and the rows that a program walks over with the sizes of its tile."""
    columns = min(MAX_TILE_COLUMNS, 1 << (x.shape[1] - 1).bit_length())
    groups, tiles = -(-x.shape[1] // columns), -(-_num_rows(x) // launch_shape.rows)
    rows = launch_shape.rows * -(-tiles // min(tiles, max(1, launch_shape.programs // groups)))
    sizes = {
        "rows": rows,
        "BM": launch_shape.rows,
        "BC": columns,
        "ACC": _accumulator_dtype(x),
        "num_warps": launch_shape.warps,
    }
    return (-(-_num_rows(x) // rows), groups), sizes


def _num_rows(x: Tensor) -> int:
    return x.numel() // x.shape[1]


def _to_channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _accumulator_dtype(x: Tensor) -> Any:
    """What sums are taken in, as Triton calls it."""
    import triton.language as tl

    return tl.float64 if x.dtype == torch.float64 else tl.float32
