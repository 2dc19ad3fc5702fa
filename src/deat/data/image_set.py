"""A labelled set of images held in memory."""

from collections.abc import Sequence, Sized
from dataclasses import dataclass

import torch
from torch import Tensor

from deat.data.checks import check_dataset_size, check_images, check_labels, hash_labels_and_sample, sample_slice
from deat.errors import DataError, UsageError
from deat.utils.seeding import derive_seed


def split_indices(num_examples: int, held_out: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two disjoint, sorted sets of indices that cover all examples; the second has held_out of them."""
    check_dataset_size(num_examples, 1)
    if not 0 < held_out < num_examples:
        raise UsageError(f"cannot hold out {held_out} of {num_examples} images; both parts need at least one image.")
    generator = torch.Generator().manual_seed(derive_seed(seed, "split"))
    order = torch.randperm(num_examples, generator=generator)
    return order[held_out:].sort().values, order[:held_out].sort().values


def format_image_set(images: Sized, shape: tuple[int, ...], num_classes: int) -> str:
    """A set of images as people read it, whose tensors would fill pages."""
    size = "x".join(map(str, shape))
    return f"{type(images).__name__}({len(images):,} of {size}, {num_classes:,} classes)"


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images (N, C, H, W), uint8 or float32 in [0, 1], with a class number each."""

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        return format_image_set(self, self.shape, self.num_classes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one image."""
        return tuple(self.images.shape[1:])

    @property
    def num_classes(self) -> int:
        """The number of classes, seen or not."""
        return len(self.classes)

    def check(self) -> None:
        """Refuses content that cannot be trained on, naming the first bad index and value."""
        self.check_lengths()
        check_dataset_size(len(self), 1)
        check_labels(self.labels, self.num_classes)
        check_images(self.images)

    def check_lengths(self) -> None:
        """Refuses more images than labels, or fewer."""
        if len(self.labels) != len(self.images):
            raise DataError(f"{len(self.images)} images but {len(self.labels)} labels; each image needs one label.")

    def digest(self) -> str:
        """A hash of the labels and of a few images, by which the set is known again."""
        few = self.images[sample_slice(len(self))].cpu().contiguous()
        return hash_labels_and_sample(self.labels, few.view(torch.uint8).numpy().tobytes())

    def subset(self, indices: Tensor | Sequence[int]) -> "ImageSet":
        """The images at these indices, in this order."""
        index = torch.as_tensor(indices, dtype=torch.int64, device=self.images.device)
        labels = self.labels.index_select(0, index.to(self.labels.device))
        return ImageSet(self.images.index_select(0, index), labels, self.classes)

    def split(self, held_out: int, seed: int) -> "tuple[ImageSet, ImageSet]":
        """Disjoint training and validation parts, fixed by the seed."""
        self.check_lengths()
        train, val = split_indices(len(self), held_out, seed)
        return self.subset(train), self.subset(val)
