"""Turns any data that a user may have into a BatchSource of batches on the device."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from deat.data.augment import Augment, check_augment
from deat.data.dataloader_source import EpochLoader, LoaderSource, data_type_name, make_epoch_loader
from deat.data.datasets import DataSplits, adapt_data
from deat.data.image_label_checks import UNIT_BOX, Box, check_dataset_size, text_labels_error, to_dense_tensor
from deat.data.image_set import ImageSet
from deat.data.in_memory import InMemorySource
from deat.data.streaming import AnyImageSet, LazyImages, StreamingSource
from deat.errors import UsageError
from deat.tasks import CLASSIFICATION, Task
from deat.utils.distributed import BatchShard
from deat.utils.signals import Interruption

_ACCEPTED_TYPES = "an ImageSet, a pair of tensors (images, labels), a torch Dataset, or a DataLoader"


class BatchSource(Protocol):
    """Batches of images and labels on the device, by epoch.

    `as_source` makes one of any data. An object of your own with these attributes and methods can be trained on, too.

    Attributes:
        num_examples: Number of images in an epoch.
        num_classes: Number of classes, or of other outputs that a network needs.
        shape: Shape of one example: (C, H, W) for an image.
        batch_size: Images per batch; the last batch may have fewer.
        shard: The rows of each batch that this process gets, if several processes train together.
    """

    num_examples: int
    num_classes: int
    shape: tuple[int, ...]
    batch_size: int
    shard: BatchShard

    def __len__(self) -> int:
        """Return the number of batches in an epoch, including a short last one."""

    def epoch(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over the batches of an epoch, which are always the same for the same number.

        Args:
            epoch: The epoch's number.

        Yields:
            Images, float32 in [0, 1] of shape (B, C, H, W), and labels, int64 of shape (B,), on the device. Other inputs
            (B, ...) have the box of the threat model, and other tasks have labels of another shape and type.
        """

    def check(self) -> None:
        """Raise DataError if the data cannot be trained on; called once before training."""


@runtime_checkable
class SeekableSource(Protocol):
    """A BatchSource that may be able to start an epoch at any batch, without loading the batches before it."""

    @property
    def can_seek(self) -> bool:
        """Whether it can."""

    def epoch(self, epoch: int, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over the batches of an epoch, starting at number `first`."""


@runtime_checkable
class IndexedSource(Protocol):
    """A BatchSource that may know which examples of the data a batch has."""

    def batch_indices(self, epoch: int, step: int) -> Tensor | None:
        """Return the indices of the examples in a batch, from 0, over all processes; None if they are not known.

        Args:
            epoch: The epoch, from 0.
            step: The batch, from 0.
        """


def find_batch_indices(source: BatchSource, method: str) -> Callable[[int, int], Tensor]:
    """Return the function from an epoch and a batch to the indices of its examples.

    Args:
        source: The training source.
        method: The name of the method that needs them, for the message.

    Raises:
        UsageError: If the source does not know which examples a batch has.
    """
    if isinstance(source, IndexedSource) and source.batch_indices(0, 0) is not None:
        return source.batch_indices  # type: ignore[return-value]
    kind = (
        "a DataLoader or an iterable of batches" if isinstance(source, LoaderSource) else f"a {type(source).__name__}"
    )
    raise UsageError(
        f"{method} remembers a start for each image, and {kind} does not say which images a batch has. Pass the Dataset "
        "itself, the images as tensors, or a folder; a source of your own needs a method batch_indices(epoch, step). Or use "
        "a method that remembers nothing, such as n-fgsm."
    )


@runtime_checkable
class SourceWithWorkers(Protocol):
    """A BatchSource with worker processes."""

    def stop_workers(self) -> None:
        """End the worker processes; the next epoch starts new ones."""


@contextmanager
def stopping_workers(*sources: BatchSource | None) -> Iterator[None]:
    """End the worker processes of the sources when the context ends."""
    try:
        yield
    finally:
        for source in sources:
            if isinstance(source, SourceWithWorkers):
                source.stop_workers()


class InterruptibleSource:
    """A BatchSource that raises Interrupted between two batches if a stop was requested.

    Args:
        source: The source of the batches. If several processes read it in turns, they check once per turn.
        interruption: Knows whether a stop was requested.
    """

    def __init__(self, source: BatchSource, interruption: Interruption) -> None:
        self.source, self.interruption = source, interruption
        self.num_examples, self.num_classes = source.num_examples, source.num_classes
        self.shape, self.batch_size = source.shape, source.batch_size
        self.check, self.shard = source.check, getattr(source, "shard", BatchShard())

    def __len__(self) -> int:
        return len(self.source)

    def epoch(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over the batches of an epoch.

        Args:
            epoch: The epoch's number.

        Raises:
            Interrupted: If a stop was requested.
        """
        for step, batch in enumerate(self.source.epoch(epoch)):
            if step % self.interruption.distributed.size == 0:
                self.interruption.check()
            yield batch


class MapStyleDataset(Protocol):
    """A sequence of (image, label) pairs."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Any, Any]: ...


TensorOrArray = Tensor | np.ndarray[Any, Any]
DataLike = (
    AnyImageSet | Sequence[TensorOrArray] | Dataset[Any] | MapStyleDataset | Iterable[tuple[Any, ...] | list[Any]]
)
"""Data that `as_source` accepts: an image set, a pair (images, labels), a Dataset, a DataLoader or a list of batches."""


def as_source(
    data: DataLike | None,
    *,
    batch_size: int,
    device: torch.device | str = "cpu",
    seed: int = 0,
    augment: Augment | None = None,
    num_classes: int | None = None,
    shuffle: bool = True,
    workers: int = 0,
    task: Task | None = None,
    box: Box = UNIT_BOX,
) -> BatchSource:
    """Make batches of any data.

    Args:
        data: An ImageSet, LazyImages, a pair of tensors or arrays (images, labels), a TensorDataset, a map-style
            Dataset, a DataLoader, or a list or other re-iterable of batches. Images are uint8 or float in [0, 1].
        batch_size: Images per batch. A DataLoader and batches keep their own size.
        device: Device of the batches.
        seed: Seed of the order and of random transforms. A DataLoader keeps its own order; what it draws from the
            global random generators is seeded as well.
        augment: Random crops and flips, for images in memory or in files only. LazyImages get their own kind of crops
            and flips in place of the given ones.
        num_classes: Number of classes. By default it is read from the data, or counted.
        shuffle: Whether to draw a random order for each epoch, as training does. Then the data must hold a full batch.
        workers: Number of worker processes that load a Dataset or LazyImages; 0 to load in this process.
        task: What labels mean; by default what an ImageSet says, and else classification.
        box: The range of the images' values, as the threat model has it.

    Returns:
        A source of batches. Its batches depend on the arguments and the epoch only, not on the number of workers.

    Raises:
        UsageError: If the data is of another kind or can be read only once, or an argument does not fit it.
        DataError: If the data is empty, or is not made of images and class numbers.

    Example:
        >>> digits = deat.load_data("digits")
        >>> for x, y in deat.as_source(digits.train, batch_size=64).epoch(0):
        ...     loss = cross_entropy(model(x), y)
    """
    data = adapt_data(data)
    check_not_data_name(data)
    _check_not_splits(data)
    check_augment(augment)
    if batch_size < 1:
        raise UsageError(f"the batch size is {batch_size}; it must be at least 1.")
    if isinstance(data, LazyImages):
        if task not in (None, CLASSIFICATION):
            raise UsageError(f"images in class folders are for classification, not for the task {task}. Omit task.")
        has_augment = augment is not None
        return StreamingSource(
            data, batch_size, seed=seed, augment=has_augment, workers=workers, device=device, shuffle=shuffle
        )
    image_set = as_image_set(data, num_classes, task)
    if image_set is not None:
        _check_augmentable(image_set, augment)
        return InMemorySource(
            image_set, batch_size, device=device, seed=seed, augment=augment, shuffle=shuffle, box=box
        )
    check_no_augment(data, augment)
    loader = _as_loader(data, batch_size, seed, shuffle, workers, device)
    return LoaderSource(
        loader,
        device=device,
        seed=seed,
        num_classes=num_classes,
        training=shuffle,
        task=task or CLASSIFICATION,
        box=box,
    )


def check_not_data_name(data: Any) -> None:
    """Raise UsageError for the name or path of a data set, with the call that loads it."""
    if isinstance(data, str | os.PathLike):
        spec = data if isinstance(data, str) else f"folder:{os.fspath(data)}"
        raise UsageError(
            f"{str(data)!r} is only a name. Load the data: deat.load_data({spec!r}), which fit and evaluate accept as "
            f"it is. Also accepted: {_ACCEPTED_TYPES}."
        )


def _check_not_splits(data: Any) -> None:
    if isinstance(data, DataSplits):
        raise UsageError(
            f"{data.name!r} is a DataSplits, which has several image sets: pass one, such as .test. Only fit's train= and "
            "evaluate take it whole; val=0.1 holds images out of its training images."
        )


def check_no_augment(data: Any, augment: Augment | None) -> None:
    """Raise UsageError if an augmentation is given for data whose images come from the user's own code.

    Args:
        data: The data.
        augment: The augmentation, None for none.
    """
    if augment is not None:
        raise UsageError(
            f"augment={augment!r} is for images in memory or in a folder; a {data_type_name(data)} gives its images as "
            "they are trained on. Crop and flip in its own transform, and omit augment."
        )


def _check_augmentable(image_set: ImageSet, augment: Any) -> None:
    """Raise UsageError if crops and flips are given for something else than images, or labels cannot follow."""
    images, labels, task = image_set.images, image_set.labels, image_set.task
    if isinstance(augment, Augment) and images.ndim != 4:
        raise UsageError(
            f"augment={augment!r} crops and flips images (N, C, H, W), and these examples have shape "
            f"{tuple(images.shape[1:])}. Omit augment, or give an object of your own with draw and apply."
        )
    if augment is None or not len(labels):
        return
    if task.has_places:
        if isinstance(augment, Augment) and labels.shape[1:] != images.shape[2:]:
            raise UsageError(
                f"augment={augment!r} moves masks with their images, and masks of shape {tuple(labels.shape[1:])} are not of "
                f"the size of images {tuple(images.shape[2:])}. Omit augment."
            )
        task.augment_labels(labels[:1], augment, augment.draw(1, torch.Generator().manual_seed(0)))
    elif images.ndim > 2 and labels.ndim > 2 and labels.shape[-2:] == images.shape[-2:]:
        raise UsageError(
            f"augment={augment!r} moves pixels, and the labels of the task {task.name} have a value for each pixel. Give the "
            "task has_places = True and augment_labels(labels, augment, params), or omit augment."
        )


def as_image_set(data: Any, num_classes: int | None = None, task: Task | None = None) -> ImageSet | None:
    """Convert data that is in memory to an ImageSet.

    Args:
        data: Any data.
        num_classes: Number of classes; by default one more than the largest label.
        task: What labels mean; by default what an ImageSet says, and else classification.

    Returns:
        The image set, or None if the data is neither an ImageSet, nor a pair of tensors or arrays, nor a TensorDataset
        of such a pair.

    Raises:
        DataError: If the labels are not class numbers, or not those of the task.
        UsageError: If an ImageSet is for another task.
    """
    if isinstance(data, ImageSet):
        if task is not None and data.task != task:
            raise UsageError(
                f"the data has labels for the task {data.task}, not {task}. Omit task, or pass other labels."
            )
        return data
    if isinstance(data, TensorDataset):
        data = data.tensors
    if not isinstance(data, tuple | list) or len(data) != 2:
        return None
    images, labels = data
    if isinstance(images, Tensor | np.ndarray) and isinstance(labels, list | tuple):
        labels = _labels_to_array(labels)
    if not isinstance(images, Tensor | np.ndarray) or not isinstance(labels, Tensor | np.ndarray):
        return None
    images, labels = to_dense_tensor(images, "images"), to_dense_tensor(labels, "labels")
    return _make_image_set(images, labels, num_classes, task or CLASSIFICATION)


def _labels_to_array(labels: Sequence[Any]) -> Any:
    """Convert a list of numbers to an array; return any other list unchanged."""
    if labels and isinstance(labels[0], str):
        raise text_labels_error(labels[0])
    try:
        array = np.asarray(labels)
    except (ValueError, TypeError):  # lists of different lengths, or tensors on a GPU
        return labels
    return array if array.dtype.kind in "biuf" else labels


def _make_image_set(images: Tensor, labels: Tensor, num_classes: int | None, task: Task) -> ImageSet:
    labels = task.prepare_labels(labels)
    if images.is_floating_point():
        images = images.to(torch.float32)
    count = num_classes or (task.count_outputs(labels) if len(labels) else 1)
    return ImageSet(images, labels, tuple(map(str, range(count))), task)


def _as_loader(
    data: Any, batch_size: int, seed: int, shuffle: bool, workers: int, device: torch.device | str
) -> Iterable[Any] | EpochLoader:
    if isinstance(data, DataLoader):
        return data
    if isinstance(data, IterableDataset):
        return DataLoader(data, batch_size=batch_size, num_workers=workers)
    if isinstance(data, Dataset) or (hasattr(data, "__getitem__") and not hasattr(data, "__iter__")):
        check_dataset_size(len(data), 1)
        return make_epoch_loader(data, batch_size, seed, shuffle, workers, device)
    if not hasattr(data, "__iter__"):
        raise UsageError(f"cannot read images from a {type(data).__name__}; pass {_ACCEPTED_TYPES}.")
    if iter(data) is data:
        raise UsageError(
            f"a {type(data).__name__} can be read only once, and data is read several times."
            " Pass the Dataset or DataLoader itself, or list(...) of the batches."
        )
    return data  # type: ignore[no-any-return]
