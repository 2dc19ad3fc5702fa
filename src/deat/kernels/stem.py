"""A convolution of images of few channels, such as a network's first one."""

from typing import Any

import torch
from torch import Tensor

CHANNELS = 8
"""From how many channels on a GPU's matrix units take half-precision images; below, cuDNN does without them."""
HALVES = (torch.bfloat16, torch.float16)


def conv2d_of_few(x: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any, **named: Any) -> Tensor:
    """conv2d, with channels of zeros added on a GPU in half precision."""
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    if not x.is_cuda or dtype not in HALVES or weight.shape[1] != x.shape[1]:
        return torch.conv2d(x, weight, bias, *rest, **named)
    return torch.conv2d(Widened.apply(x, dtype), Widened.apply(weight, dtype), bias, *rest, **named)  # type: ignore[no-untyped-call]


class Widened(torch.autograd.Function):
    """A tensor in channels-last order with CHANNELS channels, those it does not have being zero, in another type."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The wider tensor."""
        ctx.channels, ctx.dtype = x.shape[1], x.dtype
        return _copied(x, CHANNELS, dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The gradient by the channels that were there."""
        return _copied(grad, ctx.channels, ctx.dtype), None


def _copied(x: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    from deat.kernels.copy import fit_channels

    shape, last = (len(x), channels, *x.shape[2:]), torch.channels_last
    out = torch.empty(shape, dtype=dtype, device=x.device, memory_format=last)
    fit_channels(x.contiguous(memory_format=last), out)
    return out
