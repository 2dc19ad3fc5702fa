"""deat.predict: the classes that a run's network gives to image files."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deat.data.input_images import (
    ImageFile,
    InputImage,
    check_takes_images,
    list_image_files,
    read_image_file,
    unreadable_error,
)
from deat.data.streaming import EVAL_CROP_FRACTION
from deat.errors import DataError, UsageError
from deat.runs.record_files import RUN_FILE, EpochChoice, read_raw_record
from deat.runs.saved_run import SavedRun, load_run
from deat.tasks.classification import Classification, as_class_logits
from deat.utils.float32_precision import exact_float32
from deat.utils.numbers import is_int_at_least
from deat.utils.torch_contexts import device_of

DEFAULT_BATCH_SIZE = 256
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class Prediction:
    """What a network takes one image for.

    Attributes:
        file: The image's file; one of several in a .npy file has its place behind it, as in "images.npy[3]".
        label: The most probable class; None where the file cannot be read.
        probability: Its probability: the softmax of the network's outputs, which is not a calibrated one.
        top: The most probable classes and their probabilities, the first of them `label`.
        resized_from: Width and height of the file's image, if it was resized.
        error: Why the file cannot be read.
    """

    file: str
    label: str | None = None
    probability: float | None = None
    top: tuple[tuple[str, float], ...] = ()
    resized_from: tuple[int, int] | None = None
    error: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values, without what does not apply."""
        if self.error is not None:
            return {"file": self.file, "error": self.error}
        top = [{"class": name, "probability": share} for name, share in self.top]
        row = {"file": self.file, "class": self.label, "probability": self.probability, "top": top}
        return row if self.resized_from is None else {**row, "resized_from": list(self.resized_from)}


def predict(
    run: SavedRun | str | os.PathLike[str],
    images: Paths,
    *,
    top: int = 1,
    batch_size: int = DEFAULT_BATCH_SIZE,
    model: nn.Module | str | None = None,
    epoch: EpochChoice = "best",
    device: str = "auto",
) -> list[Prediction]:
    """Classify image files with a run's network.

    An image of another size than the network's is resized: its central square is cut out and scaled, as for
    evaluating a folder of images. Colours become grey for a network with one channel.

    Args:
        run: A run's folder, or what `load_run` returns.
        images: Image files, .npy files of arrays (N, C, H, W), and folders of them.
        top: How many classes to name for each image.
        batch_size: How many images pass through the network at once.
        model: The network of a folder, where it is code.
        epoch: Which weights of a folder: "best" or "last".
        device: Where the network of a folder runs.

    Returns:
        A prediction for each image, in their order.

    Raises:
        DataError: If a file cannot be read; the error names every such file.
        UsageError: If the run is not one that classifies images.

    Example:
        >>> [p.label for p in deat.predict("runs/photos", "holiday/")]
        ['cat', 'dog']
    """
    loaded = run if isinstance(run, SavedRun) else load_run(run, model=model, epoch=epoch, device=device)
    paths = [images] if isinstance(images, str | os.PathLike) else list(images)
    rows = list(iter_predictions(loaded, list_image_files(paths), top=top, batch_size=batch_size))
    if errors := [DataError(row.error) for row in rows if row.error is not None]:
        raise unreadable_error(errors)
    return rows


def iter_predictions(
    run: SavedRun, files: Sequence[ImageFile], *, top: int = 1, batch_size: int = DEFAULT_BATCH_SIZE
) -> Iterator[Prediction]:
    """Classify images one batch after the other; a file that cannot be read gives a prediction with its error.

    Args:
        run: The run.
        files: The images.
        top: How many classes to name.
        batch_size: How many images pass through the network at once.

    Yields:
        The predictions, in the order of the files.

    Raises:
        UsageError: If the run does not classify images, or a number is not accepted.
    """
    check_classifies_images(run, files)
    for name, value in (("top", top), ("batch_size", batch_size)):
        if not is_int_at_least(value, 1):
            raise UsageError(f"{name} {value!r} is not accepted: give a whole number of at least 1.")
    crop = find_crop_fraction(run.path)
    for start in range(0, len(files), batch_size):
        chunk = files[start : start + batch_size]
        read = [_try_read(file, run.image_shape, crop) for file in chunk]
        images = [image for image in read if isinstance(image, InputImage)]
        rows = iter(classify(run, torch.stack([image.pixels for image in images])).tolist() if images else ())
        for file, image in zip(chunk, read, strict=True):
            if isinstance(image, DataError):
                yield Prediction(file.name, error=str(image))
            else:
                yield _make_prediction(file.name, next(rows), image, top, run.classes)


def check_classifies_images(run: SavedRun, files: Sequence[ImageFile]) -> None:
    """Check that a run's network gives classes to these files.

    Args:
        run: The run.
        files: The images.

    Raises:
        UsageError: If its task is another, or its inputs are not recorded or are no images.
    """
    if not isinstance(run.task, Classification):
        raise UsageError(
            f"the task of {str(run.path)!r} is {run.task.name}: files are given classes by runs whose task is "
            "classification. In Python: deat.load_run(...).model(inputs)."
        )
    if not run.image_shape:
        raise UsageError(f"{str(run.path)!r} does not say how large its images are: it has no {RUN_FILE} that does.")
    check_takes_images(run.image_shape, files)


@torch.no_grad()
def classify(run: SavedRun, x: Tensor) -> Tensor:
    """Return the probabilities (B, classes) that a run's network gives to images, on the CPU."""
    device = device_of(run.model)
    with exact_float32(device):
        outputs: Tensor = run.model(x.to(device))
    return as_class_logits(outputs).float().softmax(1).cpu()


def find_crop_fraction(folder: Path) -> float:
    """Return which part of an image's shorter side the run's data set keeps when it resizes images.

    Sets that are decoded while they are read, which have crops of their own in place of an augmentation, are
    evaluated on seven eighths.
    """
    record = read_raw_record(folder)
    if record is None:
        return 1.0
    request, data = record["request"], record.get("data", {})
    is_streamed = request.get("augment") != "none" and data.get("augmented_by") is None
    is_folder = str(data.get("name", "")).startswith("folder:")
    return EVAL_CROP_FRACTION if is_folder and is_streamed else 1.0


def class_name(classes: Sequence[str], index: int) -> str:
    """Return the name of a class, or its number where it has none."""
    return classes[index] if index < len(classes) else str(index)


def _try_read(file: ImageFile, shape: Sequence[int], crop: float) -> InputImage | DataError:
    try:
        return read_image_file(file, shape, crop)
    except DataError as error:
        return error


def _make_prediction(
    name: str, probabilities: list[float], image: InputImage, top: int, classes: Sequence[str]
) -> Prediction:
    order = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])[:top]
    named = tuple((class_name(classes, i), round(probabilities[i], 6)) for i in order)
    return Prediction(name, *named[0], named, image.resized_from)
