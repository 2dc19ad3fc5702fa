"""The order of images in an epoch, and how it is cut into batches."""

import torch
from torch import Tensor

from deat.seeding import derive


def epoch_order(num_examples: int, seed: int, epoch: int, *, shuffle: bool) -> Tensor:
    """The order of examples in an epoch, a pure function of (seed, epoch) on every device; their own, unshuffled."""
    if not shuffle:
        return torch.arange(num_examples)
    generator = torch.Generator().manual_seed(derive(seed, "order", epoch))
    return torch.randperm(num_examples, generator=generator)


def num_batches(num_examples: int, batch_size: int) -> int:
    """Batches in an epoch, a short last one counted."""
    return -(-num_examples // batch_size)


def batch_length(num_examples: int, batch_size: int, step: int) -> int:
    """Images in an epoch's batch, over all processes that share it."""
    return min(batch_size, num_examples - step * batch_size)
