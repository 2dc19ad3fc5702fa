"""Tables in CSV files: numbers as they are, categories one-hot and fixed, one column as the target."""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import TextIOWrapper
from pathlib import Path
from typing import Any

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
class TableEncoding:
    """How the columns of a table became numbers, so that the rows of another one are read in the same way.

    Args:
        columns: The name of each column but the target, and its categories; None for a column of numbers.
        scale: The deviation of each feature on the training rows; 1 for categories and constants.
        mutable: Whether each feature can change; False for categories.
        classes: The classes of the target; the target's name for a regression.
        target: Mean and deviation of the targets of a regression on the training rows; None for classes.
    """

    columns: tuple[tuple[str, tuple[str, ...] | None], ...]
    scale: tuple[float, ...]
    mutable: tuple[bool, ...]
    classes: tuple[str, ...]
    target: tuple[float, float] | None = None

    @classmethod
    def from_record(cls, record: Any) -> "TableEncoding":
        """Build the encoding of a record, which has what `dataclasses.asdict` returned.

        Raises:
            KeyError, TypeError, ValueError: The record is damaged.
        """
        return cls(
            columns=tuple(
                (str(name), None if values is None else tuple(map(str, values))) for name, values in record["columns"]
            ),
            scale=tuple(map(float, record["scale"])),
            mutable=tuple(map(bool, record["mutable"])),
            classes=tuple(map(str, record["classes"])),
            target=None if record["target"] is None else (float(record["target"][0]), float(record["target"][1])),
        )


@dataclass(frozen=True)
class Table:
    """A table as tensors.

    Attributes:
        splits: The rows of "train" and "test".
        encoding: How its columns became numbers.
    """

    splits: dict[str, ImageSet]
    encoding: TableEncoding


def read_table(
    path: Path, target: str | None, task: Task | None = None, encoding: TableEncoding | None = None
) -> Table:
    """Read a table.

    Args:
        path: A CSV file with a header, of which a fifth of the rows becomes the test part; or a directory with train.csv
            and test.csv.
        target: The column to predict.
        task: Classification or regression. By default classification if the target is text or has at most 20 different
            whole numbers.
        encoding: How the columns of another table became numbers, to read this one in the same way; by default that is
            found in the table.

    Returns:
        The features, float32 of shape (N, F), with labels. The targets of a regression are in deviations from their mean
        on the training rows.

    Raises:
        DataError: A file is missing or damaged, a value is missing, or the table has other columns, categories or
            classes than the encoding.
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
    if encoding is None:
        labels, classes, kind, moments = _read_target(columns.pop(target), target, task, train)
        features, encoding = _read_features(columns, train)
        encoding = replace(encoding, classes=classes, target=moments)
    else:
        labels, kind = _read_known_target(columns.pop(target), target, encoding, task)
        features = _read_known_features(columns, encoding)
    splits = {
        split: ImageSet(features[index], labels[index], encoding.classes, kind)
        for split, index in (("train", train), ("test", test))
    }
    return Table(splits, encoding)


def _read_known_target(
    values: Sequence[str], name: str, encoding: TableEncoding, task: Task | None
) -> tuple[Tensor, Task]:
    """The target, as the table of the encoding has it."""
    if encoding.target is not None:
        return _standardize(_require_numbers(values, name), *encoding.target), task or Regression()
    index = {value: i for i, value in enumerate(encoding.classes)}
    return torch.tensor([index[_known(value, name, encoding.classes)] for value in values]), task or CLASSIFICATION


def _read_known_features(columns: dict[str, list[str]], encoding: TableEncoding) -> Tensor:
    """The features, as the table of the encoding has them, whatever the order of the columns."""
    names = [name for name, _ in encoding.columns]
    if set(names) != set(columns):
        missing, more = (", ".join(sorted(a)) or "none" for a in (set(names) - set(columns), set(columns) - set(names)))
        raise DataError(
            f"the table has other columns than the one that the network was trained on: {missing} missing, {more} added. Give "
            "a table with the same columns."
        )
    features = []
    for name, categories in encoding.columns:
        if categories is None:
            features.append(_require_numbers(columns[name], name)[:, None])
        else:
            known = [_known(value, name, categories) for value in columns[name]]
            features.append(torch.tensor([[value == category for category in categories] for value in known]).double())
    return torch.cat(features, 1).to(torch.float32)


def _known(value: str, column: str, accepted: tuple[str, ...]) -> str:
    if value not in accepted:
        shown = ", ".join(map(repr, accepted[:5])) + (", ..." if len(accepted) > 5 else "")
        raise DataError(
            f"the column {column!r} has the value {value!r}, which the table that the network was trained on has not: that has "
            f"{shown}. Remove these rows, or train on a table with all values."
        )
    return value


def _require_numbers(values: Sequence[str], column: str) -> Tensor:
    numbers = _to_numbers(values)
    if numbers is None:
        text = next(value for value in values if _to_numbers([value]) is None)
        raise DataError(
            f"the column {column!r} holds {text!r}, and numbers in the table that the network was trained on. Fill in or remove "
            "such rows."
        )
    return numbers


def _standardize(numbers: Tensor, mean: float, deviation: float) -> Tensor:
    return ((numbers - mean) / deviation).to(torch.float32)


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
) -> tuple[Tensor, tuple[str, ...], Task, tuple[float, float] | None]:
    """The labels, the classes or the target's name, the task, and a regression's mean and deviation."""
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
        mean, deviation = float(known.mean()), float(known.std()) or 1.0
        return _standardize(numbers, mean, deviation), (name,), task, (mean, deviation)
    if not isinstance(task, Classification):
        raise UsageError(f"a table has one target column, for classification or regression, not for the task {task}.")
    classes = tuple(sorted(set(values)) if numbers is None else sorted(set(values), key=float))
    if numbers is None and len(classes) > max(MAX_CATEGORIES, len(values) // 2):
        raise DataError(
            f"the target {name!r} holds text with {len(classes):,} different values in {len(values):,} rows, such as "
            f"{values[0]!r}: these are no classes. Name another column."
        )
    index = {value: i for i, value in enumerate(classes)}
    return torch.tensor([index[value] for value in values]), classes, task, None


def _read_features(columns: dict[str, list[str]], train: Tensor) -> tuple[Tensor, TableEncoding]:
    """The features of all rows, and how they are encoded."""
    features: list[Tensor] = []
    known: list[tuple[str, tuple[str, ...] | None]] = []
    scale: list[float] = []
    mutable: list[bool] = []
    for name, values in columns.items():
        numbers = _parse_column(name, values)
        if numbers is not None:
            deviation = float(numbers[train].std())
            features.append(numbers[:, None])
            known.append((name, None))
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
        known.append((name, tuple(categories)))
        scale += [1.0] * len(categories)
        mutable += [False] * len(categories)
    if not any(mutable):
        raise DataError(
            "the table has no column of numbers that can change besides the target, so that nothing could be attacked."
        )
    return torch.cat(features, 1).to(torch.float32), TableEncoding(tuple(known), tuple(scale), tuple(mutable), ())
