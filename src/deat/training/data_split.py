"""Split training and validation data, and open them as sources of batches."""

import os
from numbers import Real
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from deat.data import BatchSource, DataLike, ImageSet, LazyImages, as_source
from deat.data.batch_source import as_image_set, check_no_augment, check_not_data_name
from deat.data.dataloader_source import DatasetPart, data_type_name
from deat.data.image_label_checks import UNIT_BOX, Box, check_dataset_size, get_labels
from deat.data.image_set import split_indices
from deat.data.train_subset import select_train_indices, take_train_images
from deat.errors import DataError, UsageError
from deat.tasks import Task
from deat.training.config import TrainConfig, resolve_device


def take_train_part(train: Any, n_train: int, task: Task | None = None) -> Any:
    """Return a part of the training data, in which the classes keep their shares where they are known.

    Args:
        train: The training data, in any form that can be read by index.
        n_train: Number of examples of the part.
        task: What labels mean.

    Returns:
        The part: an image set for data in memory or in a folder, else a view of the Dataset.

    Raises:
        UsageError: `n_train` is out of range, or the data has no fixed order.
    """
    check_not_data_name(train)
    images = train if isinstance(train, LazyImages) else as_image_set(train, task=task)
    if images is not None:
        return take_train_images(images, n_train)
    if not _is_indexable(train):
        raise UsageError(
            f"n_train={n_train!r} cannot be taken of a {data_type_name(train)}, which has no fixed order. Omit n_train, "
            "or pass the Dataset in place of its loader."
        )
    labels = get_labels(train)  # of its attribute labels or targets, as data sets of torchvision have
    classes = labels.tolist() if len(labels) == len(train) else []
    return DatasetPart(train, select_train_indices(classes, len(train), n_train).tolist())


def split_train_val(
    train: Any, val: Any, config: TrainConfig, task: Task | None = None, box: Box = UNIT_BOX
) -> tuple[Any, Any]:
    """Split validation data from the training data if `val` is a fraction.

    Args:
        train: The training data.
        val: The validation data, a fraction of the training data to hold out, or None.
        config: The settings of training; the seed determines the split.
        task: What labels mean.
        box: The range of the images' values.

    Returns:
        The training data and the validation data.

    Raises:
        UsageError: The fraction is not between 0 and 1.
        DataError: The training data cannot be split.
    """
    check_not_data_name(train)
    if not isinstance(val, Real):
        return train, val
    if isinstance(val, bool) or not 0 < float(val) < 1:
        raise UsageError(
            f"val={val!r} is not a fraction of the training data; use a number such as 0.1, or data, or leave val out "
            "to hold out nothing."
        )
    images = train if isinstance(train, ImageSet | LazyImages) else as_image_set(train, task=task)
    train_part: Any
    val_part: Any
    if images is not None:
        # Before the split, so that messages name images by their original index.
        images.check(box) if isinstance(images, ImageSet) else images.check()
        train_part, val_part = images.split(_num_held_out(val, len(images)), config.seed)
    elif _is_indexable(train):
        parts = split_indices(len(train), _num_held_out(val, len(train)), config.seed)
        train_part, val_part = (DatasetPart(train, part.tolist()) for part in parts)
    else:
        raise _cannot_split_error(train)
    check_dataset_size(len(train_part), config.batch_size, held_out=len(val_part))
    return train_part, val_part


def _num_held_out(fraction: Real, num_examples: int) -> int:
    return max(1, round(float(fraction) * num_examples))


def _is_indexable(data: Any) -> bool:
    """Return whether images can be read by index."""
    if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        return False
    return isinstance(data, Dataset) or not hasattr(data, "__iter__")


def _cannot_split_error(data: Any) -> DataError:
    has_indexable_dataset = isinstance(data, DataLoader) and _is_indexable(data.dataset)
    other = ", or the loader's .dataset in place of the loader" if has_indexable_dataset else ""
    return DataError(
        f"a fraction cannot be held out of a {type(data).__name__}, which has no fixed order. "
        f"Pass separate data as val={other}."
    )


def open_val_source(
    val: DataLike | BatchSource | None, train: BatchSource, config: TrainConfig, **options: Any
) -> BatchSource | None:
    """Open the validation data as a source.

    Args:
        val: The validation data, or None.
        train: The training source.
        config: The settings of training.
        **options: Further options of `as_source`: the task and the box.

    Returns:
        The source; None without validation data.

    Raises:
        DataError: The data are damaged, or have other classes or another shape than the training data.
    """
    if val is None:
        return None
    source = open_source(val, config, shuffle=False, num_classes=train.num_classes, **options)
    try:
        source.check()
    except DataError as error:
        if isinstance(val, DatasetPart):  # then the message names images of the training data
            raise
        raise DataError(f"the validation data (val): {error}") from None
    if source.num_classes > train.num_classes:
        raise DataError(
            f"the validation data has {source.num_classes} classes, the training data {train.num_classes}; "
            "both must number their classes in the same way."
        )
    if tuple(source.shape) != tuple(train.shape):
        raise DataError(
            f"the validation images (val) have shape {tuple(source.shape)}, the training images {tuple(train.shape)}; "
            "both need the same number of channels and the same size."
        )
    return source


def open_source(data: DataLike | BatchSource, config: TrainConfig, **options: Any) -> BatchSource:
    """Open data as a source of batches.

    Args:
        data: Any data that `deat.fit` accepts; a BatchSource is returned as it is.
        config: The settings of training.
        **options: Further options of `as_source`, such as shuffle.

    Returns:
        The source.
    """
    if hasattr(data, "epoch") and hasattr(data, "check"):
        check_no_augment(data, options.get("augment"))
        return data  # type: ignore[return-value]
    decoders = min(8, os.cpu_count() or 1) if isinstance(data, LazyImages) else 0
    return as_source(
        data,
        batch_size=config.batch_size,
        device=resolve_device(config.device),
        seed=config.seed,
        workers=decoders if config.workers is None else config.workers,
        **options,
    )
