"""The folder of a bench: bench.json, which cell is whose, and what became of it.

A cell is a row and a seed. Whoever works on it holds its claim, a lock that dies with its process; so several
processes and several benches can share a folder, and a cell whose process was killed is free again.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deat.errors import CheckpointError, DeatError, NewerVersionError, UsageError, summarize_error
from deat.evaluation.results import load_evaluation
from deat.recipes import Recipe, RecipeRow
from deat.report.load import BENCH_FILE, EVALUATION_FILE, EXTRA_EVALUATION_FILES, check_bench_format, load_run
from deat.runs.run_dir import RUN_FILE
from deat.utils.files import check_no_symlinks, write_json
from deat.utils.locks import CellLock, exclusive_lock
from deat.utils.paths import anonymize_paths
from deat.utils.terminal import print_stderr
from deat.utils.user_code import hash_code_file, is_file_spec

PARSE_ERRORS = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What reading a file raises that does not hold what it should."""


def has_readable_results(path: Path) -> bool:
    """Whether a finished cell's folder still holds what it found."""
    try:
        return not find_damaged_evaluations(path) and bool(load_run(path).numbers)
    except NewerVersionError:
        raise  # it is whole, and to be judged again by nobody
    except (DeatError, *PARSE_ERRORS):
        return False


def remove_damaged_evaluations(path: Path) -> None:
    """Remove evaluations that cannot be read, so that they are made again."""
    for file in find_damaged_evaluations(path):
        print_stderr(f"{path.parent.name}, {path.name}: {file.name} is damaged, so this run is judged again.")
        file.unlink()


def find_damaged_evaluations(path: Path) -> list[Path]:
    """The evaluations in a cell's folder that are there and cannot be read."""
    held = (path / name for name in (EVALUATION_FILE, *EXTRA_EVALUATION_FILES.values()))
    return [file for file in held if file.is_file() and not _is_readable_evaluation(file)]


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


def is_trained_with_code(code: dict[str, str], folder: Path) -> bool:
    """Whether a run was trained by this version of the files, as far as its record says."""
    try:
        held: Any = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
        return bool(held.get("code", code) == code)
    except (OSError, ValueError, AttributeError, RecursionError):
        return True  # what cannot be read is found out elsewhere


def check_code_unchanged(row: RecipeRow, folders: Iterable[Path]) -> None:
    """Refuse to go on with a row whose finished runs were trained by another version of its files."""
    code = hash_row_code(row)
    if others := [str(folder) for folder in folders if not is_trained_with_code(code, folder)]:
        raise UsageError(
            f"the file of {row.label} was edited since {', '.join(others)} {'was' if len(others) == 1 else 'were'} "
            "trained, so its seeds would not be of one kind. Remove what is named to have it trained anew, ask for "
            "the other rows alone, or choose another --out."
        )


MAX_ATTEMPTS = 2
"""How often a cell is begun in one bench whose processes die of it."""
PROCESS_DIED_MESSAGE = "its process died {} times, perhaps for want of memory"


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


class Grid:
    """bench.json, read and written by one process at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def exists(self) -> bool:
        """Whether a bench was begun here."""
        return (self.root / BENCH_FILE).is_file()

    def open(self, recipe: Recipe, cells: Sequence[GridCell], settings: dict[str, Any]) -> None:
        """Begin a bench or go on with it: its rows and seeds are added, and what failed may try again."""
        check_no_symlinks(self.root / name for name in (".claims", BENCH_FILE))
        with self._errors_explained():
            self._check_is_bench_folder()
        with self._alone():
            held = self._read() if self.exists else _new_bench_record(recipe, settings)
            self._check_same_settings(held, recipe, settings)
            for cell in cells:
                _add_cell(held, cell)
            for row in {cell.row.label: cell.row for cell in cells}.values():
                check_code_unchanged(row, self._finished_folders(held, row))
            for run in _runs_by_folder(held).values():
                if not self._is_done(run) and self._is_free(run):
                    run.update(status="waiting", why=None, attempts=0)
            self._write(held)

    def claim(self, cells: Sequence[GridCell]) -> tuple[GridCell, CellLock] | None:
        """The first of these cells that is neither finished nor somebody else's, and the claim on it."""
        with self._alone():
            held = self._read()
            runs = _runs_by_folder(held)
            for cell in cells:
                claim = self._try_claim(runs[cell.folder])
                if claim:
                    self._begin(runs, cell)
                    self._write(held)
                    return cell, claim
            self._write(held)
        return None

    def finish(self, cell: GridCell, status: str, why: str | None = None) -> None:
        """Write down how a cell ended."""
        with self._alone():
            held = self._read()
            _runs_by_folder(held)[cell.folder].update(status=status, why=anonymize_paths(why))
            self._write(held)

    def fail_dead_cells(self, cells: Sequence[GridCell]) -> None:
        """Call the cells failed that were begun and whose process is gone."""
        with self._alone():
            held = self._read()
            for run in (_runs_by_folder(held)[cell.folder] for cell in cells):
                if run["status"] == "running" and self._is_free(run):
                    run.update(status="failed", why=PROCESS_DIED_MESSAGE.format(run["attempts"]))
            self._write(held)

    def runs(self) -> dict[str, dict[str, Any]]:
        """What bench.json says of each run, by its folder."""
        return _runs_by_folder(self._read())

    def _try_claim(self, run: dict[str, Any]) -> CellLock | None:
        if run["status"] not in ("waiting", "running"):
            return None
        claim = CellLock.take(self._lock_path(run["folder"]))
        if claim and run["attempts"] >= MAX_ATTEMPTS:
            run.update(status="failed", why=PROCESS_DIED_MESSAGE.format(MAX_ATTEMPTS))
            claim.drop()
            return None
        return claim

    def _begin(self, runs: dict[str, dict[str, Any]], cell: GridCell) -> None:
        """Mark a claimed cell as running, and all that run now as crowded if it is not alone."""
        mine = runs[cell.folder]
        mine.update(status="running", why=None, attempts=mine["attempts"] + 1)
        others = [r for r in runs.values() if r is not mine and r["status"] == "running" and not self._is_free(r)]
        for run in (mine, *others):  # a run that is taken up alone has its crowded epochs still
            run["concurrent_jobs"] = max(run["concurrent_jobs"], 1 + len(others))

    def _finished_folders(self, record: dict[str, Any], row: RecipeRow) -> list[Path]:
        """The folders of a row's runs that count."""
        runs = [run for known in record["rows"] if known["name"] == row.label for run in known["runs"]]
        return [self.root / run["folder"] for run in runs if self._is_done(run)]

    def _is_done(self, run: dict[str, Any]) -> bool:
        return run["status"] == "done" and has_readable_results(self.root / run["folder"])

    def _is_free(self, run: dict[str, Any]) -> bool:
        claim = CellLock.take(self._lock_path(run["folder"]))
        if claim:
            claim.drop()
        return claim is not None

    def _lock_path(self, folder: str) -> Path:
        return self.root / ".claims" / folder.replace("/", "--")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Inside, nobody else reads or writes bench.json."""
        with self._errors_explained(), exclusive_lock(self.root / ".claims" / BENCH_FILE):
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

    def _read(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.root / BENCH_FILE).read_text(encoding="utf-8"))
            check_bench_format(found)
            if not all(isinstance(run["attempts"], int) for run in _runs_by_folder(found).values()):
                raise TypeError("attempts")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{str(self.root / BENCH_FILE)!r} is not a bench's record ({summarize_error(error)}). Choose another --out."
            ) from None
        return found

    def _write(self, record: dict[str, Any]) -> None:
        write_json(self.root / BENCH_FILE, record)

    def _check_is_bench_folder(self) -> None:
        """Refuse a folder that holds something else."""
        if (
            self.root.exists()
            and not (self.root / BENCH_FILE).is_file()
            and any(p.name != ".claims" for p in self.root.iterdir())
        ):
            raise UsageError(f"{str(self.root)!r} exists and is no bench. Choose another --out.")

    def _check_same_settings(self, record: dict[str, Any], recipe: Recipe, settings: dict[str, Any]) -> None:
        if record["recipe"] == recipe.name and record["settings"] == settings:
            return
        raise UsageError(
            f"{str(self.root)!r} holds a bench of {record['recipe']} with settings {json.dumps(record['settings'])}; "
            f"this is {recipe.name} with {json.dumps(settings)}. Choose another --out."
        )


def slugify(text: str) -> str:
    """A label as a folder's name."""
    return "".join(c if c.isalnum() or c in "+%._" else "-" for c in text)[:100]


def _new_bench_record(recipe: Recipe, settings: dict[str, Any]) -> dict[str, Any]:
    return {"recipe": recipe.name, "paper": {"table": recipe.paper}, "settings": settings, "rows": []}


def _add_cell(record: dict[str, Any], cell: GridCell) -> None:
    row = next((r for r in record["rows"] if r["name"] == cell.row.label), None)
    if row is None:
        row = _new_row(cell.row)
        record["rows"].append(row)
    if (row["method"], row["model"]) != (
        anonymize_paths(cell.row.request.method),
        anonymize_paths(cell.row.request.model),
    ):
        raise UsageError(f"two rows would be called {row['name']!r}; give one of the methods another name.")
    if not any(run["folder"] == cell.folder for run in row["runs"]):
        about = {"seed": cell.seed, "folder": cell.folder, "status": "waiting", "why": None}
        row["runs"].append({**about, "concurrent_jobs": 1, "attempts": 0})


def _new_row(row: RecipeRow) -> dict[str, Any]:
    table, name = row.paper_row or (None, None)
    return {
        "name": row.label,
        "method": anonymize_paths(row.request.method),
        "model": anonymize_paths(row.request.model),
        "paper": {"table": table, "row": name} if table else None,
        "judging": asdict(row.evaluation),
        "runs": [],
    }


def _runs_by_folder(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {run["folder"]: run for row in record["rows"] for run in row["runs"]}
