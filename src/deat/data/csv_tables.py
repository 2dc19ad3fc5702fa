"""Tables in CSV files: numbers as they are, categories one-hot and fixed, one column as the target."""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path

import torch
from torch import Tensor

from deat.data.image_set import ImageSet, split_indices
from deat.errors import DataError, UsageError, unknown_name_error
from deat.tasks import CLASSIFICATION, Classification, Regression, Task
from deat.utils.safe_read import open_plain_file
from deat.utils.text import warn_caller

TEST_SHARE = 0.2
"""The part of a table that becomes the test part, where there is no file of its own for it."""
MAX_NUMBER_CLASSES = 20
"""A target of at most this many different whole numbers is taken for classes."""
MAX_CATEGORIES = 100
"""A column of text with more values than this is no category."""
_MISSING = {"nan", "na", "n/a", "null", "none", "inf", "-inf", "?", "-"}
"""What stands for a missing number, in lower case."""


@dataclass(frozen=True)
class Table:
    """A table as tensors.

    Attributes:
        splits: The rows of "train" and "test".
        scale: The deviation of each feature on the training rows; 1 for categories and constants.
        mutable: Whether each feature can change; False for categories.
    """

    splits: dict[str, ImageSet]
    scale: tuple[float, ...]
    mutable: tuple[bool, ...]


def read_table(path: Path, target: str | None, task: Task | None = None) -> Table:
    """Read a table.

    Args:
        path: A CSV file with a header, of which a fifth of the rows becomes the test part; or a directory with train.csv
            and test.csv.
        target: The column to predict.
        task: Classification or regression. By default classification if the target is text or has at most 20 different
            whole numbers.

    Returns:
        The features, float32 of shape (N, F), with labels. The targets of a regression are in deviations from their mean
        on the training rows.

    Raises:
        DataError: A file is missing or damaged, or a value is missing.
        UsageError: The target is no column, or the task is neither classification nor regression.
    """
    files = {"train": path / "train.csv", "test": path / "test.csv"} if path.is_dir() else {"train": path}
    parts = {split: _read_csv(file) for split, file in files.items() if split == "train" or file.exists()}
    header, rows = parts["train"][0], [row for _, part in parts.values() for row in part]
    if any(other != header for other, _ in parts.values()):
        raise DataError(f"train.csv and test.csv in {str(path)!r} have different columns.")
    if target is None:
        raise UsageError(
            f"the table {str(path)!r} needs a target, the column to predict: --target COLUMN, or target= in load_data. Its "
            f"columns: {', '.join(header)}."
        )
    if target not in header:
        raise unknown_name_error("target", target, header, "Name the column to predict: --target COLUMN.")
    count = len(parts["train"][1])
    if "test" in parts:
        train, test = torch.arange(count), torch.arange(count, len(rows))
    else:
        train, test = split_indices(len(rows), max(1, round(TEST_SHARE * len(rows))), 0)
    columns = {name: [row[i].strip() for row in rows] for i, name in enumerate(header)}
    labels, classes, kind = _read_target(columns.pop(target), target, task, train)
    features, scale, mutable = _read_features(columns, train)
    splits = {
        split: ImageSet(features[index], labels[index], classes, kind)
        for split, index in (("train", train), ("test", test))
    }
    return Table(splits, scale, mutable)


def _read_csv(file: Path) -> tuple[list[str], list[list[str]]]:
    try:
        with open_plain_file(file) as binary, TextIOWrapper(binary, "utf-8-sig", newline="") as stream:
            header, *rows = [row for row in csv.reader(stream) if row] or [[]]
    except (OSError, UnicodeDecodeError, csv.Error, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cannot read the table {str(file)!r} ({reason}): expected a CSV file with a header.") from None
    for number, row in enumerate(rows, 2):
        if len(row) != len(header) or not all(value.strip() for value in row):
            raise DataError(
                f"line {number} of {str(file)!r} has {sum(bool(v.strip()) for v in row)} values for {len(header)} columns. Fill "
                "in or remove rows with missing values."
            )
    repeated = next((name for name in header if header.count(name) > 1), None)
    if repeated is not None:
        raise DataError(f"{str(file)!r} has two columns of the name {repeated!r}. Rename or remove one.")
    if not rows:
        raise DataError(f"{str(file)!r} has {'a header and no rows' if header else 'no header'}; expected a table.")
    if len(header) == 1 and any(mark in header[0] for mark in ";\t|"):
        raise DataError(f"{str(file)!r} has a single column, {header[0]!r}. Separate columns by commas.")
    return header, rows


def _to_numbers(values: Sequence[str]) -> Tensor | None:
    try:
        numbers = [float(value) for value in values]
    except ValueError:
        return None
    return torch.tensor(numbers, dtype=torch.float64) if all(map(math.isfinite, numbers)) else None


def _parse_column(name: str, values: Sequence[str]) -> Tensor | None:
    """The numbers of a column; None for a category."""
    if (numbers := _to_numbers(values)) is not None:
        return numbers
    others = [value for value in values if _to_numbers([value]) is None]
    if 2 * len(others) > len(values):
        return None
    if all(value.lower() in _MISSING for value in others):
        raise DataError(
            f"the column {name!r} has no number in {len(others):,} of {len(values):,} rows, such as {others[0]!r}. Fill in or "
            "remove rows with missing values."
        )
    warn_caller(
        f"the column {name!r} holds numbers, and in {len(others):,} of {len(values):,} rows text, such as {others[0]!r}: its "
        "values are taken for categories."
    )
    return None


def _is_fixed(numbers: Tensor) -> bool:
    """Whether numbers are a category of two values, or number the rows from 0 or 1."""
    distinct: Tensor = numbers.unique()  # type: ignore[no-untyped-call]
    return len(distinct) == 2 or (float(numbers[0]) in (0.0, 1.0) and bool((numbers.diff() == 1).all()))


def _read_target(
    values: Sequence[str], name: str, task: Task | None, train: Tensor
) -> tuple[Tensor, tuple[str, ...], Task]:
    numbers = _parse_column(name, values)
    if task is None:
        looks_like_classes = (
            numbers is None
            or (bool((numbers == numbers.round()).all()) and len(numbers.unique()) <= MAX_NUMBER_CLASSES)  # type: ignore[no-untyped-call]
        )
        task = CLASSIFICATION if looks_like_classes else Regression()
    if isinstance(task, Regression):
        if numbers is None:
            text = next(value for value in values if _to_numbers([value]) is None)
            raise DataError(f"the target {name!r} holds text, such as {text!r}: a regression needs numbers.")
        known = numbers[train]
        deviation = float(known.std()) or 1.0
        return ((numbers - known.mean()) / deviation).to(torch.float32), (name,), task
    if not isinstance(task, Classification):
        raise UsageError(f"a table has one target column, for classification or regression, not for the task {task}.")
    classes = tuple(sorted(set(values)) if numbers is None else sorted(set(values), key=float))
    if numbers is None and len(classes) > max(MAX_CATEGORIES, len(values) // 2):
        raise DataError(
            f"the target {name!r} holds text with {len(classes):,} different values in {len(values):,} rows, such as "
            f"{values[0]!r}: these are no classes. Name another column."
        )
    index = {value: i for i, value in enumerate(classes)}
    return torch.tensor([index[value] for value in values]), classes, task


def _read_features(columns: dict[str, list[str]], train: Tensor) -> tuple[Tensor, tuple[float, ...], tuple[bool, ...]]:
    """The features of all rows, their deviations, and which can change."""
    features: list[Tensor] = []
    scale: list[float] = []
    mutable: list[bool] = []
    for name, values in columns.items():
        numbers = _parse_column(name, values)
        if numbers is not None:
            deviation = float(numbers[train].std())
            features.append(numbers[:, None])
            scale.append(deviation if deviation > 0 else 1.0)
            mutable.append(not _is_fixed(numbers))
            continue
        categories = sorted(set(values))
        if len(categories) > MAX_CATEGORIES:
            raise DataError(
                f"the column {name!r} holds text with {len(categories)} different values, such as {values[0]!r}: remove it "
                "if it identifies rows."
            )
        features.append(torch.tensor([[value == category for category in categories] for value in values]).double())
        scale += [1.0] * len(categories)
        mutable += [False] * len(categories)
    if not any(mutable):
        raise DataError(
            "the table has no column of numbers that can change besides the target, so that nothing could be attacked."
        )
    return torch.cat(features, 1).to(torch.float32), tuple(scale), tuple(mutable)
