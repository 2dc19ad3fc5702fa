"""Data sets of Hugging Face `datasets`: their images as image sets, decoded once or as they are read."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from deat.data.image_archives import check_file_size
from deat.data.image_folder import load_or_stream
from deat.data.streaming import AnyImageSet
from deat.errors import DataError, UsageError

_SPLITS = {"train": "train", "validation": "val", "valid": "val", "val": "val", "test": "test"}


@dataclass(frozen=True, eq=False)
class EncodedImages:
    """The encoded images of a column, as files.

    Args:
        dataset: The data set, whose column gives the bytes or the path of each image.
        column: The column.
    """

    dataset: Any
    column: str

    @cached_property
    def names(self) -> tuple[str, ...]:
        """A name for each row."""
        return tuple(f"{self.column}[{index}]" for index in range(len(self.dataset)))

    def size(self, index: int) -> int:
        """Return the size of an image's file in bytes."""
        return len(self.read(index))

    def read(self, index: int) -> bytes:
        """Return the content of an image's file.

        Raises:
            DataError: The row has no image, or its file cannot be read.
        """
        value = self.dataset[int(index)][self.column]
        name = f"{self.column}[{index}]"
        if not value:
            raise DataError(f"row {index} has no image in column {self.column!r}. Leave it out: dataset.filter(...).")
        try:
            data = value.get("bytes") or Path(value["path"]).read_bytes()
        except (OSError, TypeError) as error:
            raise DataError(f"cannot read the image of row {index} ({error}).") from None
        check_file_size(name, len(data))
        return bytes(data)


def is_hugging_face(data: Any) -> bool:
    """Return whether data is a Dataset of the library `datasets`, without importing it."""
    return any(kind.__module__.startswith("datasets.") and kind.__name__ == "Dataset" for kind in type(data).__mro__)


def is_hugging_face_dict(data: Any) -> bool:
    """Return whether data is a DatasetDict of the library `datasets`."""
    return any(
        kind.__module__.startswith("datasets.") and kind.__name__ == "DatasetDict" for kind in type(data).__mro__
    )


def read_hugging_face(
    data: Any, size: int | None = None, image: str | None = None, label: str | None = None
) -> Mapping[str, AnyImageSet]:
    """Convert a Dataset, or the train, validation and test parts of a DatasetDict.

    Args:
        data: The data set. A transform of its own (`with_transform`, `set_format`) is not applied.
        size: Side in pixels that images are resized to. By default images of one size keep it.
        image: The column of images; by default the only one of the feature Image.
        label: The column of labels; by default the only one of the feature ClassLabel.

    Returns:
        The images of "train" and, if there are any, of "test" and "val": decoded if they have one size and fit in
        memory.

    Raises:
        UsageError: There is no column of images or of labels, or there are several and none was named.
        DataError: An image or a label cannot be read.
    """
    parts = (
        {_SPLITS[name]: part for name, part in data.items() if name in _SPLITS} if is_hugging_face_dict(data) else {}
    )
    parts = parts or ({} if is_hugging_face_dict(data) else {"train": data})
    if "train" not in parts:
        raise UsageError(f"the DatasetDict has the parts {', '.join(data)}, and no train. Pass one part: data[NAME].")
    features = parts["train"].features
    image = image or _find_column(features, "Image", "image")
    label = label or _find_column(features, "ClassLabel", "label")
    classes = tuple(map(str, getattr(features[label], "names", None) or ()))
    sets: dict[str, AnyImageSet] = {}
    for name, part in parts.items():
        raw = part.with_format(None)
        raw = raw.cast_column(image, type(features[image])(decode=False))
        labels = torch.as_tensor(_read_labels(raw, label, name), dtype=torch.int64)
        class_names = classes or tuple(map(str, range(int(labels.max()) + 1 if len(labels) else 1)))
        files = EncodedImages(raw.select_columns([image]), image)
        # each part is loaded as a set of its own, whose only split is always named "train"
        loaded = load_or_stream(files, class_names, {"train": (torch.arange(len(labels)), labels)}, size)
        sets[name] = loaded["train"]
    return sets


def _find_column(features: Any, kind: str, argument: str) -> str:
    columns: list[str] = [name for name, feature in features.items() if type(feature).__name__ == kind]
    if len(columns) == 1:
        return columns[0]
    candidates = f"several: {', '.join(columns)}" if columns else f"none; its columns are {', '.join(features)}"
    raise UsageError(
        f"the data set should have one column of the feature {kind}, and has {candidates}. Name the column: "
        f"deat.load_data(dataset, {argument}=NAME)."
    )


def _read_labels(part: Any, label: str, name: str) -> list[int]:
    labels = list(part[label])
    bad = next((i for i, y in enumerate(labels) if not isinstance(y, int) or y < 0), None)
    if bad is not None:
        raise DataError(
            f"the label of row {bad} of {name} is {labels[bad]!r}; expected a class number from 0. Parts without labels, "
            "as test sets often are (-1), cannot be used: leave them out."
        )
    return labels
