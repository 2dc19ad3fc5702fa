"""The logger `csv`: comma-separated files, without any package."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from deat.integrations.loggers.logger import LoggedRun, Logger, register_logger
from deat.utils.safe_write import append_text, write_atomic


@register_logger("csv", what="metrics.csv, batches.csv and scores.csv")
class Csv(Logger):
    """Writes metrics.csv with a row for each epoch, batches.csv, and tables.

    Args:
        folder: Where; by default the run's folder of logs.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = folder

    def start(self, run: LoggedRun) -> None:
        """Write the header, or cut the files back to where the run resumes."""
        self.path = Path(self.folder or run.folder)
        self.path.mkdir(parents=True, exist_ok=True)
        self.columns = {"epoch": ["epoch", *run.metric_names], "batch": ["batch", "batch_loss"]}
        self.last = {"epoch": run.epochs_done if run.state else 0, "batch": run.batches_done if run.state else 0}
        for axis, done in (("epoch", run.epochs_done), ("batch", run.batches_done)):
            old = _read_rows(self._file(axis)) if run.state else []
            rows = [self.columns[axis], *(row for row in old if int(row[0]) <= done)]
            if axis == "epoch" or old:
                write_atomic(self._file(axis), _format_rows(rows).encode())
        self.state = {"folder": str(self.path)}

    def log_metrics(self, metrics: Mapping[str, float], step: int, axis: Literal["epoch", "batch"] = "epoch") -> None:
        """Add a row."""
        columns, file = self.columns[axis], self._file(axis)
        if step <= self.last[axis]:  # training was rolled back
            rows = [row for row in _read_rows(file) if int(row[0]) < step]
            write_atomic(file, _format_rows([columns, *rows]).encode())
        self.last[axis] = step
        values = {columns[0]: step, **{name: _shorten(value) for name, value in metrics.items()}}
        header = "" if file.is_file() else _format_rows([columns])
        append_text(file, header + _format_rows([[values.get(name, "") for name in columns]]))

    def log_step_begin(self, name: str, value: float, step: int) -> None:
        """Write nothing: the row of the epoch has the value."""

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Write a table to a file of its name."""
        write_atomic(self.path / f"{name}.csv", _format_rows([columns, *rows]).encode())

    def _file(self, axis: str) -> Path:
        return self.path / ("metrics.csv" if axis == "epoch" else "batches.csv")


def _read_rows(file: Path) -> list[list[str]]:
    """The complete rows of a file, without its header; an interrupted write may have left half a row."""
    if not file.is_file():
        return []
    lines = file.read_text(encoding="utf-8").split("\n")[:-1]
    return [row for row in csv.reader(lines) if row and row[0].isdigit()]


def _format_rows(rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _shorten(value: float) -> float | int:
    return int(value) if value.is_integer() else value
