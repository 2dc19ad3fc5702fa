"""Global average pooling and the linear layer after it, as one differentiable function."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from deat.engine.kernels.kernel_utils import HALF_DTYPES, is_channels_last, on_gpu

MAX_CLASSES, MAX_CHANNELS = 64, 4096
"""The limits of our kernels; with more classes a matrix product is faster."""


def pooled_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply a linear layer to the means of x over its pixels; on a GPU in half precision with our own kernels."""
    if is_supported(x, weight, bias):
        y: Tensor = PooledLinearFunction.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return y
    return F.linear(x.mean((2, 3)), weight, bias)


def is_supported(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether our kernels support these: half-precision features in channels-last order, and few classes."""
    is_half = on_gpu(x) and x.dtype in HALF_DTYPES and is_channels_last(x)
    has_supported_weights = all(
        t is None or (t.is_contiguous() and t.dtype in (torch.float32, x.dtype)) for t in (weight, bias)
    )
    fits = len(weight) <= MAX_CLASSES and x.shape[1] == weight.shape[1] <= MAX_CHANNELS and 0 < x.numel() < 2**31
    return is_half and has_supported_weights and fits and _matches_compute_dtype(x.dtype, weight)


def _matches_compute_dtype(dtype: torch.dtype, weight: Tensor) -> bool:
    """Whether torch would compute in that dtype, too."""
    return torch.get_autocast_dtype("cuda") == dtype if torch.is_autocast_enabled("cuda") else weight.dtype == dtype


class PooledLinearFunction(torch.autograd.Function):
    """The autograd function of `pooled_linear`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the logits."""
        from deat.engine.kernels.classifier_head_triton import head_forward

        y, pooled = head_forward(x, weight, bias)
        ctx.save_for_backward(pooled, weight, bias)
        ctx.shape = x.shape
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        """Compute the gradients with respect to x, weight and bias, as far as they are needed."""
        from deat.engine.kernels.classifier_head_triton import head_input_gradient, head_weight_gradient

        pooled, weight, bias = ctx.saved_tensors
        dy, needs = dy.contiguous(), ctx.needs_input_grad
        grad_x = head_input_gradient(dy, weight, ctx.shape) if needs[0] else None
        grad_weight, grad_bias = head_weight_gradient(dy, pooled, weight, bias) if any(needs[1:]) else (None, None)
        return grad_x, grad_weight if needs[1] else None, grad_bias if needs[2] else None
