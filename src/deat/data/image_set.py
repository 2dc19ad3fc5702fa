"""A labelled set of images in memory, and what all image sets share: splits, hashes and the scale of pixels."""

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, overload

import torch
from torch import Tensor

from deat.data.image_label_checks import UNIT_BOX, Box, check_dataset_size, check_images, to_dense_tensor
from deat.errors import DataError, UsageError
from deat.tasks import CLASSIFICATION, Task
from deat.utils.notebook_html import render_html
from deat.utils.seeding import derive_seed

_SAMPLE_IMAGES = 1000


def to_unit_range(images: Tensor) -> Tensor:
    """Convert images to float32 in [0, 1].

    Args:
        images: uint8 images, which are divided by 255, or float images in [0, 1].

    Returns:
        The images as float32, detached from what computed them.
    """
    if images.dtype == torch.uint8:
        return images.to(torch.float32).mul_(1 / 255)  # a division is rounded differently on a GPU
    return images.detach().to(torch.float32)


def as_loss_labels(labels: Tensor) -> Tensor:
    """Return whole numbers as int64, the type of class numbers, and other labels as they are."""
    return labels if labels.is_floating_point() else labels.to(torch.int64)


def sample_slice(num_images: int) -> slice:
    """Return a slice that takes about a thousand of `num_images` images, evenly spaced."""
    return slice(None, None, max(1, num_images // _SAMPLE_IMAGES))


def hash_labels_and_sample(labels: Tensor, sample: bytes) -> str:
    """Return a hash that identifies a data set.

    Args:
        labels: All labels.
        sample: Bytes of a few images, or of their names.
    """
    return sha256(labels.cpu().numpy().tobytes() + sample).hexdigest()[:16]


def split_indices(num_examples: int, held_out: int, seed: int) -> tuple[Tensor, Tensor]:
    """Divide examples at random into training and validation examples.

    Args:
        num_examples: Number of examples.
        held_out: Number of validation examples.
        seed: Seed of the random choice.

    Returns:
        The sorted indices of the training and of the validation examples.

    Raises:
        DataError: If there are no examples.
        UsageError: If either side would be empty.
    """
    check_dataset_size(num_examples, 1)
    if not 0 < held_out < num_examples:
        raise UsageError(
            f"cannot hold out {held_out} of {num_examples} examples; at least one must be left on each side."
        )
    generator = torch.Generator().manual_seed(derive_seed(seed, "split"))
    order = torch.randperm(num_examples, generator=generator)
    return order[held_out:].sort().values, order[:held_out].sort().values


def format_image_set(images: Sized, shape: tuple[int, ...], num_classes: int, outputs: str = "classes") -> str:
    """Return the repr of an image set: its type, length, image shape and number of classes or other outputs."""
    size = "x".join(map(str, shape))
    return f"{type(images).__name__}({len(images):,} of {size}, {num_classes:,} {outputs})"


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Labelled images, or other examples, in memory.

    Args:
        images: Images of shape (N, C, H, W), uint8 or float32 in [0, 1]; or other examples (N, ...), float32.
        labels: Class numbers from 0, int64 of shape (N,); or labels of another task.
        classes: Names of all classes, in the order of their numbers; for other tasks of all labels or targets.
        task: What the labels mean.

    Example:
        >>> images = torch.randint(0, 256, (100, 3, 32, 32), dtype=torch.uint8)
        >>> deat.ImageSet(images, torch.arange(100) % 2, ("cat", "dog"))
        ImageSet(100 of 3x32x32, 2 classes)
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    task: Task = CLASSIFICATION

    def __post_init__(self) -> None:
        to_dense_tensor(self.images, "images")
        to_dense_tensor(self.labels, "labels")

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        return format_image_set(self, self.shape, self.num_classes, self.task.outputs_noun)

    def _repr_html_(self) -> str:
        return render_html(repr(self), images=self.pick_examples())

    @overload
    def __getitem__(self, index: int) -> tuple[Tensor, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> "ImageSet": ...

    def __getitem__(self, index: int | slice) -> "tuple[Tensor, Any] | ImageSet":
        """Return an image, float32 in [0, 1], with its label; or for a slice the image set of these.

        Raises:
            IndexError: If there is no such image.
        """
        if isinstance(index, slice):
            return self.subset(range(len(self))[index])
        label = self.labels[range(len(self))[index]]
        return to_unit_range(self.images[index]), label.item() if label.dim() == 0 else label

    def pick_examples(self, count: int = 8) -> list[tuple[str, Tensor]]:
        """Return some images for a listing, each with its class.

        Args:
            count: How many, at evenly spaced places of the set.

        Returns:
            Captions and images of uint8 (C, H, W); none where examples are no images of one or three channels.
        """
        if self.images.ndim != 4 or self.shape[0] not in (1, 3) or not len(self):
            return []
        indices = sorted(set(torch.linspace(0, len(self) - 1, min(count, len(self))).long().tolist()))
        is_class = self.labels.dim() == 1 and not self.labels.is_floating_point()
        captions = [self.classes[int(self.labels[i])] if is_class else str(i) for i in indices]
        pixels = self.images[indices].cpu()
        pixels = pixels if pixels.dtype == torch.uint8 else (pixels.clamp(0, 1) * 255).round().to(torch.uint8)
        return list(zip(captions, pixels, strict=True))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one example: (C, H, W) for an image."""
        return tuple(self.images.shape[1:])

    @property
    def num_classes(self) -> int:
        """The number of class names: how many outputs a network needs."""
        return len(self.classes)

    def check(self, box: Box = UNIT_BOX) -> None:
        """Check that the images and labels can be trained on.

        Args:
            box: The range of the images' values.

        Raises:
            DataError: If not. The message has the first bad index and value, and what to do.
        """
        self.check_lengths()
        check_dataset_size(len(self), 1)
        self.task.check_labels(self.labels, self.num_classes)
        self.task.check_all_labels(self.labels)
        check_images(self.images, box=box)

    def check_lengths(self) -> None:
        """Raise DataError if there are not as many labels as images.

        Raises:
            DataError: The numbers differ.
        """
        if len(self.labels) != len(self.images):
            raise DataError(f"{len(self.images)} images but {len(self.labels)} labels; each image needs one label.")

    def digest(self) -> str:
        """Return a hash of the labels and of a sample of the images, which identifies the set."""
        sample = self.images[sample_slice(len(self))].cpu().contiguous()
        return hash_labels_and_sample(self.labels, sample.view(torch.uint8).numpy().tobytes())

    def subset(self, indices: Tensor | Sequence[int]) -> "ImageSet":
        """Return the images at `indices`, in this order.

        Args:
            indices: The numbers of the images, from 0.
        """
        index = torch.as_tensor(indices, dtype=torch.int64, device=self.images.device)
        labels = self.labels.index_select(0, index.to(self.labels.device))
        return ImageSet(self.images.index_select(0, index), labels, self.classes, self.task)

    def split(self, held_out: int, seed: int) -> "tuple[ImageSet, ImageSet]":
        """Divide the set at random into a training and a validation set.

        Args:
            held_out: Number of validation images.
            seed: Seed of the random choice.

        Returns:
            The training and the validation set, which have no image in common.

        Raises:
            DataError: If the set is empty or has not as many labels as images.
            UsageError: If either set would be empty.
        """
        self.check_lengths()
        train, val = split_indices(len(self), held_out, seed)
        return self.subset(train), self.subset(val)
