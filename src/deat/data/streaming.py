"""Image sets that are too large for memory: files decoded by worker processes as they are needed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from deat.data.batch_order import BatchPosition, EpochBatchSampler
from deat.data.dataloader_source import EpochLoader
from deat.data.image_archives import FileCollection
from deat.data.image_decoding import centre_crop, open_image, random_resized_crop, to_tensor
from deat.data.image_label_checks import check_dataset_size
from deat.data.image_set import (
    ImageSet,
    format_image_set,
    hash_labels_and_sample,
    sample_slice,
    split_indices,
    to_unit_range,
)
from deat.errors import DataError
from deat.tasks import CLASSIFICATION
from deat.utils.distributed import BatchShard
from deat.utils.seeding import derive_seed

DEFAULT_SIDE_PIXELS = 224
"""The side that images of different sizes are resized to unless another is given."""
EVAL_CROP_FRACTION = 224 / 256


@dataclass(frozen=True, eq=False)
class LazyImages:
    """Labelled image files that are decoded each time they are read.

    Args:
        files: The files.
        file_indices: Index of each image in `files`.
        labels: Class numbers from 0, int64 of shape (N,).
        classes: Names of all classes, in the order of their numbers.
        size: Side in pixels that images are resized to.
    """

    files: FileCollection
    file_indices: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    size: int = DEFAULT_SIDE_PIXELS

    def __len__(self) -> int:
        return len(self.file_indices)

    def __repr__(self) -> str:
        return format_image_set(self, self.shape, self.num_classes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one decoded image: (3, size, size)."""
        return (3, self.size, self.size)

    @property
    def num_classes(self) -> int:
        """The number of class names."""
        return len(self.classes)

    def check(self) -> None:
        """Raise DataError if the set is empty, a label is out of range, or the first image cannot be decoded."""
        check_dataset_size(len(self), 1)
        CLASSIFICATION.check_labels(self.labels, self.num_classes)
        self.decode(0)

    def digest(self) -> str:
        """Return a hash of the labels and of a sample of the file names, which identifies the set."""
        names = "\n".join(self.files.names[i] for i in self.file_indices[sample_slice(len(self))].tolist())
        return hash_labels_and_sample(self.labels, names.encode("utf-8", "replace"))

    def decode(self, index: int, random: Random | None = None) -> Tensor:
        """Decode one image.

        Args:
            index: The image's index in the set.
            random: A random generator for a random crop and flip. Without it the centre is cropped.

        Returns:
            The image as uint8 of shape (3, size, size).

        Raises:
            DataError: If the file cannot be read or decoded.
        """
        file_index = int(self.file_indices[index])
        image = open_image(self.files.read(file_index), self.files.names[file_index])
        if random:
            return to_tensor(random_resized_crop(image, self.size, random))
        return to_tensor(centre_crop(image, self.size, EVAL_CROP_FRACTION))

    def subset(self, indices: Tensor | Sequence[int]) -> "LazyImages":
        """Return the images at `indices`, in this order.

        Args:
            indices: The numbers of the images, from 0.
        """
        index = torch.as_tensor(indices, dtype=torch.int64)
        return LazyImages(self.files, self.file_indices[index], self.labels[index], self.classes, self.size)

    def split(self, held_out: int, seed: int) -> "tuple[LazyImages, LazyImages]":
        """Divide the set at random into a training and a validation set.

        Args:
            held_out: Number of validation images.
            seed: Seed of the random choice.

        Returns:
            The training and the validation set, which have no image in common.

        Raises:
            UsageError: If either set would be empty.
        """
        train, val = split_indices(len(self), held_out, seed)
        return self.subset(train), self.subset(val)


AnyImageSet = ImageSet | LazyImages
"""A labelled image set, decoded in memory or decoded as it is read."""


class _DecodedDataset(Dataset[Any]):
    """Decoded images by (epoch, index); for an image that cannot be decoded, the error's message."""

    def __init__(self, images: LazyImages, seed: int, augment: bool) -> None:
        self.images, self.seed, self.augment = images, seed, augment

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int] | str:
        epoch, index = key
        random = Random(derive_seed(self.seed, "augment", epoch, index)) if self.augment else None
        try:
            return self.images.decode(index, random), int(self.images.labels[index])
        # A message, since an exception from a worker process arrives with its traceback as the message.
        except DataError as error:
            return str(error)


def _collate_or_error(items: list[tuple[Tensor, int] | str]) -> tuple[Tensor, Tensor] | str:
    for item in items:
        if isinstance(item, str):
            return item
    images, labels = zip(*items, strict=True)
    return torch.stack(images), torch.from_numpy(np.asarray(labels, dtype=np.int64))


class StreamingSource:
    """Batches of LazyImages, decoded by worker processes.

    Order and crops depend on the seed, the epoch and the image's index only, not on the number of workers. With
    `shuffle`, workers decode the first batches of the next epoch during the last ones of this epoch. Set `shard` to
    decode only this process's rows of each batch.

    Args:
        images: The images.
        batch_size: Images per batch.
        seed: The run's seed.
        augment: Whether to crop and flip images at random.
        workers: Number of worker processes; 0 to decode in this process.
        device: Device of the batches.
        shuffle: Whether to draw a random order for each epoch, as training does.
    """

    can_seek = True

    def __init__(
        self,
        images: LazyImages,
        batch_size: int,
        *,
        seed: int = 0,
        augment: bool = True,
        workers: int = 2,
        device: torch.device | str = "cpu",
        shuffle: bool = True,
    ) -> None:
        self.images, self.batch_size, self.shuffle, self.augment = images, batch_size, shuffle, augment
        self.device = torch.device(device)
        self.num_examples, self.num_classes, self.shard = len(images), images.num_classes, BatchShard()
        self.shape = images.shape
        self._loader = EpochLoader(
            _DecodedDataset(images, seed, augment),
            EpochBatchSampler(len(images), batch_size, seed, shuffle),
            workers=workers,
            device=self.device,
            collate_fn=_collate_or_error,
        )

    @cached_property
    def digest(self) -> str:
        """A hash that identifies the image set."""
        return self.images.digest()

    def __len__(self) -> int:
        return len(self._loader)

    def check(self) -> None:
        """Raise DataError if the images cannot be trained on or are fewer than a training batch."""
        self.images.check()
        check_dataset_size(self.num_examples, self.batch_size, self.shuffle)

    def epoch(self, epoch: int, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over the batches of an epoch.

        Args:
            epoch: The epoch's number.
            first: The number of the batch to start at.

        Yields:
            Images, float32 in [0, 1], and labels, int64, on the device.

        Raises:
            DataError: If an image cannot be decoded.
        """
        for batch in self._loader.epoch(epoch, first, self.shard):
            if isinstance(batch, str):
                raise DataError(batch)
            x, y = (tensor.to(self.device, non_blocking=True) for tensor in batch)
            yield to_unit_range(x), y

    def batch_indices(self, epoch: int, step: int) -> Tensor:
        """Return the indices of the images in a batch, over all processes.

        Args:
            epoch: The epoch, from 0.
            step: The batch, from 0.
        """
        return self._loader.batch_sampler.indices(BatchPosition(epoch, step, BatchShard()))

    def stop_workers(self) -> None:
        """End the worker processes; the next epoch starts new ones."""
        self._loader.stop_workers()
