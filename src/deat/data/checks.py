"""What images and labels must be before anything is trained on them."""

from collections.abc import Callable
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deat.errors import DataError


def malformed_labels_error(labels: Tensor) -> DataError:
    """The error for labels that are not whole numbers of shape (N,), with the call that makes them so."""
    return DataError(
        f"labels are {labels.dtype} of shape {tuple(labels.shape)}; expected class numbers of shape (N,). "
        f"{_suggest_label_fix(labels)}"
    )


def text_labels_error(label: str) -> DataError:
    """The error for labels that are texts."""
    return DataError(
        f"labels are texts, such as {label[:40]!r}; expected class numbers. Number them: "
        "{name: i for i, name in enumerate(sorted(set(names)))} says which is which."
    )


def _suggest_label_fix(labels: Tensor) -> str:
    if labels.ndim == 2 and labels.shape[1] != 1:
        return "One-hot labels: pass labels.argmax(1)."
    flat = ".squeeze(1)" if labels.ndim == 2 else ""
    whole = "" if _has_integer_dtype(labels) else ".long()"
    return f"Pass labels{flat}{whole}." if flat or (whole and labels.ndim == 1) else "Give one number for each image."


def _has_integer_dtype(labels: Tensor) -> bool:
    return not labels.is_floating_point() and labels.dtype != torch.bool


def describe_labels_out_of_range(data: Any, num_outputs: int) -> str:
    """What is said of labels for which a model of so many outputs has none: which image, and what to do."""
    labels = _get_labels(data)
    bad = np.flatnonzero(labels >= num_outputs)
    if not bad.size:
        return ""
    first = f" Image {bad[0]} has the label {labels[bad[0]]}, as the first of {bad.size:,} above {num_outputs - 1}"
    if labels.min() == 1 and labels.max() == num_outputs:
        return f"{first}, and none has 0: if your labels count from 1, take 1 off, since deat's count from 0."
    return f"{first}: mend or leave out these images, or give the model an output for each class."


def describe_largest_label(source: Any, num_outputs: int) -> str:
    """What is said of the largest label of a source whose labels are not held; of one that seems to count from 1."""
    top, at = source.num_classes - 1, getattr(source, "largest_label_index", None)
    where = "" if at is None else f", of image {at}"
    if num_outputs != top:  # a set that only names its classes may have no such label
        return f" The largest label is {top}{where}." if where else ""
    return f" The largest label is {top}{where}: if your labels count from 1, take 1 off, since deat's count from 0."


def _get_labels(data: Any) -> np.ndarray[Any, Any]:
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


_CHUNK_IMAGES = 1024
_SAMPLE_IMAGES = 1000

_NORMALISED_HINT = (
    "Images are float in [0, 1]; put normalisation inside the model: deat.fit(..., normalize=(mean, std))."
)
_CLASSES_HINT = "Renumber the labels, or let an ImageSet or a Dataset name all of its classes (`classes`)."
_BYTE_RANGE_HINT = "These look like 0-255 floats: divide by 255, or pass uint8, which is scaled for you."


def to_unit_range(images: Tensor) -> Tensor:
    """Images as float32 in [0, 1]: uint8 is divided by 255, floats are cast; what made them is not differentiated."""
    if images.dtype == torch.uint8:
        return images.to(torch.float32).mul_(1 / 255)  # a division is rounded differently on a GPU
    return images.detach().to(torch.float32)


def hash_labels_and_sample(labels: Tensor, sample: bytes) -> str:
    """A hash of a set's labels and of a few of its images, by which it is known again."""
    return sha256(labels.cpu().numpy().tobytes() + sample).hexdigest()[:16]


def sample_slice(num_images: int) -> slice:
    """About a thousand of so many images, spread over all."""
    return slice(None, None, max(1, num_images // _SAMPLE_IMAGES))


def check_images(images: Tensor, dataset_index: Callable[[int], int] = int) -> None:
    """Refuses images that are not (N, C, H, W), uint8 or finite floats in [0, 1]; number is what one is known by."""
    if images.ndim != 4 or 0 in images.shape[1:]:
        raise DataError(f"images have shape {tuple(images.shape)}; expected (N, C, H, W), none of them 0.")
    if images.dtype == torch.uint8:
        return
    if not images.is_floating_point():
        raise DataError(f"images are {images.dtype}; expected uint8 (0-255) or float in [0, 1].")
    for start in range(0, len(images), _CHUNK_IMAGES):
        _check_pixels(images[start : start + _CHUNK_IMAGES], start, dataset_index)


def is_valid_images(images: Tensor) -> bool:
    """Whether check_images has nothing to say."""
    try:
        check_images(images)
    except DataError:
        return False
    return True


def _check_pixels(images: Tensor, start: int, dataset_index: Callable[[int], int]) -> None:
    low, high = images.aminmax()  # a NaN is both, and fails both comparisons
    if bool((low >= 0) & (high <= 1)):
        return
    good = ((images >= 0) & (images <= 1)).flatten(1).all(1)
    index = int((~good).to(torch.uint8).argmax())
    pixels = images[index].flatten()
    value = float(pixels[~((pixels >= 0) & (pixels <= 1))][0])
    raise DataError(_pixel_message(dataset_index(start + index), value, images))


def _pixel_message(index: int, value: float, images: Tensor) -> str:
    if not np.isfinite(value):
        return f"image {index} holds {value}; every pixel must be in [0, 1]. Remove or repair the image."
    low, high = images.nan_to_num().aminmax()
    fix = _BYTE_RANGE_HINT if float(low) >= 0 and float(high) > 2 else _NORMALISED_HINT
    return f"image {index} holds the pixel value {value:.6g}, outside [0, 1]. {fix}"


def check_labels(labels: Tensor, num_classes: int, dataset_index: Callable[[int], int] = int) -> None:
    """Refuses labels that are not whole numbers from 0 to num_classes - 1; number is what an image is known by."""
    if labels.ndim != 1 or labels.is_floating_point() or labels.dtype == torch.bool:
        raise malformed_labels_error(labels)
    values = labels.detach().cpu().numpy()
    bad = np.flatnonzero((values < 0) | (values >= num_classes))
    if bad.size:
        value = int(values[bad[0]])
        fix = _CLASSES_HINT if value >= 0 else "Renumber the labels, or leave out images without a class."
        raise DataError(
            f"label {dataset_index(int(bad[0]))} is {value}; with {num_classes} classes labels run from 0 to "
            f"{num_classes - 1}. {fix}"
        )


def check_dataset_size(num_examples: int, batch_size: int, training: bool = True, held_out: int = 0) -> None:
    """Refuses an empty set and, in training, one smaller than a batch; held_out images were taken from it."""
    if num_examples < 1:
        raise DataError("the data set is empty; it must hold at least one image.")
    if training and num_examples < batch_size:
        raise DataError(
            f"the data set holds {_describe_num_images(num_examples, held_out)}, fewer than one batch of {batch_size}."
            f" {_suggest_size_fix(num_examples, batch_size, held_out)}"
        )


def _suggest_size_fix(num_examples: int, batch_size: int, held_out: int) -> str:
    """What makes a set hold a batch: fewer held-out images where those are most of it, else also a smaller batch."""
    smaller = f"a batch size (batch_size, --batch-size) of at most {num_examples}"
    spare = num_examples + held_out - batch_size
    if not held_out or spare < 0:
        return f"Use {smaller}."
    fewer = f"Hold out at most {spare} (val, --held-out)"
    return f"{fewer}, or use {smaller}." if num_examples > held_out else f"{fewer}."


def _describe_num_images(num_examples: int, held_out: int) -> str:
    if not held_out:
        return f"{num_examples} images"
    return f"{num_examples + held_out} images, of which {held_out} are held out for validation and {num_examples} left"
