"""A convolution of images of few channels, such as a network's first one, with the standardisation before it."""

from typing import Any

import torch
from torch import Tensor

CHANNELS = 8
"""From how many channels on a GPU's matrix units take half-precision images; below, cuDNN does without them."""
HALVES = (torch.bfloat16, torch.float16)


def conv2d_of_few(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *rest: Any,
    shift: Tensor | None = None,
    scale: Tensor | None = None,
    **named: Any,
) -> Tensor:
    """conv2d of x, or of (x - shift) / scale, with channels of zeros added on a GPU in half precision."""
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    fits = x.numel() // x.shape[1] * CHANNELS < 2**31  # the kernel counts in 32 bits
    if x.is_cuda and dtype in HALVES and weight.shape[1] == x.shape[1] and fits:
        x, weight = widened(x, dtype, shift, scale), widened(weight, dtype)
    elif shift is not None and scale is not None:
        x = (x - shift) / scale
    return torch.conv2d(x, weight, bias, *rest, **named)


def widened(x: Tensor, dtype: torch.dtype, shift: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
    """x, or (x - shift) / scale, in another type with CHANNELS channels; those it does not have are zero."""
    wide: Tensor = Widened.apply(x, dtype, shift, scale)  # type: ignore[no-untyped-call]
    return wide


class Widened(torch.autograd.Function):
    """`widened`, by x differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, shift: Tensor | None, scale: Tensor | None) -> Tensor:
        """The wider tensor."""
        ctx.channels, ctx.dtype, ctx.scale = x.shape[1], x.dtype, scale
        return _copied(x, CHANNELS, dtype, shift, scale)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """The gradient by the channels that were there."""
        return _copied(grad, ctx.channels, ctx.dtype, None, ctx.scale), None, None, None


def _copied(x: Tensor, channels: int, dtype: torch.dtype, shift: Tensor | None, scale: Tensor | None) -> Tensor:
    from deat.kernels.copy import fit_channels

    shape, last = (len(x), channels, *x.shape[2:]), torch.channels_last
    out = torch.empty(shape, dtype=dtype, device=x.device, memory_format=last)
    fit_channels(x.contiguous(memory_format=last), out, shift, scale)
    return out
