"""Whatever a person trains on, as one kind of thing: a Source of batches on the device."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from deat.data.augment import Augment, check_augment
from deat.data.checks import check_dataset_size, malformed_labels_error, text_labels_error
from deat.data.datasets import DataSplits
from deat.data.image_set import ImageSet
from deat.data.loaders import EpochLoader, LoaderSource, data_type_name, make_epoch_loader
from deat.data.resident import InMemorySource
from deat.data.streaming import AnyImageSet, LazyImages, StreamingSource
from deat.errors import UsageError
from deat.utils.distributed import BatchShard

_ACCEPTED_TYPES = "an ImageSet, a pair of tensors (images, labels), a torch Dataset, or a DataLoader"


class Source(Protocol):
    """Epochs of batches on the device: x float32 in [0, 1], y int64, fixed by the epoch's number.

    Where several processes share the work, `share` is set and batches are this process's rows of the whole ones.
    """

    num_examples: int
    num_classes: int
    shape: tuple[int, ...]
    batch_size: int
    share: BatchShard

    def __len__(self) -> int:
        """Batches in an epoch; a short last one is kept."""

    def epoch(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The epoch's batches."""

    def check(self) -> None:
        """Refuses data that cannot be trained on, before any training."""


@runtime_checkable
class SeekableSource(Protocol):
    """What a Source is that can begin an epoch in its middle: its batches depend on seed, epoch and number alone."""

    @property
    def can_seek(self) -> bool:
        """Whether this very one can."""

    def epoch(self, epoch: int, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The epoch's batches, from the first-th on."""


@runtime_checkable
class SourceWithWorkers(Protocol):
    """What a Source is that has worker processes."""

    def stop_workers(self) -> None:
        """End them; whatever is asked for next has new ones."""


@contextmanager
def stopping_workers(*sources: Source | None) -> Iterator[None]:
    """Workers that the sources take on inside have ended afterwards."""
    try:
        yield
    finally:
        for source in sources:
            if isinstance(source, SourceWithWorkers):
                source.stop_workers()


class MapStyleDataset(Protocol):
    """Images and their labels by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Any, Any]: ...


TensorOrArray = Tensor | np.ndarray[Any, Any]
DataLike = (
    AnyImageSet | Sequence[TensorOrArray] | Dataset[Any] | MapStyleDataset | Iterable[tuple[Any, ...] | list[Any]]
)
"""What images are read from: a set, a pair (images, labels), a Dataset or its like, a loader or a list of batches."""


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
) -> Source:
    """A Source over an ImageSet, LazyImages, pair of tensors, Dataset, DataLoader or re-iterable of batches.

    A loader keeps its own batch size and order, and it and a Dataset their own augmentation: no other is taken. None,
    which a Corpus has for a test part that is not there, is refused.
    """
    check_not_data_name(data)
    _check_not_splits(data)
    check_augment(augment)
    if batch_size < 1:
        raise UsageError(f"the batch size is {batch_size}; it must be at least 1.")
    if isinstance(data, LazyImages):
        augmented = augment is not None
        return StreamingSource(
            data, batch_size, seed=seed, augment=augmented, workers=workers, device=device, shuffle=shuffle
        )
    held = as_image_set(data, num_classes)
    if held is not None:
        return InMemorySource(held, batch_size, device=device, seed=seed, augment=augment, shuffle=shuffle)
    check_no_augment(data, augment)
    loader = _as_loader(data, batch_size, seed, shuffle, workers, device)
    return LoaderSource(loader, device=device, seed=seed, num_classes=num_classes, training=shuffle)


def check_not_data_name(data: Any) -> None:
    """Refuse the name of a data set where the data itself belongs, with the call that loads it."""
    if isinstance(data, str | os.PathLike):
        spec = data if isinstance(data, str) else f"folder:{os.fspath(data)}"
        raise UsageError(
            f"{str(data)!r} only names data. Load it: deat.load_data({spec!r}), which fit takes as it is, and "
            f"evaluate its .test part. Also accepted: {_ACCEPTED_TYPES}."
        )


def _check_not_splits(data: Any) -> None:
    if isinstance(data, DataSplits):
        raise UsageError(
            f"{data.name!r} is a Corpus, which has parts: judge its .test part. Only fit's train= takes it whole, and "
            "val=0.1 holds images out of it."
        )


def check_no_augment(data: Any, augment: Augment | None) -> None:
    """Refuse crops and flips for data that is not ours to make them on."""
    if augment is not None:
        raise UsageError(
            f"augment={augment!r} is for images in memory or in a folder; a {data_type_name(data)} gives its images as they "
            "are trained on. Crop and flip in its own transform, and leave augment out."
        )


def as_image_set(data: Any, num_classes: int | None = None) -> ImageSet | None:
    """The data as an ImageSet if it is held in memory as one or as a pair of arrays, else None."""
    if isinstance(data, ImageSet):
        return data
    if isinstance(data, TensorDataset):
        data = data.tensors
    if not isinstance(data, tuple | list) or len(data) != 2:
        return None
    if isinstance(data[0], Tensor | np.ndarray) and isinstance(data[1], list | tuple):
        data = (data[0], _labels_to_array(data[1]))
    if not all(isinstance(part, Tensor | np.ndarray) for part in data):
        return None
    return _make_image_set(torch.as_tensor(data[0]), torch.as_tensor(data[1]), num_classes)


def _labels_to_array(labels: Sequence[Any]) -> Any:
    """Labels that are given as a list of numbers; what is none of those is left as it is."""
    if labels and isinstance(labels[0], str):
        raise text_labels_error(labels[0])
    try:
        found = np.asarray(labels)
    except (ValueError, TypeError):  # lists of lists, or tensors on a GPU
        return labels
    return found if found.dtype.kind in "biuf" else labels


def _make_image_set(images: Tensor, labels: Tensor, num_classes: int | None) -> ImageSet:
    if labels.ndim != 1 or labels.is_floating_point():
        raise malformed_labels_error(labels)
    if images.is_floating_point():
        images = images.to(torch.float32)
    count = num_classes or (max(int(labels.max()), 0) + 1 if len(labels) else 1)
    return ImageSet(images, labels.to(torch.int64), tuple(str(c) for c in range(count)))


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
