"""Labels that are no class numbers, or not of the model at hand, told so that they can be found and mended."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from deat.errors import DataError


def malformed(labels: Tensor) -> DataError:
    """The error for labels that are not whole numbers of shape (N,), with the call that makes them so."""
    return DataError(
        f"labels are {labels.dtype} of shape {tuple(labels.shape)}; expected class numbers of shape (N,). "
        f"{_remedy(labels)}"
    )


def named_by_text(label: str) -> DataError:
    """The error for labels that are texts."""
    return DataError(
        f"labels are texts, such as {label[:40]!r}; expected class numbers. Number them: "
        "{name: i for i, name in enumerate(sorted(set(names)))} says which is which."
    )


def _remedy(labels: Tensor) -> str:
    if labels.ndim == 2 and labels.shape[1] != 1:
        return "One-hot labels: pass labels.argmax(1)."
    flat = ".squeeze(1)" if labels.ndim == 2 else ""
    whole = "" if _is_whole(labels) else ".long()"
    return f"Pass labels{flat}{whole}." if flat or (whole and labels.ndim == 1) else "Give one number for each image."


def _is_whole(labels: Tensor) -> bool:
    return not labels.is_floating_point() and labels.dtype != torch.bool


def beyond(data: Any, outputs: int) -> str:
    """What is said of labels for which a model of so many outputs has none: which image, and what to do."""
    labels = _labels_of(data)
    bad = np.flatnonzero(labels >= outputs)
    if not bad.size:
        return ""
    first = f" Image {bad[0]} has the label {labels[bad[0]]}, as the first of {bad.size:,} above {outputs - 1}"
    if labels.min() == 1 and labels.max() == outputs:
        return f"{first}, and none has 0: if your labels count from 1, take 1 off, since deat's count from 0."
    return f"{first}: mend or leave out these images, or give the model an output for each class."


def largest(source: Any, outputs: int) -> str:
    """What is said of the largest label of a source whose labels are not held; of one that seems to count from 1."""
    top, at = source.num_classes - 1, getattr(source, "largest_at", None)
    where = "" if at is None else f", of image {at}"
    if outputs != top:  # a set that only names its classes may have no such label
        return f" The largest label is {top}{where}." if where else ""
    return f" The largest label is {top}{where}: if your labels count from 1, take 1 off, since deat's count from 0."


def _labels_of(data: Any) -> np.ndarray[Any, Any]:
    """The labels of data that holds them beside its images; none of any other."""
    if isinstance(data, tuple | list) and len(data) == 2:
        found = data[1]
    else:
        tensors = getattr(data, "tensors", (None,))
        found = next((held for name in ("labels", "targets") if (held := getattr(data, name, None)) is not None), None)
        found = tensors[-1] if found is None else found
    if isinstance(found, Tensor):
        found = found.detach().cpu().numpy()
    known = np.asarray([] if found is None else found)
    return known if known.ndim == 1 and known.dtype.kind in "iu" else np.empty(0, dtype=np.int64)
