"""Checks that images and labels can be trained on."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deat.errors import DataError

_CHUNK_IMAGES = 1024

_COUNT_FROM_0_HINT = "If your labels count from 1, subtract 1: deat's count from 0."
_NORMALISED_HINT = (
    "Images are float in [0, 1]; normalise inside the model: deat.add_normalization(model, mean, std), or deat.fit(..., "
    "normalize=(mean, std))."
)
_JITTERED_HINT = (
    "These are close to [0, 1], as after a jitter of colours, added noise or bicubic resizing: end the transform with "
    "images.clamp(0, 1)."
)
_BYTE_RANGE_HINT = "These look like 0-255 floats: divide by 255, or pass uint8, which deat scales itself."


Box = tuple[float, float] | None
"""The least and the largest value of an input; None where values have no bounds."""
UNIT_BOX: Box = (0.0, 1.0)
"""That of images."""


def to_dense_tensor(values: Any, noun: str) -> Tensor:
    """Return an array or tensor as a tensor that has all its numbers in memory.

    Args:
        values: A tensor, or an array.
        noun: What messages call the values, such as "images".

    Raises:
        DataError: If it has no numbers, has them in a sparse or nested form, or masks some.
    """
    if isinstance(values, np.ma.MaskedArray):
        raise DataError(f"{noun} are a masked array, whose mask would be lost. Remove what is masked, or fill it.")
    try:
        tensor = torch.as_tensor(values)
    except TypeError as error:  # an array of objects
        raise DataError(f"{noun} are an array of {values.dtype}s; expected numbers ({error}).") from None
    check_layout(tensor, noun)
    if tensor.is_meta:
        raise DataError(f"{noun} are on the device 'meta', which holds no numbers. Load them on the CPU.")
    return tensor


def check_layout(tensor: Tensor, noun: str) -> Tensor:
    """Return a tensor, or raise DataError if it is sparse or nested."""
    form = "nested" if tensor.is_nested else "" if tensor.layout == torch.strided else "sparse"
    if form:
        raise DataError(f"{noun} are a {form} tensor; expected a dense one, such as of to_dense() or torch.stack.")
    return tensor


def check_images(images: Tensor, dataset_index: Callable[[int], int] = int, box: Box = UNIT_BOX) -> None:
    """Check the shape, type and values of images, or of other inputs.

    Args:
        images: The examples: images (N, C, H, W), uint8 or float; or float tensors of another shape (N, ...).
        dataset_index: Converts an example's index in `images` to the index that messages show.
        box: The range of values.

    Raises:
        DataError: If the shape or type is another, or a value is outside the box or not finite.
    """
    if images.ndim < 2 or 0 in images.shape[1:]:
        raise DataError(
            f"images have shape {tuple(images.shape)}; expected (N, C, H, W) with C, H and W above 0, or other examples "
            "(N, ...), such as waveforms (N, C, T) or features (N, F)."
        )
    if images.dtype == torch.uint8 and images.ndim == 4:
        return
    if not images.is_floating_point():
        range_text = "[0, 1]" if box == UNIT_BOX else _format_box(box)
        accepted = f"uint8 (0-255) or float in {range_text}" if images.ndim == 4 else f"float in {range_text}"
        raise DataError(f"{noun_of(images)}s are {images.dtype}; expected {accepted}.")
    for start in range(0, len(images), _CHUNK_IMAGES):
        _check_values(images[start : start + _CHUNK_IMAGES], start, dataset_index, box)


def noun_of(examples: Tensor) -> str:
    """Return what messages call an example: "image" for (N, C, H, W), else "example"."""
    return "image" if examples.ndim == 4 else "example"


def _format_box(box: Box) -> str:
    return "any range" if box is None else f"[{box[0]:g}, {box[1]:g}]"


def noun_of_shape(shape: Sequence[int] | None) -> str:
    """Return what messages call examples of a shape: "images" for (C, H, W), else "examples".

    Args:
        shape: The shape of one example; None if a record does not have it, as those of early versions, which knew
            images alone.
    """
    return "images" if shape is None or len(shape) == 3 else "examples"


def is_valid_images(images: Tensor, box: Box = UNIT_BOX) -> bool:
    """Return whether `check_images` accepts the images."""
    try:
        check_images(images, box=box)
    except DataError:
        return False
    return True


def _check_values(images: Tensor, start: int, dataset_index: Callable[[int], int], box: Box) -> None:
    low, high = box or (-torch.finfo(images.dtype).max, torch.finfo(images.dtype).max)
    least, largest = images.aminmax()  # both are NaN if a value is, and then both comparisons fail
    if bool((least >= low) & (largest <= high)):
        return
    is_good = ((images >= low) & (images <= high)).flatten(1).all(1)
    index = int((~is_good).to(torch.uint8).argmax())
    values = images[index].flatten()
    value = float(values[~((values >= low) & (values <= high))][0])
    raise DataError(_range_message(dataset_index(start + index), value, images, box))


def _range_message(index: int, value: float, images: Tensor, box: Box) -> str:
    noun = noun_of(images)
    part = "pixel" if noun == "image" else "value"
    if not np.isfinite(value):
        where = "finite" if box is None else f"in {_format_box(box)}"
        return f"{noun} {index} holds {value}; every {part} must be {where}. Remove or repair the {noun}."
    if noun == "image" and box == UNIT_BOX:
        least, largest = images.nan_to_num().aminmax()
        hint = _choose_range_hint(float(least), float(largest))
        return f"image {index} holds the pixel value {value:.6g}, outside [0, 1]. {hint}"
    return (
        f"{noun} {index} holds the value {value:.6g}, outside {_format_box(box)}, the box of the threat model. Scale the "
        "data, or give the threat the range of the data: threat=deat.Linf(eps, box=(low, high)), or box=None for none."
    )


def _choose_range_hint(least: float, largest: float) -> str:
    """What to do about images that are outside [0, 1]: by their range they are bytes, jittered or normalised."""
    if least >= 0 and largest > 2:
        return _BYTE_RANGE_HINT
    return _JITTERED_HINT if least > -0.5 and largest < 1.5 else _NORMALISED_HINT


def text_labels_error(label: str) -> DataError:
    """Return the error for labels that are strings.

    Args:
        label: One of the labels.
    """
    return DataError(
        f"labels are strings, such as {label[:40]!r}; expected class numbers. Number the classes, for example by "
        "{name: i for i, name in enumerate(sorted(set(names)))}."
    )


def describe_labels_out_of_range(data: Any, num_outputs: int) -> str:
    """Describe the labels for which a model has no output.

    Args:
        data: An image set, a pair (images, labels), a Dataset or None.
        num_outputs: Number of the model's outputs.

    Returns:
        Sentences that name the first such image and what to do, starting with a space. Empty if there is none, or if
        the labels are not in memory.
    """
    labels = get_labels(data)
    bad = np.flatnonzero(labels >= num_outputs)
    if not bad.size:
        return ""
    first = f" Image {bad[0]} has the label {labels[bad[0]]}, the first of {bad.size:,} above {num_outputs - 1}"
    if labels.min() == 1 and labels.max() == num_outputs:
        return f"{first}, and no image has the label 0. {_COUNT_FROM_0_HINT}"
    return f"{first}. Correct or remove these images, or give the model an output for each class."


def describe_largest_label(source: Any, num_outputs: int) -> str:
    """Describe the largest label of a source whose labels are not in memory.

    Args:
        source: A source of more classes than the model has outputs.
        num_outputs: Number of the model's outputs.

    Returns:
        Sentences that start with a space. Empty if the source does not know where its largest label is and the
        labels cannot be ones that count from 1.
    """
    largest_label, index = source.num_classes - 1, getattr(source, "largest_label_index", None)
    image = "" if index is None else f" (image {index})"
    if num_outputs != largest_label:  # a data set that only names its classes may not have this label
        return f" The largest label is {largest_label}{image}." if image else ""
    return f" The largest label is {largest_label}{image}. {_COUNT_FROM_0_HINT}"


def get_labels(data: Any) -> np.ndarray[Any, Any]:
    """Return the integer labels of data that has them in memory, else an empty array."""
    if isinstance(data, tuple | list) and len(data) == 2:
        labels = data[1]
    else:
        attributes = (getattr(data, name, None) for name in ("labels", "targets"))
        labels = next((value for value in attributes if value is not None), None)
        if labels is None:
            labels = getattr(data, "tensors", (None,))[-1]
    if isinstance(labels, Tensor):
        labels = labels.detach().cpu().numpy()
    array = np.asarray([] if labels is None else labels)
    return array if array.ndim == 1 and array.dtype.kind in "iu" else np.empty(0, dtype=np.int64)


def check_dataset_size(num_examples: int, batch_size: int, training: bool = True, held_out: int = 0) -> None:
    """Check that a data set has an image, and enough for a batch if it is for training.

    Args:
        num_examples: Number of images.
        batch_size: Images per batch.
        training: Whether a full batch is needed.
        held_out: Number of images that were held out of the data set for validation, for the message.

    Raises:
        DataError: If there are fewer images.
    """
    if num_examples < 1:
        raise DataError("the data set is empty; it must hold at least one image.")
    if training and num_examples < batch_size:
        raise DataError(
            f"the data set holds {_describe_size(num_examples, held_out)}, fewer than one batch of {batch_size}."
            f" {_suggest_size_fix(num_examples, batch_size, held_out)}"
        )


def _suggest_size_fix(num_examples: int, batch_size: int, held_out: int) -> str:
    smaller_batch = f"a batch size (batch_size, --batch-size) of at most {num_examples}"
    max_held_out = num_examples + held_out - batch_size
    if not held_out or max_held_out < 0:
        return f"Use {smaller_batch}."
    hold_out_less = f"Hold out at most {max_held_out} (val, --held-out)"
    # With most images held out, the batch size is not what is wrong.
    return f"{hold_out_less}, or use {smaller_batch}." if num_examples > held_out else f"{hold_out_less}."


def _describe_size(num_examples: int, held_out: int) -> str:
    if not held_out:
        return f"{num_examples} examples"
    return (
        f"{num_examples + held_out} examples, of which {held_out} are held out for validation and {num_examples} left"
    )
