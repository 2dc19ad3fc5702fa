"""Results that were damaged after they were written: found, said, and made again."""

from pathlib import Path

from deat.errors import DeatError, NewerError
from deat.evaluation.evaluation import load_evaluation
from deat.live import say_aside
from deat.report.collect import BESIDE, EVALUATION, collect_run

UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What reading a file raises that does not hold what it should."""


def is_whole(path: Path) -> bool:
    """Whether a finished cell's folder still holds what it found."""
    try:
        return not damaged(path) and bool(collect_run(path).numbers)
    except NewerError:
        raise  # it is whole, and to be judged again by nobody
    except (DeatError, *UNREADABLE):
        return False


def drop_damaged(path: Path) -> None:
    """Remove evaluations that cannot be read, so that they are made again."""
    for file in damaged(path):
        say_aside(f"{path.parent.name}, {path.name}: {file.name} is damaged, so this run is judged again.")
        file.unlink()


def damaged(path: Path) -> list[Path]:
    """The evaluations in a cell's folder that are there and cannot be read."""
    held = (path / name for name in (EVALUATION, *BESIDE.values()))
    return [file for file in held if file.is_file() and not _is_evaluation(file)]


def _is_evaluation(file: Path) -> bool:
    try:
        return bool(load_evaluation(file).as_json())
    except NewerError:
        raise
    except (DeatError, *UNREADABLE):
        return False
