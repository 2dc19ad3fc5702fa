"""A convolution whose weight gradient is taken beside the rest of the backward pass, on a stream of its own.

Nothing but the optimiser waits for a weight's gradient, and matrix units are idle while batch norms wait for memory.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deat.engine.kernels.kernel_utils import as_pair, get_side_stream, on_gpu

SIDE_STREAM_FLAG = "_gradient_is_taken_beside"


def mark_for_side_stream(leaf: Tensor) -> None:
    """Let a weight's gradient be taken beside; whoever needs it calls `join` first."""
    setattr(leaf, SIDE_STREAM_FLAG, True)


def wait_for_gradients() -> None:
    """Wait for every weight gradient that is on its way; a recording may only wait for what it began itself."""
    for device in list(_pending):
        torch.cuda.current_stream(device).wait_stream(get_side_stream(device, "gradients"))
        for leaf, grad in _pending.pop(device).found.items():
            leaf.grad = grad if leaf.grad is None else leaf.grad + grad


class PendingGradients(NamedTuple):
    """What is done beside: which gradients are read, and what was found for each weight.

    Both are kept from autograd until `join`, which would add to them in their place.
    """

    read: list[Tensor]
    found: dict[Tensor, Tensor]


_pending: dict[torch.device, PendingGradients] = {}


class SideStreamConvFunction(torch.autograd.Function):
    """conv2d without a bias; a weight that learns, a leaf, finds its gradient in .grad once `join` was called."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, leaf: Tensor, *sizes: Any) -> Tensor:
        """The convolution; sizes are stride, padding, dilation and groups."""
        ctx.save_for_backward(x, leaf)
        ctx.leaf, ctx.sizes = leaf, sizes
        return torch.conv2d(x, leaf, None, *sizes)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        """The gradient by x; the weight's is on its way."""
        x, weight = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            _start_weight_gradient(dy, x, weight, ctx)
        by_x = _conv_gradient(dy, x, weight, ctx.sizes, by_x=True) if ctx.needs_input_grad[0] else None
        return by_x, *[None] * 5


def _start_weight_gradient(dy: Tensor, x: Tensor, weight: Tensor, ctx: Any) -> None:
    """Take a weight's gradient beside."""
    beside = get_side_stream(x.device, "gradients")
    beside.wait_stream(torch.cuda.current_stream(x.device))
    read, found = _pending.setdefault(x.device, PendingGradients([], {}))
    read.append(dy)
    with torch.cuda.stream(beside):
        grad = _conv_gradient(dy, x, weight, ctx.sizes, by_x=False)
        found[ctx.leaf] = found[ctx.leaf] + grad if ctx.leaf in found else grad
    x.record_stream(beside)


def _conv_gradient(dy: Tensor, x: Tensor, weight: Tensor, sizes: Any, by_x: bool) -> Tensor:
    stride, padding, dilation, groups = sizes
    found = torch.ops.aten.convolution_backward(
        dy, x, weight, None, stride, padding, dilation, False, [0, 0], groups, [by_x, not by_x, False]
    )
    gradient: Tensor = found[0] if by_x else found[1]
    return gradient


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """conv2d, on a GPU forked where the weight learns and `take_beside` was told of it."""
    known = weight.requires_grad and hasattr(weight, SIDE_STREAM_FLAG)
    if not known or not _can_use_side_stream(x, weight, bias, padding):
        return torch.conv2d(x, weight, bias, stride, padding, dilation, groups)
    pairs = [list(as_pair(sizes)) for sizes in (stride, padding, dilation)]
    out: Tensor = SideStreamConvFunction.apply(x, weight, *pairs, groups)  # type: ignore[no-untyped-call]
    return out


def _can_use_side_stream(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Any) -> bool:
    """Whether gradients will be asked for, on a GPU, of a convolution that nothing is added to."""
    plain = bias is None and not isinstance(padding, str) and x.dtype == weight.dtype
    return plain and on_gpu(x) and torch.is_grad_enabled()


_gradients_in_use: list[Tensor] = []
"""Gradients that are read beside. Nobody may add to them in their place, as autograd does with what it alone holds."""


def start_conv2d(x: Tensor, *rest: Any, **named: Any) -> Tensor:
    """A convolution that is begun beside; nobody but `arrived` may look at its result."""
    if not on_gpu(x):
        return conv2d(x, *rest, **named)
    _gradients_in_use.clear()
    beside = get_side_stream(x.device, "branches")
    beside.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(beside):
        y = conv2d(x, *rest, **named)
    x.record_stream(beside)
    if y.requires_grad:
        y.register_hook(_gradients_in_use.append)  # type: ignore[no-untyped-call]
    return y


def wait_for_conv2d(y: Tensor) -> Tensor:
    """The result of such a convolution, which is waited for."""
    if on_gpu(y):
        here = torch.cuda.current_stream(y.device)
        here.wait_stream(get_side_stream(y.device, "branches"))
        y.record_stream(here)
    return y
