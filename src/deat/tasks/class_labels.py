"""Checks that labels are class numbers."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from deat.errors import DataError


def check_class_numbers(
    labels: Tensor, num_classes: int, dataset_index: Callable[[int], int] = int, ignored_hint: str = ""
) -> None:
    """Check that class numbers are from 0 to num_classes - 1.

    Args:
        labels: Integers with the examples first.
        num_classes: Number of classes.
        dataset_index: Converts an example's index in `labels` to the index that messages show.
        ignored_hint: What to add about labels that do not count.

    Raises:
        DataError: If a label is out of range.
    """
    values = labels.detach().cpu().numpy()
    is_bad = (values < 0) | (values >= num_classes)
    bad = np.flatnonzero(is_bad.reshape(len(values), -1).any(1)) if values.size else np.empty(0, dtype=np.int64)
    if bad.size:
        value = int(values[bad[0]][is_bad[bad[0]]].flat[0]) if values.ndim > 1 else int(values[bad[0]])
        hint = "or let an ImageSet or a Dataset name all of its classes (`classes`)"
        raise DataError(
            f"label {dataset_index(int(bad[0]))} is {value}; with {num_classes} classes labels run from 0 to "
            f"{num_classes - 1}. Renumber the labels, {hint if value >= 0 else 'or remove images without a class'}."
            f"{f' {ignored_hint}' if ignored_hint else ''}"
        )


def check_label_format(labels: Tensor) -> None:
    """Raise DataError if labels are not integers of shape (N,), with the call that converts them."""
    if labels.ndim != 1 or not has_integer_dtype(labels):
        raise DataError(
            f"labels are {labels.dtype} of shape {tuple(labels.shape)}; expected class numbers of shape (N,). "
            f"{_suggest_label_fix(labels)}"
        )


def _suggest_label_fix(labels: Tensor) -> str:
    if labels.ndim == 2 and labels.shape[1] != 1:
        return "One-hot labels: pass labels.argmax(1). Several labels each: task='multilabel'."
    if labels.ndim > 2:
        return "Give one number for each image. Masks, a class for each pixel: task='segmentation'."
    squeeze = ".squeeze(1)" if labels.ndim == 2 else ""
    convert = "" if has_integer_dtype(labels) else ".long()"
    if squeeze or (convert and labels.ndim == 1):
        return f"Pass labels{squeeze}{convert}{'. Numbers to predict: task=' + repr('regression') if convert else ''}."
    return "Give one number for each image."


def has_integer_dtype(labels: Tensor) -> bool:
    """Return whether a tensor holds whole numbers, and not booleans."""
    return not labels.is_floating_point() and labels.dtype != torch.bool
