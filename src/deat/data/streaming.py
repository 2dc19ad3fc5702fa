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

from deat.data.archives import Files
from deat.data.checks import check_fits, check_labels, hashed, sampled, to_unit
from deat.data.decode import fit_centre, open_image, random_crop, to_tensor
from deat.data.image_set import ImageSet, in_words, split_indices
from deat.data.loaders import EpochBatches, EpochLoader
from deat.errors import DataError
from deat.utils.distributed import Share
from deat.utils.seeding import derive

SIDE = 224
"""What images become that have no size in common, unless another is asked for."""
_ZOOM = 224 / 256


@dataclass(frozen=True, eq=False)
class LazyImages:
    """Image files with a class number each, decoded only when read; `members` are numbers into `files`."""

    files: Files
    members: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    size: int = SIDE

    def __len__(self) -> int:
        return len(self.members)

    def __repr__(self) -> str:
        return in_words(self, self.shape, self.num_classes)

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
        check_fits(len(self), 1)
        check_labels(self.labels, self.num_classes)
        self.decode(0)

    def digest(self) -> str:
        """A hash of the labels and of a few files' names, by which the set is known again."""
        few = "\n".join(self.files.names[i] for i in self.members[sampled(len(self))].tolist())
        return hashed(self.labels, few.encode("utf-8", "replace"))

    def decode(self, index: int, random: Random | None = None) -> Tensor:
        """One image as uint8 (3, size, size): a random crop if given randomness, else the centre."""
        member = int(self.members[index])
        image = open_image(self.files.read(member), self.files.names[member])
        return to_tensor(random_crop(image, self.size, random) if random else fit_centre(image, self.size, _ZOOM))

    def subset(self, indices: Tensor | Sequence[int]) -> "LazyImages":
        """The images at these indices, in this order."""
        index = torch.as_tensor(indices, dtype=torch.int64)
        return LazyImages(self.files, self.members[index], self.labels[index], self.classes, self.size)

    def split(self, held_out: int, seed: int) -> "tuple[LazyImages, LazyImages]":
        """Disjoint training and validation parts, fixed by the seed."""
        train, val = split_indices(len(self), held_out, seed)
        return self.subset(train), self.subset(val)


Part = ImageSet | LazyImages
"""A data set's training or test images, decoded or not."""


class _Decoded(Dataset[Any]):
    """Decoded images by (epoch, index); a failure comes back as its message."""

    def __init__(self, images: LazyImages, seed: int, augment: bool) -> None:
        self.images, self.seed, self.augment = images, seed, augment

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int] | str:
        epoch, index = key
        random = Random(derive(self.seed, "augment", epoch, index)) if self.augment else None
        try:
            return self.images.decode(index, random), int(self.images.labels[index])
        # An exception that crosses a process arrives with a traceback for a message.
        except DataError as error:
            return str(error)


def _collate(items: list[tuple[Tensor, int] | str]) -> tuple[Tensor, Tensor] | str:
    for item in items:
        if isinstance(item, str):
            return item
    images, labels = zip(*items, strict=True)
    return torch.stack(images), torch.from_numpy(np.asarray(labels, dtype=np.int64))


class Stream:
    """Batches of LazyImages decoded by worker processes; every draw depends on (seed, epoch, index) alone.

    `share` makes every batch this process's rows of it, and only those are decoded. Shuffled, the next epoch's first
    batches are decoded while this one's last are trained on.
    """

    begins_anywhere = True

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
        self.num_examples, self.num_classes, self.share = len(images), images.num_classes, Share()
        self.shape = images.shape
        self._loader = EpochLoader(
            _Decoded(images, seed, augment),
            EpochBatches(len(images), batch_size, seed, shuffle),
            workers=workers,
            device=self.device,
            collate=_collate,
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
        check_fits(self.num_examples, self.batch_size, self.shuffle)

    def epoch(self, epoch: int, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The epoch's batches from the first-th on: x float32 in [0, 1] and y int64, on the device."""
        for batch in self._loader.epoch(epoch, first, self.share):
            if isinstance(batch, str):
                raise DataError(batch)
            x, y = (part.to(self.device, non_blocking=True) for part in batch)
            yield to_unit(x), y

    def dismiss(self) -> None:
        """End the workers; whatever is asked for next has new ones."""
        self._loader.dismiss()
