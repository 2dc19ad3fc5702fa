"""A convolution of images with few channels, such as a network's first one, with the standardisation before it."""

from typing import Any

import torch
from torch import Tensor

from deat.engine.kernels.kernel_utils import (
    HALF_DTYPES,
    Size2d,
    as_pair,
    is_dense_unit_stride,
    on_gpu,
    to_channels_last,
)

PADDED_CHANNELS = 8
"""The number of channels from which cuDNN uses matrix units for half-precision images."""
MAX_KERNEL_SIZE = 5
"""The largest kernel that our own convolution supports."""


def conv2d_few_channels(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    *,
    shift: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """Apply conv2d to x, or to (x - shift) / scale.

    On a GPU in half precision this runs our own kernels, or else cuDNN with channels of zeros added.

    Args:
        x: The images.
        weight: The weights.
        bias: The biases, if any.
        stride: As in torch's conv2d.
        padding: As in torch's conv2d.
        dilation: As in torch's conv2d.
        groups: As in torch's conv2d.
        shift: The mean of each channel, if x is to be standardised.
        scale: The standard deviation of each channel; given if and only if `shift` is.

    Returns:
        The output of the convolution.
    """
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    is_half = on_gpu(x) and dtype in HALF_DTYPES and weight.shape[1] == x.shape[1]
    pads = None if isinstance(padding, str) else as_pair(padding)
    if is_half and pads and is_dense_unit_stride(stride, dilation, groups) and is_supported(x, weight, bias, pads):
        y: Tensor = FirstConvFunction.apply(x, weight, bias, pads, dtype, shift, scale)  # type: ignore[no-untyped-call]
        return y
    if is_half and x.numel() // x.shape[1] * PADDED_CHANNELS < 2**31:  # the kernel counts in 32 bits
        x, weight = pad_channels(x, dtype, shift, scale), pad_channels(weight, dtype)
    elif shift is not None and scale is not None:
        x = (x - shift) / scale
    return torch.conv2d(x, weight, bias, stride, padding, dilation, groups)


def is_supported(x: Tensor, weight: Tensor, bias: Tensor | None, pads: Size2d) -> bool:
    """Whether our kernels support these: few channels, and a small kernel that is larger than the padding."""
    has_supported_dtypes = all(t is None or t.dtype in (torch.float32, *HALF_DTYPES) for t in (x, weight, bias))
    if not has_supported_dtypes or x.dim() != 4 or not x.numel():
        return False
    if weight.shape[1] != x.shape[1] or x.shape[1] >= PADDED_CHANNELS:
        return False
    sizes = list(zip(x.shape[2:], weight.shape[2:], pads, strict=True))
    is_small = all(0 <= pad < kernel <= min(MAX_KERNEL_SIZE, size + 2 * pad) for size, kernel, pad in sizes)
    return is_small and _fits_32_bit_indices(x, weight)


def _fits_32_bit_indices(x: Tensor, weight: Tensor) -> bool:
    """Whether input, output (with any padding) and the input with added channels fit 32-bit indices."""
    height, width = (size + MAX_KERNEL_SIZE for size in x.shape[2:])
    max_offset = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return max(len(x) * height * width * max(len(weight), PADDED_CHANNELS), max_offset) < 2**31


class FirstConvFunction(torch.autograd.Function):
    """The convolution with our own kernels; x's gradient needs no padding, copy or cast."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        pads: Size2d,
        dtype: torch.dtype,
        shift: Tensor | None,
        scale: Tensor | None,
    ) -> Tensor:
        """Compute the convolution, in channels-last order."""
        from deat.engine.kernels.first_conv_triton import first_conv_forward

        ctx.save_for_backward(x, weight, shift, scale)
        ctx.pads, ctx.bias_dtype = pads, None if bias is None else bias.dtype
        sizes = zip(x.shape[2:], weight.shape[2:], pads, strict=True)
        sides = (size - kernel + 1 + 2 * pad for size, kernel, pad in sizes)
        y = _empty_channels_last((len(x), len(weight), *sides), dtype, x.device)
        first_conv_forward(x, weight, bias, shift, scale, y, pads)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        """Compute the gradients with respect to x, weight and bias, as far as they are needed."""
        x, weight, shift, scale = ctx.saved_tensors
        needs, dy = ctx.needs_input_grad, to_channels_last(dy)
        grad_x = _input_gradient(dy, x, weight, scale, ctx.pads) if needs[0] else None
        grad_weight = _weight_gradient(dy, x, weight, shift, scale, ctx.pads) if needs[1] else None
        grad_bias = dy.sum((0, 2, 3), dtype=torch.float32).to(ctx.bias_dtype) if needs[2] else None
        return grad_x, grad_weight, grad_bias, *[None] * 4


def _input_gradient(dy: Tensor, x: Tensor, weight: Tensor, scale: Tensor | None, pads: Size2d) -> Tensor:
    from deat.engine.kernels.first_conv_triton import first_conv_input_gradient

    dx = torch.empty_like(x)
    first_conv_input_gradient(dy, weight, scale, dx, pads)
    return dx


def _weight_gradient(
    dy: Tensor, x: Tensor, weight: Tensor, shift: Tensor | None, scale: Tensor | None, pads: Size2d
) -> Tensor:
    """Compute the weight gradient with cuDNN, with channels of zeros that are removed afterwards."""
    padded = _copy_with_channels(x, PADDED_CHANNELS, dy.dtype, shift, scale)
    like = _empty_channels_last((len(weight), PADDED_CHANNELS, *weight.shape[2:]), dy.dtype, dy.device)
    sizes = ([1, 1], list(pads), [1, 1], False, [0, 0], 1)
    _, grad_weight, _ = torch.ops.aten.convolution_backward(dy, padded, like, None, *sizes, [False, True, False])
    return _copy_with_channels(grad_weight, weight.shape[1], weight.dtype, None, None)


def pad_channels(x: Tensor, dtype: torch.dtype, shift: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
    """Convert x, or (x - shift) / scale, to another dtype and add channels of zeros up to PADDED_CHANNELS."""
    padded: Tensor = PadChannelsFunction.apply(x, dtype, shift, scale)  # type: ignore[no-untyped-call]
    return padded


class PadChannelsFunction(torch.autograd.Function):
    """The autograd function of `pad_channels`, differentiable with respect to x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, shift: Tensor | None, scale: Tensor | None) -> Tensor:
        """Compute the padded tensor."""
        ctx.channels, ctx.dtype, ctx.scale = x.shape[1], x.dtype, scale
        return _copy_with_channels(x, PADDED_CHANNELS, dtype, shift, scale)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Compute the gradient with respect to the original channels."""
        return _copy_with_channels(grad, ctx.channels, ctx.dtype, None, ctx.scale), None, None, None


def _copy_with_channels(
    x: Tensor, channels: int, dtype: torch.dtype, shift: Tensor | None, scale: Tensor | None
) -> Tensor:
    from deat.engine.kernels.first_conv_triton import copy_channels

    out = _empty_channels_last((len(x), channels, *x.shape[2:]), dtype, x.device)
    copy_channels(to_channels_last(x), out, shift, scale)
    return out


def _empty_channels_last(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device, memory_format=torch.channels_last)
