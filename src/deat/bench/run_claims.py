"""The folder of a bench: bench.json, which process runs which cell, and how each ended.

A cell is a row and a seed. The process that works on it holds its claim, a lock that is released when the process ends.
So several processes and several benches can share a folder, and a cell whose process was killed is free again.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deat.errors import CheckpointError, DeatError, NewerVersionError, UsageError
from deat.evaluation.results import load_evaluation
from deat.recipes import Recipe, RecipeRow
from deat.report.run_results import load_run_results
from deat.runs.record_files import (
    BENCH_FILE,
    EVALUATION_FILES,
    BenchRecord,
    BenchRunEntry,
    RunStatus,
    is_trained_with_code,
    new_bench_record,
    new_bench_row,
    new_bench_run,
    read_bench_record,
    runs_by_folder,
    write_bench_record,
)
from deat.utils.anonymize_paths import anonymize_paths
from deat.utils.console import print_stderr
from deat.utils.file_locks import file_lock
from deat.utils.safe_write import check_no_symlinks
from deat.utils.text import summarize_error
from deat.utils.user_code import hash_code_file, is_file_spec

PARSE_ERRORS = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""The errors of reading a file whose content is damaged."""


def has_readable_results(path: Path) -> bool:
    """Whether a finished cell's results can be read."""
    try:
        return not find_damaged_evaluations(path) and bool(load_run_results(path).metrics)
    except NewerVersionError:
        raise  # the results are complete: evaluating again would replace them
    except (DeatError, *PARSE_ERRORS):
        return False


def remove_damaged_evaluations(path: Path) -> None:
    """Remove evaluations that cannot be read, so that they are made again."""
    for file in find_damaged_evaluations(path):
        print_stderr(f"{path.parent.name}, {path.name}: {file.name} is damaged, so this run is evaluated again.")
        file.unlink()


def find_damaged_evaluations(path: Path) -> list[Path]:
    """The evaluations in a cell's folder that are there and cannot be read."""
    files = (path / name for name in EVALUATION_FILES.values())
    return [file for file in files if file.is_file() and not _is_readable_evaluation(file)]


def _is_readable_evaluation(file: Path) -> bool:
    try:
        return bool(load_evaluation(file).as_json())
    except NewerVersionError:
        raise
    except (DeatError, *PARSE_ERRORS):
        return False


def hash_row_code(row: RecipeRow) -> dict[str, str]:
    """A hash of each file that a row's method and network are in, as run.json has them."""
    specs = {"method": row.request.method, "model": row.request.model}
    return {part: hash_code_file(spec) for part, spec in specs.items() if is_file_spec(spec)}


def check_code_unchanged(row: RecipeRow, folders: Iterable[Path]) -> None:
    """Refuse a row whose finished runs were trained by another version of its files."""
    code = hash_row_code(row)
    if others := [str(folder) for folder in folders if not is_trained_with_code(folder, code)]:
        raise UsageError(
            f"the file of {row.label} was edited since {', '.join(others)} {'was' if len(others) == 1 else 'were'} "
            "trained, so its seeds would not be comparable. Remove these folders to train them again, run only the "
            "other rows, or choose another --out."
        )


MAX_ATTEMPTS = 2
"""How often a bench starts a cell whose process dies."""
PROCESS_DIED_MESSAGE = "its process died {} times, perhaps because memory ran out"


@dataclass(frozen=True)
class GridCell:
    """One run of the grid."""

    row: RecipeRow
    seed: int
    budget: int | None = None
    threads: int | None = None

    @property
    def name(self) -> str:
        """What people read."""
        return f"{self.row.label}, seed {self.seed}"

    @property
    def folder(self) -> str:
        """Its run's folder, inside the bench's."""
        return f"{slugify(self.row.label)}/seed-{self.seed}"


def make_cells(
    rows: Sequence[RecipeRow], seeds: Iterable[int], backprop_budget: int | None, threads: int | None
) -> list[GridCell]:
    """Every cell, one seed after the other, so that an unfinished table has comparable rows."""
    pairs = [(row, seed) for seed in seeds for row in rows if row.seeds is None or seed in row.seeds]
    return [GridCell(row, seed, backprop_budget, threads) for row, seed in pairs]


class BenchFolder:
    """bench.json, read and written by one process at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def exists(self) -> bool:
        """Whether there is a bench in this folder."""
        return (self.root / BENCH_FILE).is_file()

    def open(self, recipe: Recipe, cells: Sequence[GridCell], settings: dict[str, Any]) -> None:
        """Start or resume a bench: its rows and seeds are added, and failed cells may run again."""
        check_no_symlinks(self.root / name for name in (".claims", BENCH_FILE))
        with self._errors_explained():
            self._check_is_bench_folder()
        with self._exclusive_access():
            bench = self._read() if self.exists else new_bench_record(recipe.name, recipe.paper, settings)
            self._check_same_settings(bench, recipe, settings)
            for cell in cells:
                _add_cell(bench, cell)
            for row in {cell.row.label: cell.row for cell in cells}.values():
                check_code_unchanged(row, self._finished_folders(bench, row))
            for run in runs_by_folder(bench).values():
                if not self._is_done(run) and self._is_free(run):
                    _set_status(run, "waiting")
                    run["attempts"] = 0
            self._write(bench)

    def claim(self, cells: Sequence[GridCell]) -> tuple[GridCell, ExitStack] | None:
        """Return the first of these cells that is neither finished nor locked, and its lock, to be closed after work."""
        with self._exclusive_access():
            bench = self._read()
            runs = runs_by_folder(bench)
            for cell in cells:
                claim = self._try_claim(runs[cell.folder])
                if claim:
                    self._begin(runs, cell)
                    self._write(bench)
                    return cell, claim
            self._write(bench)
        return None

    def finish(self, cell: GridCell, status: RunStatus, why: str | None = None) -> None:
        """Write down how a cell ended."""
        with self._exclusive_access():
            bench = self._read()
            _set_status(runs_by_folder(bench)[cell.folder], status, anonymize_paths(why))
            self._write(bench)

    def fail_dead_cells(self, cells: Sequence[GridCell]) -> None:
        """Mark cells as failed that were started and whose process ended."""
        with self._exclusive_access():
            bench = self._read()
            for run in (runs_by_folder(bench)[cell.folder] for cell in cells):
                if run["status"] == "running" and self._is_free(run):
                    _set_status(run, "failed", PROCESS_DIED_MESSAGE.format(run["attempts"]))
            self._write(bench)

    def runs(self) -> dict[str, BenchRunEntry]:
        """What bench.json says of each run, by its folder."""
        return runs_by_folder(self._read())

    def _try_claim(self, run: BenchRunEntry) -> ExitStack | None:
        if run["status"] not in ("waiting", "running"):
            return None
        lock = self._try_lock(run)
        if lock and run["attempts"] >= MAX_ATTEMPTS:
            _set_status(run, "failed", PROCESS_DIED_MESSAGE.format(MAX_ATTEMPTS))
            lock.close()
            return None
        return lock

    def _begin(self, runs: dict[str, BenchRunEntry], cell: GridCell) -> None:
        """Mark a claimed cell as running, and write down in all running cells how many run at once."""
        entry = runs[cell.folder]
        _set_status(entry, "running")
        entry["attempts"] += 1
        others = [r for r in runs.values() if r is not entry and r["status"] == "running" and not self._is_free(r)]
        for run in (entry, *others):  # a run that is resumed alone keeps the number of its earlier epochs
            run["concurrent_jobs"] = max(run["concurrent_jobs"], 1 + len(others))

    def _finished_folders(self, bench: BenchRecord, row: RecipeRow) -> list[Path]:
        """The folders of a row's runs that count."""
        runs = [run for known in bench["rows"] if known["name"] == row.label for run in known["runs"]]
        return [self.root / run["folder"] for run in runs if self._is_done(run)]

    def _is_done(self, run: BenchRunEntry) -> bool:
        return run["status"] == "done" and has_readable_results(self.root / run["folder"])

    def _is_free(self, run: BenchRunEntry) -> bool:
        lock = self._try_lock(run)
        if lock:
            lock.close()
        return lock is not None

    def _try_lock(self, run: BenchRunEntry) -> ExitStack | None:
        """Lock a run; None if a process works on it."""
        lock = ExitStack()
        try:
            lock.enter_context(file_lock(self.root / ".claims" / run["folder"].replace("/", "--"), wait=False))
        except BlockingIOError:
            return None
        return lock

    @contextmanager
    def _exclusive_access(self) -> Iterator[None]:
        """Inside, no other process reads or writes bench.json."""
        with self._errors_explained(), file_lock(self.root / ".claims" / BENCH_FILE):
            yield

    @contextmanager
    def _errors_explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"cannot write to {str(self.root)!r}: {error.strerror or error}. Put that right and give the same "
                "command again, or choose another --out."
            ) from None

    def _read(self) -> BenchRecord:
        try:
            bench = read_bench_record(self.root)
            if not all(isinstance(run["attempts"], int) for run in runs_by_folder(bench).values()):
                raise TypeError("attempts")
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"{str(self.root / BENCH_FILE)!r} is not a bench's record ({summarize_error(error)}). Choose another --out."
            ) from None
        return bench

    def _write(self, bench: BenchRecord) -> None:
        write_bench_record(self.root, bench)

    def _check_is_bench_folder(self) -> None:
        """Refuse a folder that holds something else."""
        if (
            self.root.exists()
            and not (self.root / BENCH_FILE).is_file()
            and any(p.name != ".claims" for p in self.root.iterdir())
        ):
            raise UsageError(f"{str(self.root)!r} exists and is no bench. Choose another --out.")

    def _check_same_settings(self, bench: BenchRecord, recipe: Recipe, settings: dict[str, Any]) -> None:
        if bench["recipe"] == recipe.name and bench["settings"] == settings:
            return
        raise UsageError(
            f"{str(self.root)!r} holds a bench of {bench['recipe']} with settings {json.dumps(bench['settings'])}; "
            f"this is {recipe.name} with {json.dumps(settings)}. Choose another --out."
        )


def slugify(text: str) -> str:
    """A label as a folder's name."""
    return "".join(c if c.isalnum() or c in "+%._" else "-" for c in text)[:100]


def _add_cell(bench: BenchRecord, cell: GridCell) -> None:
    new = new_bench_row(cell.row.label, cell.row.request, asdict(cell.row.evaluation), cell.row.paper_row)
    row = next((row for row in bench["rows"] if row["name"] == new["name"]), None)
    if row is None:
        bench["rows"].append(row := new)
    if (row["method"], row["model"]) != (new["method"], new["model"]):
        raise UsageError(f"two rows would be called {row['name']!r}; give one of the methods another name.")
    if not any(run["folder"] == cell.folder for run in row["runs"]):
        row["runs"].append(new_bench_run(cell.seed, cell.folder))


def _set_status(run: BenchRunEntry, status: RunStatus, why: str | None = None) -> None:
    run["status"], run["why"] = status, why
