"""Convolutions that run on side streams: weight gradients, and branches whose results are needed later.

Only the optimiser needs a weight's gradient, and matrix units are idle while batch norms wait for memory.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deat.engine.kernels.kernel_utils import as_pair, get_side_stream, on_gpu

SIDE_STREAM_FLAG = "_weight_gradient_on_side_stream"


def mark_for_side_stream(leaf: Tensor) -> None:
    """Allow a weight's gradient to be computed on the side stream.

    Args:
        leaf: The weight. Call `wait_for_gradients` before reading its gradient.
    """
    setattr(leaf, SIDE_STREAM_FLAG, True)


def wait_for_gradients() -> None:
    """Wait for the pending weight gradients, and add them to `.grad`. Call it in the recording that started them."""
    for device in list(_pending):
        torch.cuda.current_stream(device).wait_stream(get_side_stream(device, "gradients"))
        for leaf, grad in _pending.pop(device).weight_gradients.items():
            leaf.grad = grad if leaf.grad is None else leaf.grad + grad


class PendingGradients(NamedTuple):
    """The work of a side stream: the gradients that it reads, and the gradient of each weight.

    References to both are kept until `wait_for_gradients`, since autograd adds in place to gradients that nothing else
    references.
    """

    gradients_in_use: list[Tensor]
    weight_gradients: dict[Tensor, Tensor]


_pending: dict[torch.device, PendingGradients] = {}


class SideStreamConvFunction(torch.autograd.Function):
    """conv2d without a bias; the gradient of its weight, a leaf, is in `.grad` after `wait_for_gradients`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, leaf: Tensor, *sizes: Any) -> Tensor:
        """Compute the convolution; sizes are stride, padding, dilation and groups."""
        ctx.save_for_backward(x, leaf)
        ctx.leaf, ctx.sizes = leaf, sizes
        return torch.conv2d(x, leaf, None, *sizes)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        """Compute the gradient with respect to x, and start that of the weight."""
        x, weight = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            _start_weight_gradient(dy, x, weight, ctx)
        grad_x = _conv_gradient(dy, x, weight, ctx.sizes, needs_grad_x=True) if ctx.needs_input_grad[0] else None
        return grad_x, *[None] * 5


def _start_weight_gradient(dy: Tensor, x: Tensor, weight: Tensor, ctx: Any) -> None:
    """Start a weight's gradient on the side stream."""
    side_stream = get_side_stream(x.device, "gradients")
    side_stream.wait_stream(torch.cuda.current_stream(x.device))
    gradients_in_use, weight_gradients = _pending.setdefault(x.device, PendingGradients([], {}))
    gradients_in_use.append(dy)
    with torch.cuda.stream(side_stream):
        grad = _conv_gradient(dy, x, weight, ctx.sizes, needs_grad_x=False)
        weight_gradients[ctx.leaf] = weight_gradients[ctx.leaf] + grad if ctx.leaf in weight_gradients else grad
    x.record_stream(side_stream)


def _conv_gradient(dy: Tensor, x: Tensor, weight: Tensor, sizes: Any, needs_grad_x: bool) -> Tensor:
    stride, padding, dilation, groups = sizes
    gradients = torch.ops.aten.convolution_backward(
        dy, x, weight, None, stride, padding, dilation, False, [0, 0], groups, [needs_grad_x, not needs_grad_x, False]
    )
    gradient: Tensor = gradients[0] if needs_grad_x else gradients[1]
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
    """Apply conv2d; on a GPU, the gradient of a weight marked by `mark_for_side_stream` uses the side stream."""
    is_marked = weight.requires_grad and hasattr(weight, SIDE_STREAM_FLAG)
    if not is_marked or not _can_use_side_stream(x, weight, bias, padding):
        return torch.conv2d(x, weight, bias, stride, padding, dilation, groups)
    pairs = [list(as_pair(sizes)) for sizes in (stride, padding, dilation)]
    out: Tensor = SideStreamConvFunction.apply(x, weight, *pairs, groups)  # type: ignore[no-untyped-call]
    return out


def _can_use_side_stream(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Any) -> bool:
    """Whether a gradient can be needed, on a GPU, by a convolution without a bias."""
    is_plain = bias is None and not isinstance(padding, str) and x.dtype == weight.dtype
    return is_plain and on_gpu(x) and torch.is_grad_enabled()


_gradients_in_use: list[Tensor] = []
"""Gradients that a side stream reads. This reference keeps autograd from adding to them in place."""


def start_conv2d(x: Tensor, *rest: Any, **named: Any) -> Tensor:
    """Start a convolution on a side stream; only `wait_for_conv2d` may read its result."""
    if not on_gpu(x):
        return conv2d(x, *rest, **named)
    _gradients_in_use.clear()
    side_stream = get_side_stream(x.device, "branches")
    side_stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(side_stream):
        y = conv2d(x, *rest, **named)
    x.record_stream(side_stream)
    if y.requires_grad:
        y.register_hook(_gradients_in_use.append)  # type: ignore[no-untyped-call]
    return y


def wait_for_conv2d(y: Tensor) -> Tensor:
    """Wait for the result of `start_conv2d`."""
    if on_gpu(y):
        stream = torch.cuda.current_stream(y.device)
        stream.wait_stream(get_side_stream(y.device, "branches"))
        y.record_stream(stream)
    return y
