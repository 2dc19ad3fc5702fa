"""Cross-entropy of each image, or of a batch on average, as one differentiable function."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from deat.engine.kernels.kernel_utils import HALF_DTYPES, on_gpu

MAX_CLASSES = 1024
"""As many as a tile takes."""
MAX_FUSED_MEAN_LOGITS = 4096
"""Logits whose mean is taken with them, by one program."""


def fused_cross_entropy(logits: Tensor, y: Tensor, *, mean: bool = False) -> Tensor:
    """-log p[y] in float32, of half-precision logits, for each image or on average; on a GPU by our own kernels."""
    if not is_supported(logits, y):
        losses = F.cross_entropy(logits.float(), y, reduction="none")
        return losses.mean() if mean else losses
    within = mean and logits.numel() <= MAX_FUSED_MEAN_LOGITS
    found: Tensor = CrossEntropyFunction.apply(logits, y, within)  # type: ignore[no-untyped-call]
    return found.mean() if mean and not within else found


def is_supported(logits: Tensor, y: Tensor) -> bool:
    """Whether our kernels can take these."""
    plain = on_gpu(logits) and logits.dim() == 2 and logits.is_contiguous() and y.is_contiguous()
    return plain and logits.dtype in HALF_DTYPES and 0 < logits.shape[1] <= MAX_CLASSES and len(logits) > 0


class CrossEntropyFunction(torch.autograd.Function):
    """The function and its gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, y: Tensor, mean: bool) -> Tensor:
        """Each image's, or their mean."""
        from deat.engine.kernels.cross_entropy_triton import cross_entropy_forward

        ctx.save_for_backward(logits, y)
        loss = torch.empty(() if mean else len(logits), dtype=torch.float32, device=logits.device)
        cross_entropy_forward(logits, y, loss)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Any, ...]:
        """The gradient by the logits."""
        from deat.engine.kernels.cross_entropy_triton import cross_entropy_backward

        logits, y = ctx.saved_tensors
        grad = torch.empty_like(logits)
        cross_entropy_backward(logits, y, slope.contiguous(), grad)
        return grad, None, None
