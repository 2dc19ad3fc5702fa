"""Records of epochs, and the JSON lines files that hold them. Timing is separate, since it is not reproducible."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from deat.checkpoint.encoding import build_dataclass
from deat.errors import DataError
from deat.utils.safe_read import open_plain_file
from deat.utils.safe_write import append_text, write_atomic
from deat.utils.text import summarize_error

T = TypeVar("T")
MAX_COUNT = 2**63
"""A count in a record is smaller; a damaged one may have any number of digits."""
TrainingImages = Literal["clean", "under attack", "random start"]
"""What an epoch's training accuracy was computed on: a method may change it from epoch to epoch."""


@dataclass(frozen=True)
class EpochStats:
    """The statistics of one epoch: a line of history.jsonl.

    Attributes:
        epoch: The epoch, from 0.
        k: The number of the adversary's steps.
        alpha: The length of a step.
        level: The level of the schedule: FAT's tau or DAT's c_t.
        magnitude: l_X.
        threshold: What l_X was compared with; None without a threshold.
        loss: The mean training loss.
        train_accuracy: Accuracy on the images that were trained on, whatever they are.
        val_natural: Accuracy on held-out images; None without validation.
        val_robust: Accuracy on held-out images under attack; None without validation.
        log10_lipschitz: log10 of the paper's bound on the Lipschitz constant; only its trend is meaningful.
        lr: The learning rate of the last batch.
        examples: The number of training images.
        skipped: Steps that were skipped by loss scaling in fp16.
        active: Images attacked since the start of the run.
        backprops: Backprops since the start of the run.
        passes: Forward and backward passes since the start of the run.
        val_passes: Passes of validation since the start of the run.
        val_loss: Mean cross-entropy on natural held-out images; None in older runs.
        best_epoch: The best epoch so far, from 0; None in older runs.
        val_p: The p-value of the comparison under attack, image by image, with the most robust epoch before this one;
            None without one, and in older runs.
        train_natural: Accuracy on clean training images; None in epochs that train under attack or from a random start,
            and in older runs.
        train_robust: Accuracy on training images under attack; None in epochs without an attack, and in older runs.
        ema_natural: Accuracy of the averaged weights on held-out images; None without an average.
        ema_robust: Their accuracy on held-out images under attack; None without an average.
        measured: The means of the method's measurements, by name; None for a method without any.
    """

    epoch: int
    k: int
    alpha: float
    level: float
    magnitude: float
    threshold: float | None
    loss: float
    train_accuracy: float
    val_natural: float | None
    val_robust: float | None
    log10_lipschitz: float
    lr: float
    examples: int
    skipped: int
    active: int
    backprops: int
    passes: int
    val_passes: int
    val_loss: float | None = None
    best_epoch: int | None = None
    val_p: float | None = None
    train_natural: float | None = None
    train_robust: float | None = None
    ema_natural: float | None = None
    ema_robust: float | None = None
    measured: dict[str, float] | None = None


def get_training_images(k: int, method: Mapping[str, Any] | None) -> TrainingImages:
    """Return what images an epoch trained on, which its training accuracy is about.

    Args:
        k: The number of the adversary's steps in the epoch.
        method: The method as records describe it, if it is known.

    Returns:
        "under attack" if the adversary had steps. Without steps it is "random start" under the rule sets that keep the
        start, else "clean".
    """
    if k:
        return "under attack"
    attack = (method or {}).get("ascent") or {}
    return "random start" if attack.get("noisy") and attack.get("start") != "zero" else "clean"


def separate_training_accuracy(stats: EpochStats, method: Mapping[str, Any]) -> EpochStats:
    """Return statistics with the training accuracy under the name of what it was computed on.

    Args:
        stats: The statistics, also those of an older run, which have only `train_accuracy`.
        method: The method as records describe it.
    """
    images = get_training_images(stats.k, method)
    return replace(
        stats,
        train_natural=stats.train_accuracy if images == "clean" else None,
        train_robust=stats.train_accuracy if images == "under attack" else None,
    )


@dataclass(frozen=True)
class EpochTiming:
    """The duration of one epoch: a line of timing.jsonl. Older runs lack the last three.

    Attributes:
        epoch: The epoch, from 0.
        train_seconds: The time of training.
        val_seconds: The time of validation.
        images_per_second: Training images per second of training.
        other_seconds: The time between the previous epoch and this one: callbacks, records and checkpoints.
        warm_up_seconds: The part of train_seconds in which moves were compiled, recorded or first run on a GPU.
        engine: The engine at the end of the epoch.
    """

    epoch: int
    train_seconds: float
    val_seconds: float
    images_per_second: float
    other_seconds: float = 0.0
    warm_up_seconds: float = 0.0
    engine: str = ""

    @property
    def seconds(self) -> float:
        """The time since the end of the previous epoch."""
        return self.train_seconds + self.val_seconds + self.other_seconds


@dataclass(frozen=True)
class EpochWatch:
    """The scores of one epoch by the overfitting watch: a line of watch.jsonl.

    Attributes:
        epoch: The epoch, from 0.
        k: The number of the adversary's steps.
        alpha: The length of a step.
        single: Accuracy of held-out images against a single step.
        multi: Accuracy of held-out images against several steps.
        magnitude: l_X.
        reason: Why the epoch is a collapse or a suspicion; None for a healthy one.
        action: What was done; None for a healthy epoch.
    """

    epoch: int
    k: int
    alpha: float
    single: float
    multi: float
    magnitude: float
    reason: str | None = None
    action: str | None = None

    @property
    def gap(self) -> float:
        """Single-step minus multi-step accuracy; large after overfitting to a single step."""
        return self.single - self.multi


JsonLine = EpochStats | EpochTiming | EpochWatch


def append_record(path: Path, record: JsonLine) -> None:
    """Append a record to a JSON lines file."""
    append_text(path, _to_json_line(record))


def write_records(path: Path, records: Iterable[JsonLine]) -> None:
    """Replace a JSON lines file atomically; its folder must exist, as for `append_record`."""
    write_atomic(path, "".join(map(_to_json_line, records)).encode(), make_folder=False)


def read_history(path: Path) -> list[EpochStats]:
    """Read a run's history.jsonl.

    Args:
        path: The file.

    Returns:
        The statistics of each epoch; empty if there is no file.

    Raises:
        DataError: A line is not valid.
    """
    return parse_json_lines(path, partial(build_record, EpochStats))


def parse_json_lines(path: Path, convert: Callable[[Any], T]) -> list[T]:
    """Parse a JSON lines file.

    Args:
        path: The file; an incomplete last line is ignored.
        convert: Makes a value of each line's JSON.

    Returns:
        The values; empty if there is no file.

    Raises:
        DataError: A line is not valid.
    """
    values: list[T] = []
    for number, line in enumerate(read_complete_lines(path), 1):
        try:
            values.append(convert(json.loads(line)))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise DataError(
                f"line {number} of {str(path)!r} is not valid ({summarize_error(error)}). Leave that run out, or let "
                "`deat resume` rewrite the file from the run's checkpoint."
            ) from None
    return values


def read_watch(path: Path) -> list[EpochWatch]:
    """Read a run's watch.jsonl; empty if there is none."""
    return [build_record(EpochWatch, json.loads(line)) for line in read_complete_lines(path)]


def build_record(kind: type[T], fields: dict[str, Any]) -> T:
    """Make a record of a line's JSON after checking that its values are of the right types, and counts in range.

    Args:
        kind: The class of the record.
        fields: Its fields by name.

    Raises:
        TypeError: A field is of another type, or is unknown or missing.
        ValueError: A number is too large, or a count is negative.
    """
    if not isinstance(fields, dict):
        raise TypeError(f"{str(fields)[:30]!r} is no record")
    record = build_dataclass(kind, fields)
    for name, value in fields.items():
        if isinstance(value, int) and not 0 <= value < MAX_COUNT:
            raise ValueError(f"{name} is {str(value)[:30]}")
    return record


def read_complete_lines(path: Path) -> list[str]:
    """Return the complete lines of a file, without an unfinished last one; empty if there is no file."""
    return path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []


def is_valid_json_lines(path: Path) -> bool:
    """Return whether every complete line of a file is a JSON object."""
    try:
        return all(isinstance(value, dict) for value in parse_json_lines(path, lambda value: value))
    except (OSError, ValueError):
        return False


def has_incomplete_last_line(path: Path) -> bool:
    """Return whether a file ends with an unfinished line."""
    try:
        with open_plain_file(path) as file:
            data = file.read()
    except OSError:
        return False
    return bool(data) and not data.endswith(b"\n")


def _to_json_line(record: JsonLine) -> str:
    return json.dumps(asdict(record)) + "\n"
