"""Sets too large to hold decoded: image files read and decoded in worker processes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from deat.data.archives import FileCollection
from deat.data.checks import check_dataset_size, check_labels, hash_labels_and_sample, sample_slice, to_unit_range
from deat.data.decode import centre_crop, open_image, random_resized_crop, to_tensor
from deat.data.image_set import ImageSet, format_image_set, split_indices
from deat.data.loaders import EpochBatchSampler, EpochLoader
from deat.errors import DataError
from deat.utils.distributed import BatchShard
from deat.utils.seeding import derive_seed

DEFAULT_SIDE_PIXELS = 224
"""What images become that have no size in common, unless another is asked for."""
_EVAL_CROP_FRACTION = 224 / 256


@dataclass(frozen=True, eq=False)
class LazyImages:
    """Image files with a class number each, decoded only when read; `members` are numbers into `files`."""

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
        """The shape an image has once decoded."""
        return (3, self.size, self.size)

    @property
    def num_classes(self) -> int:
        """The number of classes, seen or not."""
        return len(self.classes)

    def check(self) -> None:
        """Refuses an empty set, bad labels and a first image that cannot be decoded."""
        check_dataset_size(len(self), 1)
        check_labels(self.labels, self.num_classes)
        self.decode(0)

    def digest(self) -> str:
        """A hash of the labels and of a few files' names, by which the set is known again."""
        few = "\n".join(self.files.names[i] for i in self.file_indices[sample_slice(len(self))].tolist())
        return hash_labels_and_sample(self.labels, few.encode("utf-8", "replace"))

    def decode(self, index: int, random: Random | None = None) -> Tensor:
        """One image as uint8 (3, size, size): a random crop if given randomness, else the centre."""
        member = int(self.file_indices[index])
        image = open_image(self.files.read(member), self.files.names[member])
        return to_tensor(
            random_resized_crop(image, self.size, random)
            if random
            else centre_crop(image, self.size, _EVAL_CROP_FRACTION)
        )

    def subset(self, indices: Tensor | Sequence[int]) -> "LazyImages":
        """The images at these indices, in this order."""
        index = torch.as_tensor(indices, dtype=torch.int64)
        return LazyImages(self.files, self.file_indices[index], self.labels[index], self.classes, self.size)

    def split(self, held_out: int, seed: int) -> "tuple[LazyImages, LazyImages]":
        """Disjoint training and validation parts, fixed by the seed."""
        train, val = split_indices(len(self), held_out, seed)
        return self.subset(train), self.subset(val)


AnyImageSet = ImageSet | LazyImages
"""A data set's training or test images, decoded or not."""


class _DecodedDataset(Dataset[Any]):
    """Decoded images by (epoch, index); a failure comes back as its message."""

    def __init__(self, images: LazyImages, seed: int, augment: bool) -> None:
        self.images, self.seed, self.augment = images, seed, augment

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int] | str:
        epoch, index = key
        random = Random(derive_seed(self.seed, "augment", epoch, index)) if self.augment else None
        try:
            return self.images.decode(index, random), int(self.images.labels[index])
        # An exception that crosses a process arrives with a traceback for a message.
        except DataError as error:
            return str(error)


def _collate_or_error(items: list[tuple[Tensor, int] | str]) -> tuple[Tensor, Tensor] | str:
    for item in items:
        if isinstance(item, str):
            return item
    images, labels = zip(*items, strict=True)
    return torch.stack(images), torch.from_numpy(np.asarray(labels, dtype=np.int64))


class StreamingSource:
    """Batches of LazyImages decoded by worker processes; every draw depends on (seed, epoch, index) alone.

    `share` makes every batch this process's rows of it, and only those are decoded. Shuffled, the next epoch's first
    batches are decoded while this one's last are trained on.
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
        self.num_examples, self.num_classes, self.share = len(images), images.num_classes, BatchShard()
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
        """A hash by which the set is known again."""
        return self.images.digest()

    def __len__(self) -> int:
        return len(self._loader)

    def check(self) -> None:
        """Refuses content that cannot be trained on, and a set smaller than a training batch."""
        self.images.check()
        check_dataset_size(self.num_examples, self.batch_size, self.shuffle)

    def epoch(self, epoch: int, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The epoch's batches from the first-th on: x float32 in [0, 1] and y int64, on the device."""
        for batch in self._loader.epoch(epoch, first, self.share):
            if isinstance(batch, str):
                raise DataError(batch)
            x, y = (part.to(self.device, non_blocking=True) for part in batch)
            yield to_unit_range(x), y

    def stop_workers(self) -> None:
        """End the workers; whatever is asked for next has new ones."""
        self._loader.stop_workers()
