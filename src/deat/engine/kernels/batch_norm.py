"""Batch norm with the sums and the ReLU around it as one differentiable function, with our own kernels."""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from deat.engine.kernels.kernel_utils import ceil_div, is_channels_last, next_power_of_two, to_channels_last

MAX_TILE_COLUMNS = 64
"""Columns of a tile: 128 bytes of half precision, a cache line."""
SUPPORTED_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
TensorPair = tuple[Tensor, Tensor]


class LaunchShape(NamedTuple):
    """Rows of a tile, warps of a program, and the approximate number of programs of a kernel."""

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
    """Compute relu(batch_norm(x + addend) + residual).

    Args:
        x: The input.
        addend: Added to x before the batch norm, if given.
        running_mean: As in torch's batch_norm.
        running_var: As in torch's batch_norm.
        weight: As in torch's batch_norm.
        bias: As in torch's batch_norm.
        training: As in torch's batch_norm.
        momentum: As in torch's batch_norm.
        eps: As in torch's batch_norm.
        residual: Added after the batch norm, if given.
        relu: Whether to apply a ReLU at the end.
        sums: A tensor of `allocate_sums`, for one call only; allocated if not given.

    Returns:
        The output, and x + addend (x itself without an addend).
    """
    if is_supported(x, addend, residual, weight, bias):
        use_batch_statistics = training or running_mean is None
        (sums,) = (sums,) if sums is not None else allocate_sums(x, x.shape[1])
        options = (sums, use_batch_statistics, momentum, eps, relu)
        outputs: TensorPair = BatchNormFunction.apply(  # type: ignore[no-untyped-call]
            x, addend, residual, weight, bias, running_mean, running_var, *options
        )
        return outputs
    total = x if addend is None else x + addend
    y = F.batch_norm(total, running_mean, running_var, weight, bias, training, momentum, eps)
    y = y if residual is None else y + residual
    return F.relu(y) if relu else y, total


def allocate_sums(like: Tensor, *channels: int) -> tuple[Tensor, ...]:
    """Allocate the sums of several batch norms, zeroed by one launch.

    Args:
        like: A tensor on the same device; the sums are float64 if it is, otherwise float32.
        channels: The number of channels of each batch norm.

    Returns:
        For each batch norm, two sums by channel for the forward and two for the backward kernel.
    """
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    memory = torch.zeros(4 * sum(channels), dtype=dtype, device=like.device)
    return tuple(part.view(2, 2, -1) for part in torch.split(memory, [4 * c for c in channels]))


def is_supported(
    x: Tensor, addend: Tensor | None, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None
) -> bool:
    """Whether the kernels support these: tensors on a GPU, channels last, of one dtype, with 32-bit indices.

    The kernels add their sums in any order, so they are not used with deterministic algorithms.
    """
    if torch.are_deterministic_algorithms_enabled():
        return False
    are_terms_supported = all(
        t is None or (_is_supported_tensor(t) and t.shape == x.shape and t.dtype == x.dtype) for t in (addend, residual)
    )
    return weight is not None and bias is not None and _is_supported_tensor(x) and are_terms_supported


def _is_supported_tensor(x: Tensor) -> bool:
    return x.is_cuda and is_channels_last(x) and x.dtype in SUPPORTED_DTYPES and _num_rows(x) > 1 and x.numel() < 2**31


class BatchNormFunction(torch.autograd.Function):
    """The autograd function of `fused_batch_norm`. With a residual, the output is saved for the ReLU's gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        addend: Tensor | None,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        sums: Tensor,
        use_batch_statistics: bool,
        momentum: float,
        eps: float,
        relu: bool,
    ) -> TensorPair:
        """Compute the output, and x + addend."""
        y, total = torch.empty_like(x), x.view_as(x) if addend is None else torch.empty_like(x)
        mean, inv_std_or_var = (
            x.new_empty((2, x.shape[1]), dtype=sums.dtype) if use_batch_statistics else (running_mean, running_var)
        )
        track = use_batch_statistics and running_mean is not None
        running = (running_mean, running_var) if track or not use_batch_statistics else (mean, inv_std_or_var)
        tensors = (x, x if addend is None else addend, total, x if residual is None else residual, y, sums[0])
        options: dict[str, Any] = {
            "ADD": addend is not None,
            "RESIDUAL": residual is not None,
            "RELU": relu,
            "BATCH": use_batch_statistics,
            "TRACK": track,
            "MOMENTUM": momentum,
            "EPS": eps,
        }
        vectors = (mean, inv_std_or_var, *running, weight, bias)
        _launch("batch_norm_forward_kernel", x, (*tensors, *vectors), options, needs_sums=use_batch_statistics)
        gate = y if relu and residual is not None else None
        ctx.save_for_backward(total, gate, sums, mean, inv_std_or_var, weight, bias)
        ctx.options = {"RELU": relu, "GATED": gate is not None, "BATCH": use_batch_statistics, "EPS": eps}
        ctx.set_materialize_grads(False)
        ctx.sums_used = False
        return y, total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor | None, extra_dx: Tensor | None) -> tuple[Any, ...]:
        """Compute the gradients with respect to x and addend (which are equal), residual, weight and bias."""
        x, gate, sums, *columns = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if dy is None:
            return extra_dx, extra_dx if needs[1] else None, *[None] * 10
        dy, extra_dx = to_channels_last(dy), None if extra_dx is None else to_channels_last(extra_dx)
        needs_affine, use_batch_statistics = any(needs[3:5]), ctx.options["BATCH"]
        if ctx.sums_used:  # by an earlier backward pass of this graph
            (sums,) = allocate_sums(x, x.shape[1])
        ctx.sums_used = True
        dx, grad_residual = torch.empty_like(x), dy if gate is None else torch.empty_like(x)
        tensors = (
            dy,
            x,
            dy if gate is None else gate,
            dy if extra_dx is None else extra_dx,
            dx,
            grad_residual,
            sums[1],
        )
        options = {**ctx.options, "ADD": extra_dx is not None}
        _launch(
            "batch_norm_backward_kernel",
            x,
            (*tensors, *columns),
            options,
            needs_sums=use_batch_statistics or needs_affine,
        )
        grad_bias, grad_weight = (total.to(columns[2].dtype) for total in sums[1]) if needs_affine else (None, None)
        return dx, dx if needs[1] else None, grad_residual if needs[2] else None, grad_weight, grad_bias, *[None] * 7


def _launch(name: str, x: Tensor, tensors: tuple[Any, ...], options: dict[str, Any], needs_sums: bool) -> None:
    """Launch a kernel to gather sums, if they are needed, and then to write its output."""
    from deat.engine.kernels import batch_norm_triton

    launch_early = needs_sums and options["BATCH"] and _has_dependent_launch(x.device)
    for gather in (True, False) if needs_sums else (False,):
        grid, sizes = _grid_and_sizes(x, SUMS_LAUNCH if gather else OUTPUT_LAUNCH)
        flags = {**options, **OUTPUT_ONLY_FLAGS[name]} if gather else options
        launch = {"launch_pdl": True} if launch_early else {}
        rows = sizes.pop("rows")
        getattr(batch_norm_triton, name)[grid](
            *tensors, _num_rows(x), x.shape[1], rows, GATHER=gather, EARLY=launch_early, **flags, **sizes, **launch
        )


@cache
def _has_dependent_launch(device: torch.device) -> bool:
    """Whether a launch can begin before the previous one has ended: on NVIDIA GPUs since Hopper."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


OUTPUT_ONLY_FLAGS = {
    "batch_norm_forward_kernel": {"RESIDUAL": False, "RELU": False, "TRACK": False},
    "batch_norm_backward_kernel": {"ADD": False},
}
"""Flags that matter for the output only. Fixed values for gathering mean that fewer kernels are built."""


def _grid_and_sizes(x: Tensor, launch_shape: LaunchShape) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid, the rows of a program, and the sizes of its tile."""
    columns = min(MAX_TILE_COLUMNS, next_power_of_two(x.shape[1]))
    groups, tiles = ceil_div(x.shape[1], columns), ceil_div(_num_rows(x), launch_shape.rows)
    rows = launch_shape.rows * ceil_div(tiles, min(tiles, max(1, launch_shape.programs // groups)))
    sizes = {
        "rows": rows,
        "BM": launch_shape.rows,
        "BC": columns,
        "ACC": _accumulator_dtype(x),
        "num_warps": launch_shape.warps,
    }
    return (ceil_div(_num_rows(x), rows), groups), sizes


def _num_rows(x: Tensor) -> int:
    return x.numel() // x.shape[1]


def _accumulator_dtype(x: Tensor) -> Any:
    """The dtype of the sums, for Triton."""
    import triton.language as tl

    return tl.float64 if x.dtype == torch.float64 else tl.float32
