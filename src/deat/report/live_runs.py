"""What `deat watch` shows: the state of runs and their report, read again when a file changes. Nothing is written."""

import math
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from deat.errors import DataError, DeatError
from deat.report.html import render_template
from deat.report.report_data import ReportData, load_report_data
from deat.report.run_results import RunResults
from deat.runs.record_files import BENCH_FILE, RECORD_FILES, RUN_FILE
from deat.runs.run_dir import has_checkpoint
from deat.utils.anonymize_paths import anonymize_paths
from deat.utils.text import make_printable

SECONDS_TO_STALL = 600
"""After so long without a change, a run that is not finished is shown as perhaps stopped."""
_PATTERNS = (*sorted(RECORD_FILES), BENCH_FILE, "evaluation*.json", "ckpt-*/MANIFEST.json")


@dataclass(frozen=True)
class RunState:
    """One run in the page's table.

    Attributes:
        name: The row's name, and its seed.
        state: What it is doing, in words.
        epoch: How many epochs are finished.
        epochs: How many it is to have; None if that is not known.
        k: The number of attack steps of the last epoch.
        loss: Its training loss.
        natural: Its accuracy on held-out images.
        robust: Its accuracy on held-out images under attack.
        changed: Seconds since a file of the run changed.
    """

    name: str
    state: str
    epoch: int
    epochs: int | None
    k: int | None
    loss: float | None
    natural: float | None
    robust: float | None
    changed: float | None


class WatchedRuns:
    """The runs below some folders, and what is known of them now.

    Args:
        folders: Run folders, bench folders, and folders that contain such, now or later.

    Raises:
        DataError: If a folder does not exist.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        for folder in folders:
            if not folder.is_dir():
                raise DataError(f"there is no folder {str(folder)!r}: name folders of runs, or one that contains some.")
        self.folders = list(folders)
        self._lock = threading.Lock()
        self._version: str | None = None
        self._data: ReportData | None = None
        self._problems: list[str] = []

    def status(self) -> dict[str, object]:
        """Return the state of every run, what cannot be read, and the version of the report; None without a run."""
        data, version, problems = self._load()
        runs = [] if data is None else [asdict(state) for state in _list_states(data)]
        return {"version": version if runs else None, "runs": runs, "problems": problems}

    def data(self) -> ReportData | None:
        """Return what the report is about; None as long as there is no run."""
        return self._load()[0]

    def _load(self) -> tuple[ReportData | None, str, list[str]]:
        """Everything, read again if a file changed; a run that is being written keeps what was read before."""
        with self._lock:
            runs = [run for folder in self.folders for run in _find_runs(folder)]
            version = _hash_files(runs)
            if version != self._version:
                self._version, self._problems = version, []
                if not runs:
                    names = ", ".join(anonymize_paths(str(folder)) for folder in self.folders)
                    self._data, self._problems = None, [f"no run yet in {names}"]
                else:
                    self._data = self._read(runs) or self._data
            return self._data, version, [make_printable(text) for text in self._problems]

    def _read(self, found: list[Path]) -> ReportData | None:
        try:
            return load_report_data([str(run) for run in found])
        except (DeatError, OSError):
            pass  # one of them is damaged or half written: the others are shown
        readable = []
        for run in found:
            try:
                load_report_data([str(run)])
                readable.append(str(run))
            except (DeatError, OSError) as error:
                self._problems.append(anonymize_paths(str(error)))
        return load_report_data(readable) if readable else None


def render_watch_page(title: str, interval: float) -> str:
    """Render the page that asks for the state of runs and shows their report."""
    return render_template("watch.html.j2", title=title, interval=interval)


def _is_run(folder: Path) -> bool:
    return (folder / RUN_FILE).is_file() or (folder / BENCH_FILE).is_file() or has_checkpoint(folder)


def _find_runs(folder: Path) -> Iterator[Path]:
    """The folder itself if it is a run or a bench, or else the runs and benches in it."""
    try:
        if _is_run(folder):
            yield folder
        elif folder.is_dir():
            yield from sorted(child for child in folder.iterdir() if child.is_dir() and _is_run(child))
    except OSError:
        return


def _files_of(run: Path) -> Iterator[Path]:
    folders = [run, *(p.parent for p in sorted(run.glob(f"*/{RUN_FILE}")))] if (run / BENCH_FILE).is_file() else [run]
    for folder in folders:
        for pattern in _PATTERNS:
            yield from sorted(folder.glob(pattern))


def _hash_files(runs: Sequence[Path]) -> str:
    """A text that changes when a record of a run does."""
    digest = sha256()
    for run in runs:
        digest.update(f"{run}\n".encode(errors="surrogateescape"))
        for file in _files_of(run):
            try:
                status = file.stat()
            except OSError:
                continue
            digest.update(f"{file} {status.st_mtime_ns} {status.st_size}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]


def _list_states(data: ReportData) -> Iterator[RunState]:
    for row in data.rows:
        for run in row.runs:
            name = row.name if len(row.runs) == 1 else f"{row.name}, seed {run.seed}"
            last = run.history[-1] if run.history else None
            epochs = run.record["settings"]["epochs"] if run.record else None
            changed = _seconds_since_change(run.path)
            yield RunState(
                make_printable(name),
                _describe_state(run, changed),
                len(run.history),
                epochs if isinstance(epochs, int) else None,
                last.k if last else None,
                _finite(last.loss if last else None),
                _finite(last.val_natural if last else None),
                _finite(last.val_robust if last else None),
                changed,
            )


def _finite(value: float | None) -> float | None:
    """A number that JSON has, or None."""
    return value if value is not None and math.isfinite(value) else None


def _describe_state(run: RunResults, changed: float | None) -> str:
    if run.status == "incomplete":
        is_quiet = changed is not None and changed > SECONDS_TO_STALL
        return "not finished, and no change for long" if is_quiet else "training"
    names = {"unevaluated": "trained, not evaluated", "done": "trained and evaluated"}
    return make_printable(f"{names.get(run.status, run.status)}{f': {run.why}' if run.status == 'failed' else ''}")


def _seconds_since_change(folder: Path) -> float | None:
    times = []
    for file in _files_of(folder):
        try:
            times.append(file.stat().st_mtime)
        except OSError:
            continue
    return max(0.0, time.time() - max(times)) if times else None
