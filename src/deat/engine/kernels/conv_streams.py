"""A convolution whose weight gradient is taken beside the rest of the backward pass, on a stream of its own.

Nothing but the optimiser waits for a weight's gradient, and matrix units are idle while batch norms wait for memory.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deat.engine.kernels.conv_utils import on_gpu, pair, side

BESIDE = "_gradient_is_taken_beside"


def take_beside(leaf: Tensor) -> None:
    """Let a weight's gradient be taken beside; whoever needs it calls `join` first."""
    setattr(leaf, BESIDE, True)


def join() -> None:
    """Wait for every weight gradient that is on its way; a recording may only wait for what it began itself."""
    for device in list(_begun):
        torch.cuda.current_stream(device).wait_stream(side(device, "gradients"))
        for leaf, grad in _begun.pop(device).found.items():
            leaf.grad = grad if leaf.grad is None else leaf.grad + grad


class Begun(NamedTuple):
    """What is done beside: which gradients are read, and what was found for each weight.

    Both are kept from autograd until `join`, which would add to them in their place.
    """

    read: list[Tensor]
    found: dict[Tensor, Tensor]


_begun: dict[torch.device, Begun] = {}


class ForkedConv(torch.autograd.Function):
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
            _begin(dy, x, weight, ctx)
        by_x = _gradient(dy, x, weight, ctx.sizes, by_x=True) if ctx.needs_input_grad[0] else None
        return by_x, *[None] * 5


def _begin(dy: Tensor, x: Tensor, weight: Tensor, ctx: Any) -> None:
    """Take a weight's gradient beside."""
    beside = side(x.device, "gradients")
    beside.wait_stream(torch.cuda.current_stream(x.device))
    read, found = _begun.setdefault(x.device, Begun([], {}))
    read.append(dy)
    with torch.cuda.stream(beside):
        grad = _gradient(dy, x, weight, ctx.sizes, by_x=False)
        found[ctx.leaf] = found[ctx.leaf] + grad if ctx.leaf in found else grad
    x.record_stream(beside)


def _gradient(dy: Tensor, x: Tensor, weight: Tensor, sizes: Any, by_x: bool) -> Tensor:
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
    known = weight.requires_grad and hasattr(weight, BESIDE)
    if not known or not _plays(x, weight, bias, padding):
        return torch.conv2d(x, weight, bias, stride, padding, dilation, groups)
    pairs = [list(pair(sizes)) for sizes in (stride, padding, dilation)]
    out: Tensor = ForkedConv.apply(x, weight, *pairs, groups)  # type: ignore[no-untyped-call]
    return out


def _plays(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Any) -> bool:
    """Whether gradients will be asked for, on a GPU, of a convolution that nothing is added to."""
    plain = bias is None and not isinstance(padding, str) and x.dtype == weight.dtype
    return plain and on_gpu(x) and torch.is_grad_enabled()


_read: list[Tensor] = []
"""Gradients that are read beside. Nobody may add to them in their place, as autograd does with what it alone holds."""


def begin_conv2d(x: Tensor, *rest: Any, **named: Any) -> Tensor:
    """A convolution that is begun beside; nobody but `arrived` may look at its result."""
    if not on_gpu(x):
        return conv2d(x, *rest, **named)
    _read.clear()
    beside = side(x.device, "branches")
    beside.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(beside):
        y = conv2d(x, *rest, **named)
    x.record_stream(beside)
    if y.requires_grad:
        y.register_hook(_read.append)  # type: ignore[no-untyped-call]
    return y


def arrived(y: Tensor) -> Tensor:
    """The result of such a convolution, which is waited for."""
    if on_gpu(y):
        here = torch.cuda.current_stream(y.device)
        here.wait_stream(side(y.device, "branches"))
        y.record_stream(here)
    return y
