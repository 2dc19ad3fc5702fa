"""The order of images in an epoch, and which of them are in each batch."""

from collections.abc import Iterator
from functools import lru_cache
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Sampler

from deat.utils.distributed import BatchShard
from deat.utils.seeding import derive_seed


@lru_cache(maxsize=4)
def epoch_order(num_examples: int, seed: int, epoch: int, *, shuffle: bool) -> Tensor:
    """Return the order of the examples in an epoch.

    Args:
        num_examples: Number of examples.
        seed: The run's seed.
        epoch: The epoch's number.
        shuffle: Whether to draw a random order; else the examples stay in their own.

    Returns:
        Indices on the CPU, int64 of shape (num_examples,), not to be changed. They depend on the arguments only.
    """
    if not shuffle:
        return torch.arange(num_examples)
    generator = torch.Generator().manual_seed(derive_seed(seed, "order", epoch))
    return torch.randperm(num_examples, generator=generator)


def num_batches(num_examples: int, batch_size: int) -> int:
    """Return the number of batches in an epoch, including a short last one."""
    return -(-num_examples // batch_size)


def num_images_in_batch(num_examples: int, batch_size: int, step: int) -> int:
    """Return the number of images in batch `step` of an epoch, over all processes that share it."""
    return min(batch_size, num_examples - step * batch_size)


class BatchPosition(NamedTuple):
    """Which batch, or which process's shard of it.

    Attributes:
        epoch: The epoch's number.
        step: The batch's number in the epoch.
        shard: The rows of the batch that this process loads.
    """

    epoch: int
    step: int
    shard: BatchShard


class EpochBatchSampler(Sampler[list[tuple[int, int]]]):
    """A batch sampler of (epoch, index) keys that can start at any batch.

    The order depends on seed and epoch only. With `shuffle`, which is for training, the sampler continues with the next
    epoch without end, so that workers can load it ahead.

    Args:
        num_examples: Number of examples.
        batch_size: Images per batch.
        seed: The run's seed.
        shuffle: Whether to draw a random order for each epoch.
    """

    def __init__(self, num_examples: int, batch_size: int, seed: int, shuffle: bool) -> None:
        self.num_examples, self.batch_size, self.seed, self.shuffle = num_examples, batch_size, seed, shuffle
        self.start = BatchPosition(0, 0, BatchShard())

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return num_batches(self.num_examples, self.batch_size)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self._iter_from(self.start)

    def next_position(self, position: BatchPosition) -> BatchPosition | None:
        """Return the position after a batch, or None after the last one."""
        if position.step + 1 < len(self):
            return position._replace(step=position.step + 1)
        return position._replace(epoch=position.epoch + 1, step=0) if self.shuffle else None

    def indices(self, position: BatchPosition) -> Tensor:
        """Return the indices of the examples in a batch, or in a shard of it."""
        return self._take_shard(self._epoch_order(position.epoch), position)

    def _iter_from(self, position: BatchPosition) -> Iterator[list[tuple[int, int]]]:
        first = position.step
        for epoch in count(position.epoch) if self.shuffle else (position.epoch,):
            order = self._epoch_order(epoch)
            for step in range(first, len(self)):
                batch = self._take_shard(order, BatchPosition(epoch, step, position.shard))
                yield [(epoch, index) for index in batch.tolist()]
            first = 0

    def _take_shard(self, order: Tensor, position: BatchPosition) -> Tensor:
        batch = order[position.step * self.batch_size : (position.step + 1) * self.batch_size]
        return batch[position.shard.rows(len(batch))]

    def _epoch_order(self, epoch: int) -> Tensor:
        return epoch_order(self.num_examples, self.seed, epoch, shuffle=self.shuffle)
