"""What is trained on, and what is held out to validate on, as sources of batches."""

import os
from numbers import Real
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from deat.data import DataLike, ImageSet, LazyImages, Source, as_source
from deat.data.checks import check_dataset_size
from deat.data.image_set import split_indices
from deat.data.loaders import DatasetPart
from deat.data.sources import as_image_set, check_no_augment, check_not_data_name
from deat.errors import DataError, UsageError
from deat.training.config import TrainConfig, resolve_device


def split_train_val(train: Any, val: Any, config: TrainConfig) -> tuple[Any, Any]:
    """Training and validation data; a fraction is held out of the training data, fixed by the seed."""
    check_not_data_name(train)
    if not isinstance(val, Real):
        return train, val
    if isinstance(val, bool) or not 0 < float(val) < 1:
        raise UsageError(
            f"val={val!r} is not a fraction of the training data; use a number such as 0.1, or data, or leave val out "
            "to hold out nothing."
        )
    images = train if isinstance(train, ImageSet | LazyImages) else as_image_set(train)
    rest: Any
    held: Any
    if images is not None:
        images.check()  # while an image still goes by the number that it was given with
        rest, held = images.split(_num_held_out(val, len(images)), config.seed)
    elif _is_indexable(train):
        parts = split_indices(len(train), _num_held_out(val, len(train)), config.seed)
        rest, held = (DatasetPart(train, part.tolist()) for part in parts)
    else:
        raise _cannot_split_error(train)
    check_dataset_size(len(rest), config.batch_size, held_out=len(held))
    return rest, held


def _num_held_out(fraction: Real, num_examples: int) -> int:
    return max(1, round(float(fraction) * num_examples))


def _is_indexable(data: Any) -> bool:
    """Whether images can be had by number."""
    if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        return False
    return isinstance(data, Dataset) or not hasattr(data, "__iter__")


def _cannot_split_error(data: Any) -> DataError:
    whole = isinstance(data, DataLoader) and _is_indexable(data.dataset)
    other = ", or the loader's .dataset in place of the loader" if whole else ""
    return DataError(
        f"a fraction cannot be held out of a {type(data).__name__}, which gives its images in an order of its own. "
        f"Pass val= as data of its own{other}."
    )


def open_val_source(val: DataLike | Source | None, train: Source, config: TrainConfig) -> Source | None:
    """The validation data as a source, checked against the training data's classes and shape."""
    if val is None:
        return None
    held = open_source(val, config, shuffle=False, num_classes=train.num_classes)
    try:
        held.check()
    except DataError as error:
        if isinstance(val, DatasetPart):  # whose images go by their numbers in the training data
            raise
        raise DataError(f"the validation data (val): {error}") from None
    if held.num_classes > train.num_classes:
        raise DataError(
            f"the validation data has {held.num_classes} classes, the training data {train.num_classes}; "
            "both must number their classes alike."
        )
    if tuple(held.shape) != tuple(train.shape):
        raise DataError(
            f"the validation images (val) have shape {tuple(held.shape)}, the training images {tuple(train.shape)}; "
            "give both one number of channels and one size."
        )
    return held


def open_source(data: DataLike | Source, config: TrainConfig, **options: Any) -> Source:
    """Batches of whatever `fit` accepts, under these settings; a Source is passed through."""
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
