"""The mean over pixels and the linear layer behind it as one differentiable function."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from deat.engine.kernels.kernel_utils import HALF_DTYPES, on_gpu

MAX_CLASSES, MAX_CHANNELS = 64, 4096
"""As many as our kernels take; with more classes a matrix product is better."""


def pooled_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The linear layer of x's means over pixels; on a GPU in half precision by our own kernels."""
    if is_supported(x, weight, bias):
        y: Tensor = PooledLinearFunction.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return y
    return F.linear(x.mean((2, 3)), weight, bias)


def is_supported(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether our kernels can take these: half-precision features, channels last, and few classes."""
    half = on_gpu(x) and x.dtype in HALF_DTYPES and x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    kinds = all(t is None or (t.is_contiguous() and t.dtype in (torch.float32, x.dtype)) for t in (weight, bias))
    fits = len(weight) <= MAX_CLASSES and x.shape[1] == weight.shape[1] <= MAX_CHANNELS and 0 < x.numel() < 2**31
    return half and kinds and fits and _matches_compute_dtype(x.dtype, weight)


def _matches_compute_dtype(dtype: torch.dtype, weight: Tensor) -> bool:
    """Whether torch would compute in that type, too."""
    return torch.get_autocast_dtype("cuda") == dtype if torch.is_autocast_enabled("cuda") else weight.dtype == dtype


class PooledLinearFunction(torch.autograd.Function):
    """The function and its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Logits."""
        from deat.engine.kernels.classifier_head_triton import head_forward

        y, pooled = head_forward(x, weight, bias)
        ctx.save_for_backward(pooled, weight, bias)
        ctx.shape = x.shape
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        """Gradients by x, weight and bias, each only where it is asked for."""
        from deat.engine.kernels.classifier_head_triton import head_input_gradient, head_weight_gradient

        pooled, weight, bias = ctx.saved_tensors
        dy, needs = dy.contiguous(), ctx.needs_input_grad
        by_x = head_input_gradient(dy, weight, ctx.shape) if needs[0] else None
        by_weight, by_bias = head_weight_gradient(dy, pooled, weight, bias) if any(needs[1:]) else (None, None)
        return by_x, by_weight if needs[1] else None, by_bias if needs[2] else None
