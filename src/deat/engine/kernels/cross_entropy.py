"""The cross-entropy of each image, or its mean over a batch, as one differentiable function."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from deat.engine.kernels.kernel_utils import HALF_DTYPES, on_gpu

MAX_CLASSES = 1024
"""The limit of a tile."""
MAX_FUSED_MEAN_LOGITS = 4096
"""Up to this many logits, one program computes the losses and their mean."""


def fused_cross_entropy(logits: Tensor, y: Tensor, *, mean: bool = False) -> Tensor:
    """Compute -log p[y] of half-precision logits in float32, for each image or its mean; on a GPU with our kernels."""
    if not is_supported(logits, y):
        losses = F.cross_entropy(logits.float(), y, reduction="none")
        return losses.mean() if mean else losses
    fuse_mean = mean and logits.numel() <= MAX_FUSED_MEAN_LOGITS
    loss: Tensor = CrossEntropyFunction.apply(logits, y, fuse_mean)  # type: ignore[no-untyped-call]
    return loss.mean() if mean and not fuse_mean else loss


def is_supported(logits: Tensor, y: Tensor) -> bool:
    """Whether our kernels support these: contiguous half-precision logits on a GPU, with few classes."""
    is_plain = on_gpu(logits) and logits.dim() == 2 and logits.is_contiguous() and y.is_contiguous()
    return is_plain and logits.dtype in HALF_DTYPES and 0 < logits.shape[1] <= MAX_CLASSES and len(logits) > 0


class CrossEntropyFunction(torch.autograd.Function):
    """The autograd function of `fused_cross_entropy`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, y: Tensor, mean: bool) -> Tensor:
        """Compute each image's loss, or their mean."""
        from deat.engine.kernels.cross_entropy_triton import cross_entropy_forward

        ctx.save_for_backward(logits, y)
        loss = torch.empty(() if mean else len(logits), dtype=torch.float32, device=logits.device)
        cross_entropy_forward(logits, y, loss)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        """Compute the gradient with respect to the logits."""
        from deat.engine.kernels.cross_entropy_triton import cross_entropy_backward

        logits, y = ctx.saved_tensors
        grad = torch.empty_like(logits)
        cross_entropy_backward(logits, y, grad_out.contiguous(), grad)
        return grad, None, None
