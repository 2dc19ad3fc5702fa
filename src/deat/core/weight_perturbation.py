"""The worst weights nearby, for adversarial weight perturbation (awp+)."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deat.utils.numbers import check_int, check_number


@dataclass(frozen=True)
class WeightPerturbation:
    """How the weights are perturbed for the gradient of an update (Wu, Xia, Wang 2020).

    Each weight tensor W moves by gamma |W| g / |g|, with g its gradient of the training loss and Euclidean norms.
    Tensors of one dimension (biases, batch norms) stay.

    Args:
        gamma: The length of the step, relative to the norm of each tensor.
        warmup: The number of epochs at the beginning without a perturbation.

    Raises:
        UsageError: If a setting is not accepted.
    """

    gamma: float = 0.005
    warmup: int = 0

    def __post_init__(self) -> None:
        advice = " (at 0 it is the method without awp+: leave awp+ out)" if self.gamma == 0 else ""
        check_number(
            "the gamma of awp+", self.gamma, lambda v: 0 < v <= 1, f"above 0 and at most 1, such as 0.005{advice}"
        )
        check_int("the warm-up of awp+", self.warmup, 0)

    def is_active(self, epoch: int) -> bool:
        """Return whether the weights are perturbed in an epoch, counted from 0.

        Args:
            epoch: The epoch, from 0.
        """
        return epoch >= self.warmup

    @torch.no_grad()
    def perturb(self, parameters: Iterable[nn.Parameter]) -> None:
        """Move weights along their gradients, in place.

        Args:
            parameters: The weights. Those without a gradient stay, as do all whose gradient is not finite.
        """
        for p in parameters:
            if p.dim() > 1 and p.grad is not None:
                grad = p.grad.float() if p.grad.dtype in (torch.float16, torch.bfloat16) else p.grad
                largest = grad.abs().amax()
                scaled = grad / largest.clamp(min=torch.finfo(grad.dtype).tiny)  # so that no square overflows
                length = self.gamma * torch.linalg.vector_norm(p) / torch.linalg.vector_norm(scaled).clamp(min=1e-20)
                p.add_(torch.where(torch.isfinite(largest), scaled * length, 0.0).to(p.dtype))


class StoredTensors:
    """Copies of a network's weights, or buffers, to be put back bit for bit.

    The copies stay at the same memory address, so that recorded moves can use them.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = list(tensors)
        self.copies = [t.detach().clone() for t in self._tensors]

    @torch.no_grad()
    def store(self) -> None:
        """Copy the tensors."""
        for copy, tensor in zip(self.copies, self._tensors, strict=True):
            copy.copy_(tensor)

    @torch.no_grad()
    def restore(self) -> None:
        """Put the copies back."""
        for copy, tensor in zip(self.copies, self._tensors, strict=True):
            tensor.copy_(copy)
