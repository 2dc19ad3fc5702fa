"""A start of the perturbation for each image, remembered from epoch to epoch, as in FGSM-PGI."""

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deat.errors import DataError
from deat.threat import ThreatModel
from deat.utils.distributed import SINGLE_PROCESS, Distributed
from deat.utils.numbers import check_int, check_number
from deat.utils.torch_contexts import broadcast_mask

STORED_DTYPE = torch.float16
MAX_MOMENTUM = 6e4
"""Near the largest number of the stored type."""


@dataclass(frozen=True)
class RememberStarts:
    """How the start of an image's perturbation follows from its earlier epochs (Jia et al. 2022, FGSM-MEP).

    With g the gradient at the start of an epoch's attack, each image has a momentum m = g / |g|_1 + decay m, and starts the
    next epoch from its start moved by a step along m, and clipped to the ball. For Linf that is
    clip(start + alpha sign(m)).

    Args:
        decay: The share of the momentum that is kept.
        reset_every: The number of epochs after which all images start at random again, without momentum.

    Raises:
        UsageError: If a setting is not accepted.
    """

    decay: float = 0.3
    reset_every: int = 40

    def __post_init__(self) -> None:
        check_number(
            "the decay of remembered starts", self.decay, lambda v: 0 <= v < 1, "from 0 to below 1, such as 0.3"
        )
        check_int("the epochs after which remembered starts are reset", self.reset_every, 1)


class StartMemory:
    """The remembered starts of a training, on the device.

    Starts, in units of eps, and momenta, in units of their mean, are stored as float16: 4 bytes for each value of each
    image, 614 MB for the 50,000 training images of CIFAR-10. Of several processes, each remembers the starts of all images.
    A start is of the image as it was augmented then, and is not moved with later crops and flips.

    Args:
        rule: How starts follow from each other.
        num_examples: The number of training examples.
        shape: The shape of one example.
        device: Where starts are stored.
        distributed: The processes that share the batches.

    Raises:
        DataError: If they do not fit into memory.
    """

    def __init__(
        self,
        rule: RememberStarts,
        num_examples: int,
        shape: tuple[int, ...],
        device: torch.device,
        distributed: Distributed = SINGLE_PROCESS,
    ) -> None:
        self.rule, self.num_examples, self.distributed = rule, num_examples, distributed
        _check_fits(num_examples, shape, device)
        self._starts = torch.zeros(num_examples, *shape, dtype=STORED_DTYPE, device=device)
        self._momenta = torch.zeros_like(self._starts)
        self._is_known = torch.zeros(num_examples, dtype=torch.bool, device=device)

    def recall(self, index: Tensor, epoch: int, random_start: Tensor, eps: float) -> Tensor:
        """Return the start of each example: a random one where none is remembered, or if the epoch is one of a reset.

        Args:
            index: The numbers of the examples.
            epoch: The epoch, from 0.
            random_start: Random starts.
            eps: The radius of the threat model.

        Returns:
            The starts. They are in a ball of this radius, but need not be in the box.
        """
        if self._is_reset(epoch):
            return random_start
        stored = self._starts.index_select(0, index).to(random_start.dtype) * eps
        return torch.where(broadcast_mask(self._is_known.index_select(0, index), stored), stored, random_start)

    @torch.no_grad()
    def update(
        self,
        index: Tensor,
        rows: slice,
        epoch: int,
        x: Tensor,
        start: Tensor,
        grad: Tensor,
        threat: ThreatModel,
        step_size: Tensor,
        *,
        has_own_images: bool = True,
    ) -> None:
        """Remember where each example starts the next time. Nothing is read from the device.

        Args:
            index: The numbers of the batch's examples, in all processes together.
            rows: Which of them this process has.
            epoch: The epoch, from 0.
            x: The examples of this process.
            start: Where their perturbations started.
            grad: The gradients of their losses there.
            threat: The threat model.
            step_size: The length of a step.
            has_own_images: Whether the process has examples of the batch.
        """
        size = grad.flatten(1).abs().mean(1).clamp(min=torch.finfo(grad.dtype).tiny)
        momentum = grad / broadcast_mask(size, grad)
        if not self._is_reset(epoch):  # what is not known has no momentum
            momentum += self.rule.decay * self._momenta.index_select(0, index[rows]).to(grad.dtype)
        momentum = momentum.clamp(-MAX_MOMENTUM, MAX_MOMENTUM)
        next_start = threat.project_to_ball(threat.step(x, start, momentum, step_size))
        units = next_start / max(threat.eps, torch.finfo(start.dtype).tiny)
        for memory, own in ((self._starts, units), (self._momenta, momentum)):
            memory.index_copy_(0, index, self._gather(own.to(STORED_DTYPE), len(index), rows, has_own_images))
        self._is_known.index_fill_(0, index, True)

    def _is_reset(self, epoch: int) -> bool:
        return epoch % self.rule.reset_every == 0

    def _gather(self, own: Tensor, batch_size: int, rows: slice, has_own_images: bool) -> Tensor:
        """The values of the whole batch, from the rows of each process."""
        if not self.distributed.is_multiprocess:
            return own
        batch = own.new_zeros(batch_size, *own.shape[1:])
        if has_own_images:
            batch[rows] = own
        return self.distributed.all_reduce_tensor(batch)

    def state_dict(self) -> dict[str, Any]:
        """Return the memory itself, which later updates change. It is the same in all processes."""
        return {"starts": self._starts, "momenta": self._momenta, "is_known": self._is_known}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a result of `state_dict`, in place."""
        for name, own in self.state_dict().items():
            if own.shape != state[name].shape:
                raise ValueError(f"remembered {name} are of shape {tuple(state[name].shape)}, not {tuple(own.shape)}")
            own.copy_(state[name])


def _check_fits(num_examples: int, shape: tuple[int, ...], device: torch.device) -> None:
    num_bytes = num_examples * 2 * STORED_DTYPE.itemsize * torch.Size(shape).numel()
    available = _memory_size(device)
    if available is not None and num_bytes > available:
        raise DataError(
            f"remembering a start for each of {num_examples:,} images of shape {tuple(shape)} takes "
            f"{num_bytes / 2**30:.1f} GiB, and {device} has {available / 2**30:.1f} GiB in all. Use smaller images, or a method "
            "that remembers no starts, such as n-fgsm."
        )


def _memory_size(device: torch.device) -> int | None:
    """The memory of a device in bytes, None if that is not known."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
