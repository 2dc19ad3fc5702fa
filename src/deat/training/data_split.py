"""What is trained on, and what is held out to validate on, as sources of batches."""

import os
from numbers import Real
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from deat.data import Data, ImageSet, LazyImages, Source, as_source
from deat.data.checks import check_fits
from deat.data.image_set import split_indices
from deat.data.loaders import Portion
from deat.data.sources import as_images, refuse_augment, refuse_text
from deat.errors import DataError, UsageError
from deat.training.config import Settings, find_device


def divide(train: Any, val: Any, settings: Settings) -> tuple[Any, Any]:
    """Training and validation data; a fraction is held out of the training data, fixed by the seed."""
    refuse_text(train)
    if not isinstance(val, Real):
        return train, val
    if isinstance(val, bool) or not 0 < float(val) < 1:
        raise UsageError(
            f"val={val!r} is not a fraction of the training data; use a number such as 0.1, or data, or leave val out "
            "to hold out nothing."
        )
    images = train if isinstance(train, ImageSet | LazyImages) else as_images(train)
    rest: Any
    held: Any
    if images is not None:
        images.check()  # while an image still goes by the number that it was given with
        rest, held = images.split(_count(val, len(images)), settings.seed)
    elif _has_numbers(train):
        parts = split_indices(len(train), _count(val, len(train)), settings.seed)
        rest, held = (Portion(train, part.tolist()) for part in parts)
    else:
        raise _undivided(train)
    check_fits(len(rest), settings.batch_size, held_out=len(held))
    return rest, held


def _count(share: Real, num_examples: int) -> int:
    return max(1, round(float(share) * num_examples))


def _has_numbers(data: Any) -> bool:
    """Whether images can be had by number."""
    if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        return False
    return isinstance(data, Dataset) or not hasattr(data, "__iter__")


def _undivided(data: Any) -> DataError:
    whole = isinstance(data, DataLoader) and _has_numbers(data.dataset)
    other = ", or the loader's .dataset in place of the loader" if whole else ""
    return DataError(
        f"a fraction cannot be held out of a {type(data).__name__}, which gives its images in an order of its own. "
        f"Pass val= as data of its own{other}."
    )


def open_held_out(val: Data | Source | None, train: Source, settings: Settings) -> Source | None:
    """The validation data as a source, checked against the training data's classes and shape."""
    if val is None:
        return None
    held = open_source(val, settings, shuffle=False, num_classes=train.num_classes)
    try:
        held.check()
    except DataError as error:
        if isinstance(val, Portion):  # whose images go by their numbers in the training data
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


def open_source(data: Data | Source, settings: Settings, **options: Any) -> Source:
    """Batches of whatever `fit` accepts, under these settings; a Source is passed through."""
    if hasattr(data, "epoch") and hasattr(data, "check"):
        refuse_augment(data, options.get("augment"))
        return data  # type: ignore[return-value]
    decoders = min(8, os.cpu_count() or 1) if isinstance(data, LazyImages) else 0
    return as_source(
        data,
        batch_size=settings.batch_size,
        device=find_device(settings.device),
        seed=settings.seed,
        workers=decoders if settings.workers is None else settings.workers,
        **options,
    )
