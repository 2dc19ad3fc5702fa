"""What each epoch leaves: a record that is a pure function of configuration and seed, and its clock apart."""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from deat.errors import DataError
from deat.utils.files import append_text, write_atomic
from deat.utils.text import summarize_error

T = TypeVar("T")


@dataclass(frozen=True)
class EpochStats:
    """One line of history.jsonl. epoch counts from 0, magnitude is l_X, threshold the one it was compared with.

    k and alpha are the number and the length of the adversary's steps. train_accuracy is that at x + delta;
    val_natural and val_robust are held-out images', None where there are none. level is FAT's tau and DAT's c_t.
    skipped are steps that fp16's loss scale left out; of log10_lipschitz, the paper's bound, only the trend means much.
    backprops, passes, active and the validation's passes count from the beginning of the run. val_loss is the mean
    cross-entropy on natural held-out images; older runs do not have it.
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


@dataclass(frozen=True)
class EpochTiming:
    """One line of timing.jsonl.

    other_seconds went by between the epoch before, or the beginning, and this one: what callbacks such as the watch
    took, the records and the checkpoint. warm_up_seconds are those of train_seconds in which moves were new: compiled,
    recorded, or called on a GPU for the first time; engine played them at the epoch's end. Older runs have less.
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
        """All that went by since the epoch before."""
        return self.train_seconds + self.val_seconds + self.other_seconds


@dataclass(frozen=True)
class EpochWatch:
    """One line of watch.jsonl: an epoch's accuracy on a held-out slice, against a single step and several.

    reason says why it is a collapse and action what was done; both are None for a healthy epoch.
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
        """How much more a single step leaves than several: wide where training overfitted to it."""
        return self.single - self.multi


JsonLine = EpochStats | EpochTiming | EpochWatch


def append_record(path: Path, record: JsonLine) -> None:
    """Add one line to a file of JSON lines."""
    append_text(path, _to_json_line(record))


def write_records(path: Path, records: Iterable[JsonLine]) -> None:
    """Replace a file of JSON lines, whole or not at all; a folder that is gone stays gone, as for `append`."""
    write_atomic(path, "".join(map(_to_json_line, records)).encode(), make_folder=False)


def read_history(path: Path) -> list[EpochStats]:
    """The history of a run."""
    return parse_json_lines(path, lambda held: EpochStats(**held))


def parse_json_lines(path: Path, convert: Callable[[Any], T]) -> list[T]:
    """What `make` makes of each of a file's lines; the first of another form is named."""
    found: list[T] = []
    for number, line in enumerate(read_complete_lines(path), 1):
        try:
            found.append(convert(json.loads(line)))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(
                f"line {number} of {str(path)!r} is none that deat wrote ({summarize_error(error)}). Leave that run out, or "
                "let `deat resume` write the file anew from the run's checkpoint."
            ) from None
    return found


def read_watch(path: Path) -> list[EpochWatch]:
    """What the watch saw in a run, epoch by epoch; empty where there was none."""
    return [EpochWatch(**json.loads(line)) for line in read_complete_lines(path)]


def read_complete_lines(path: Path) -> list[str]:
    """The lines of a file, none where there is no file; a torn last one is dropped."""
    return path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []


def is_valid_json_lines(path: Path) -> bool:
    """Whether every whole line of a file is a JSON object."""
    try:
        return all(isinstance(held, dict) for held in parse_json_lines(path, lambda held: held))
    except (OSError, ValueError):
        return False


def has_incomplete_last_line(path: Path) -> bool:
    """Whether a file of JSON lines ends in the middle of one."""
    try:
        data = path.read_bytes()
    except OSError:
        return False
    return bool(data) and not data.endswith(b"\n")


def _to_json_line(record: JsonLine) -> str:
    return json.dumps(asdict(record)) + "\n"
