"""A folder of `deat bench` read back: rows of runs, and the mean and standard deviation of each over its seeds."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, TypeVar

from deat.errors import DataError, DeatError
from deat.evaluation.results import Evaluation, load_evaluation
from deat.runs.schema import (
    BENCH_FILE,
    EVALUATION_FILE,
    EXTRA_EVALUATION_FILES,
    HISTORY_FILE,
    RUN_FILE,
    SCORES_FILE,
    TIMING_FILE,
    BenchRowEntry,
    check_run_format,
    read_bench_record,
    read_run_json,
)
from deat.runs.scores import ModelScore, read_scores
from deat.training.records import EpochStats, EpochWatch, parse_json_lines, read_history
from deat.utils.text import summarize_error

T = TypeVar("T")
COST_COLUMNS = ("backprops", "per_batch", "minutes")


@dataclass(frozen=True)
class SeedStatistics:
    """A number over seeds; sd is None for a single one."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return fmean(self.values)

    @property
    def sd(self) -> float | None:
        """The standard deviation over seeds, of a sample."""
        return stdev(self.values) if len(self.values) > 1 else None

    @property
    def percent(self) -> str:
        """A share in percent, with its deviation where there is one."""
        return f"{100 * self.mean:.2f}" + ("" if self.sd is None else f" ± {100 * self.sd:.2f}")


@dataclass(frozen=True, eq=False)
class RunResults:
    """One run of a row: how it ended, and what its folder holds. Parts that are not there yet are None or empty.

    watch is read for reports alone: nothing that a bench does depends on it.
    """

    seed: int
    path: Path
    status: str = "done"
    why: str | None = None
    concurrent_jobs: int = 1
    record: dict[str, Any] | None = None
    history: list[EpochStats] = field(default_factory=list)
    seconds: float = 0.0
    warm_up: float = 0.0
    evaluation: Evaluation | None = None
    extra_evaluations: dict[str, Evaluation] = field(default_factory=dict)
    scores: list[ModelScore] = field(default_factory=list)
    watch: tuple[EpochWatch, ...] = ()

    @cached_property  # counted from thousands of verdicts
    def numbers(self) -> dict[str, float]:
        """Accuracies by attack ("last pgd-20": of the last epoch), "worst", and the cost; none unless it is done.

        Where AutoAttack was run apart there is no "worst": without the strongest attack it would mislead.
        """
        if self.status != "done" or not self.evaluation or not self.history:
            return {}
        found = {**self.evaluation.accuracy, **self._last(self.evaluation)}
        if self.apart:
            told = {name: share for name, share in found.items() if not name.endswith("worst")}
            found = {**told, "aa": self.extra_evaluations["aa"].accuracy["aa"]}
        return {**found, **self._cost_columns()}

    @property
    def apart(self) -> bool:
        """Whether AutoAttack has an evaluation of its own, on as many images as the rest or fewer."""
        main, held = self.evaluation, self.extra_evaluations.get("aa")
        return main is not None and held is not None and "aa" in held.accuracy and "aa" not in main.accuracy

    @property
    def images(self) -> dict[str, int]:
        """How many test images stand behind each accuracy."""
        held = {"": self.evaluation, "last ": self.extra_evaluations.get("last")}
        found = {f"{key}{name}": len(e.labels) for key, e in held.items() if e for name in e.accuracy}
        return found | ({"aa": len(self.extra_evaluations["aa"].labels)} if self.apart else {})

    def _last(self, main: Evaluation) -> dict[str, float]:
        """The last epoch's accuracies; "worst" only where it is over the same attacks and images as the main one."""
        held = self.extra_evaluations.get("last")
        if held is None:
            return {}
        same = held.labels == main.labels and held.verdicts.keys() == main.verdicts.keys()
        return {f"last {name}": value for name, value in held.accuracy.items() if same or name != "worst"}

    def _cost_columns(self) -> dict[str, float]:
        batch = self.record["settings"]["batch_size"] if self.record else 1
        batches = math.ceil(self.history[-1].examples / batch)
        spent = self.history[-1].backprops
        return {"backprops": spent, "per_batch": spent / batches, "minutes": self.seconds / 60}


@dataclass(frozen=True, eq=False)
class ReportRow:
    """One row of a table: its runs, one a seed. table and paper_row say where in the paper it is, if anywhere.

    differs is what it was given in place of its recipe's own, budget how many backprops it might spend, if bounded.
    """

    name: str
    method: str
    model: str
    runs: tuple[RunResults, ...]
    table: str | None = None
    paper_row: str | None = None
    differs: tuple[str, ...] = ()
    budget: int | None = None

    @property
    def done(self) -> list[RunResults]:
        """The runs that were trained and evaluated."""
        return [run for run in self.runs if run.numbers]

    @property
    def columns(self) -> list[str]:
        """The names of the numbers that its finished runs have."""
        return list(dict.fromkeys(name for run in self.done for name in run.numbers))

    def seed_statistics(self, column: str) -> SeedStatistics | None:
        """A number over the row's finished seeds; None where no run has it."""
        values = tuple(run.numbers[column] for run in self.done if column in run.numbers)
        return SeedStatistics(values) if values else None

    @property
    def crowded(self) -> bool:
        """Whether all of its times were taken while other jobs ran, so that they say little."""
        return bool(self.done) and all(run.concurrent_jobs > 1 for run in self.done)

    @property
    def minutes(self) -> float | None:
        """The mean over seeds, over those that ran alone where some did; None where no clock was kept."""
        clocks = [run for run in self.done if run.seconds > 0 and (self.crowded or run.concurrent_jobs == 1)]
        return sum(run.seconds for run in clocks) / len(clocks) / 60 if clocks else None

    @property
    def why(self) -> str | None:
        """What went wrong, for the seeds that failed."""
        failed = [f"seed {run.seed}: {run.why}" for run in self.runs if run.status == "failed"]
        return "; ".join(failed) or None


@dataclass(frozen=True, eq=False)
class BenchResults:
    """A whole folder of `deat bench`."""

    path: Path
    recipe: str
    table: str | None
    settings: dict[str, Any]
    rows: tuple[ReportRow, ...]

    @property
    def columns(self) -> list[str]:
        """The names of all numbers, accuracies before the cost."""
        return collect_columns(self.rows)


def collect_columns(rows: Sequence[ReportRow]) -> list[str]:
    """The names of the rows' numbers, in the order in which they come, accuracies before the cost."""
    names = list(dict.fromkeys(name for row in rows for name in row.columns))
    return [n for n in names if n not in COST_COLUMNS] + [n for n in COST_COLUMNS if n in names]


def load_bench(folder: str | Path) -> BenchResults:
    """Read a folder that `deat bench` wrote, finished or not."""
    path = Path(folder)
    try:
        bench = _read_json(read_bench_record, path, BENCH_FILE)
        rows = tuple(_load_row(path, row) for row in bench["rows"])
        return BenchResults(path, bench["recipe"], bench["paper"]["table"], bench["settings"], rows)
    except (KeyError, TypeError) as error:
        raise DataError(
            f"{str(path / BENCH_FILE)!r} is not what deat bench writes ({summarize_error(error)}). Leave it out."
        ) from None


def load_run_results(folder: str | Path, seed: int | None = None, **bench_fields: Any) -> RunResults:
    """Read one run's folder; `about` is what bench.json says of it."""
    try:
        return _load_run_results(Path(folder), seed, bench_fields)
    except DeatError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{str(folder)!r} holds records that deat did not write ({summarize_error(error)}). Leave it out."
        ) from None


def _load_run_results(path: Path, seed: int | None, bench_fields: dict[str, Any]) -> RunResults:
    record, own_seed = None, 0
    if (path / RUN_FILE).is_file():
        record = _read_json(read_run_json, path, RUN_FILE)
        check_run_format(record)
        own_seed = int(record["settings"]["seed"])
    main = load_evaluation(path / EVALUATION_FILE) if (path / EVALUATION_FILE).is_file() else None
    seconds, warm_up = _read_train_seconds(path / TIMING_FILE)
    beside = {
        key: load_evaluation(path / name) for key, name in EXTRA_EVALUATION_FILES.items() if (path / name).is_file()
    }
    return RunResults(
        own_seed if seed is None else seed,
        path,
        record=record,
        history=read_history(path / HISTORY_FILE),
        seconds=seconds,
        warm_up=warm_up,
        evaluation=main,
        extra_evaluations=beside,
        scores=read_scores(path / SCORES_FILE) if (path / SCORES_FILE).is_file() else [],
        **bench_fields,
    )


def _load_row(path: Path, row: BenchRowEntry) -> ReportRow:
    runs = tuple(
        load_run_results(
            path / run["folder"],
            run["seed"],
            status=run["status"],
            why=run["why"],
            concurrent_jobs=run["concurrent_jobs"],
        )
        for run in row["runs"]
    )
    paper = row.get("paper") or {}
    return ReportRow(row["name"], row["method"], row["model"], runs, paper.get("table"), paper.get("row"))


def _read_train_seconds(path: Path) -> tuple[float, float]:
    """The clock of training alone, and of the warm-up that is not in it, which older runs did not keep apart."""
    clocks = parse_json_lines(
        path, lambda line: (float(line["train_seconds"]), float(line.get("warm_up_seconds", 0.0)))
    )
    warm_up = sum((warm for _, warm in clocks), 0.0)
    return sum((seconds for seconds, _ in clocks), 0.0) - warm_up, warm_up


def _read_json(read: Callable[[Path], T], folder: Path, name: str) -> T:
    try:
        return read(folder)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"cannot read {str(folder / name)!r} ({error}). Give a folder that deat wrote.") from None
