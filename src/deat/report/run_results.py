"""Reads the folders of `deat train` and `deat bench`: one run, or a bench's rows of runs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, TypeVar

from deat.errors import DataError, DeatError
from deat.evaluation.results import Evaluation
from deat.report.choose_evaluations import StoredEvaluation, choose_evaluations, load_stored_evaluations
from deat.runs.final_scores import ModelScore, read_scores
from deat.runs.record_files import (
    BENCH_FILE,
    HISTORY_FILE,
    RUN_FILE,
    SCORES_FILE,
    TIMING_FILE,
    BenchRowEntry,
    check_run_format,
    read_bench_record,
    read_run_json,
)
from deat.training.epoch_records import EpochStats, EpochWatch, parse_json_lines, read_history
from deat.utils.text import format_percent, summarize_error

T = TypeVar("T")
COST_COLUMNS = ("backprops", "per_batch", "minutes")


@dataclass(frozen=True)
class SeedStatistics:
    """One number's values over seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return fmean(self.values)

    @property
    def sd(self) -> float | None:
        """The sample standard deviation over seeds; None for a single seed."""
        return stdev(self.values) if len(self.values) > 1 else None

    @property
    def percent_text(self) -> str:
        """The mean in percent, with the standard deviation if there is one."""
        return format_percent(self.mean) + ("" if self.sd is None else f" ± {format_percent(self.sd)}")


@dataclass(frozen=True, eq=False)
class RunResults:
    """What the folder of one run contains. Parts that do not exist yet are None or empty.

    Attributes:
        seed: The run's seed.
        path: Its folder.
        status: waiting, running, done or failed, as in bench.json; a report adds incomplete and unevaluated.
        why: Why the run is not complete, or why it failed.
        concurrent_jobs: How many jobs ran on the machine at once.
        record: run.json.
        history: One entry for each finished epoch.
        train_seconds: Training time, without warm-up.
        warm_up_seconds: Time in which moves were compiled and recorded.
        evaluation: The strongest evaluation, with all others of the same weights, images and radius in its worst case.
        extra_evaluations: Those shown beside it: "last" for the last epoch, "aa" for AutoAttack on fewer images.
        stored_evaluations: Every evaluation in the folder, and what the report does with it.
        scores: The table that `deat train` ended with.
        watch: What the overfit watch logged. Only reports read it.
    """

    seed: int
    path: Path
    status: str = "done"
    why: str | None = None
    concurrent_jobs: int = 1
    record: dict[str, Any] | None = None
    history: list[EpochStats] = field(default_factory=list)
    train_seconds: float = 0.0
    warm_up_seconds: float = 0.0
    evaluation: Evaluation | None = None
    extra_evaluations: dict[str, Evaluation] = field(default_factory=dict)
    stored_evaluations: tuple[StoredEvaluation, ...] = ()
    scores: list[ModelScore] = field(default_factory=list)
    watch: tuple[EpochWatch, ...] = ()

    @cached_property  # counted from thousands of verdicts
    def metrics(self) -> dict[str, float]:
        """Accuracies by attack ("last pgd-20" is the last epoch's), "worst", and the cost; empty unless done.

        There is no "worst" if AutoAttack was run separately: without the strongest attack it would mislead.
        """
        if self.status != "done" or not self.evaluation or not self.history:
            return {}
        accuracies = {**self.evaluation.accuracy, **self._last_epoch_accuracy(self.evaluation)}
        if self.has_separate_autoattack:
            accuracies = {name: share for name, share in accuracies.items() if not name.endswith("worst")}
            accuracies["aa"] = self.extra_evaluations["aa"].accuracy["aa"]
        return {**accuracies, **self._cost_columns()}

    @property
    def has_separate_autoattack(self) -> bool:
        """Whether only an extra evaluation, maybe on fewer images, has AutoAttack's accuracy."""
        main, extra = self.evaluation, self.extra_evaluations.get("aa")
        return main is not None and extra is not None and "aa" in extra.accuracy and "aa" not in main.accuracy

    @property
    def images_by_attack(self) -> dict[str, int]:
        """The number of test images that each accuracy was computed on."""
        evaluations = {"": self.evaluation, "last ": self.extra_evaluations.get("last")}
        counts = {f"{prefix}{name}": e.num_images for prefix, e in evaluations.items() if e for name in e.accuracy}
        return counts | ({"aa": self.extra_evaluations["aa"].num_images} if self.has_separate_autoattack else {})

    def _last_epoch_accuracy(self, main: Evaluation) -> dict[str, float]:
        """The last epoch's accuracies; "worst" only if it is over the main evaluation's attacks and images."""
        last = self.extra_evaluations.get("last")
        if last is None:
            return {}
        is_comparable = last.labels == main.labels and last.verdicts.keys() == main.verdicts.keys()
        return {f"last {name}": value for name, value in last.accuracy.items() if is_comparable or name != "worst"}

    def _cost_columns(self) -> dict[str, float]:
        batch_size = self.record["settings"]["batch_size"] if self.record else 1
        batches = max(1, math.ceil(self.history[-1].examples / max(1, batch_size)))
        backprops = self.history[-1].backprops
        return {"backprops": backprops, "per_batch": backprops / batches, "minutes": self.train_seconds / 60}


@dataclass(frozen=True, eq=False)
class ReportRow:
    """One row of a table: runs that differ in their seed alone.

    Attributes:
        name: The row's name in tables.
        method: The method's name.
        model: The network's name.
        runs: One run for each seed.
        table: The label of the paper's table that has this row, if one has.
        paper_row: The row's name in that table.
        deviations: Settings that differ from the recipe's.
        budget: The most backprops that a run could spend, if that was limited.
    """

    name: str
    method: str
    model: str
    runs: tuple[RunResults, ...]
    table: str | None = None
    paper_row: str | None = None
    deviations: tuple[str, ...] = ()
    budget: int | None = None

    @property
    def finished_runs(self) -> list[RunResults]:
        """The runs that were trained and evaluated."""
        return [run for run in self.runs if run.metrics]

    @property
    def columns(self) -> list[str]:
        """The names of the metrics that its finished runs have."""
        return list(dict.fromkeys(name for run in self.finished_runs for name in run.metrics))

    def seed_statistics(self, column: str) -> SeedStatistics | None:
        """Return a metric over the row's finished seeds; None if no run has it."""
        values = tuple(run.metrics[column] for run in self.finished_runs if column in run.metrics)
        return SeedStatistics(values) if values else None

    @property
    def ran_concurrently(self) -> bool:
        """Whether all of its times were measured while other jobs ran, so that they say little about speed."""
        return bool(self.finished_runs) and all(run.concurrent_jobs > 1 for run in self.finished_runs)

    @property
    def minutes(self) -> float | None:
        """The mean training time over seeds; over those that ran alone if some did. None if no time was logged."""
        timed = [
            run
            for run in self.finished_runs
            if run.train_seconds > 0 and (self.ran_concurrently or run.concurrent_jobs == 1)
        ]
        return sum(run.train_seconds for run in timed) / len(timed) / 60 if timed else None

    @property
    def failure_summary(self) -> str | None:
        """Why seeds failed; None if none did."""
        return "; ".join(f"seed {run.seed}: {run.why}" for run in self.runs if run.status == "failed") or None


@dataclass(frozen=True, eq=False)
class BenchResults:
    """A folder of `deat bench`: its recipe, that recipe's table in the paper, its settings and its rows."""

    path: Path
    recipe: str
    table: str | None
    settings: dict[str, Any]
    rows: tuple[ReportRow, ...]

    @property
    def columns(self) -> list[str]:
        """The names of all metrics, accuracies before costs."""
        return collect_columns(self.rows)


def collect_columns(rows: Sequence[ReportRow]) -> list[str]:
    """Return the names of the rows' metrics in the order of their appearance, accuracies before costs."""
    names = list(dict.fromkeys(name for row in rows for name in row.columns))
    return [n for n in names if n not in COST_COLUMNS] + [n for n in COST_COLUMNS if n in names]


def load_bench(folder: str | Path) -> BenchResults:
    """Read a folder that `deat bench` wrote; the bench need not be finished.

    Args:
        folder: The folder with bench.json.

    Returns:
        The bench's rows, each with the results of its runs.

    Raises:
        DataError: A file is missing, or deat did not write it.
    """
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
    """Read the folder of one run.

    Args:
        folder: The run's folder. Files that are missing leave their part of the result empty.
        seed: The run's seed; by default it is read from run.json.
        **bench_fields: What bench.json says about the run: status, why and concurrent_jobs.

    Returns:
        The run's results.

    Raises:
        DataError: A file was not written by deat.
    """
    try:
        return _load_run_results(Path(folder), seed, bench_fields)
    except DeatError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{str(folder)!r} holds records that deat did not write ({summarize_error(error)}). Leave it out."
        ) from None


def _load_run_results(path: Path, seed: int | None, bench_fields: dict[str, Any]) -> RunResults:
    record, recorded_seed = None, 0
    if (path / RUN_FILE).is_file():
        record = _read_json(read_run_json, path, RUN_FILE)
        check_run_format(record)
        recorded_seed = int(record["settings"]["seed"])
    evaluations = choose_evaluations(load_stored_evaluations(path), record)
    train_seconds, warm_up_seconds = _read_train_seconds(path / TIMING_FILE)
    return RunResults(
        recorded_seed if seed is None else seed,
        path,
        record=record,
        history=read_history(path / HISTORY_FILE),
        train_seconds=train_seconds,
        warm_up_seconds=warm_up_seconds,
        evaluation=evaluations.main,
        extra_evaluations=evaluations.extra,
        stored_evaluations=evaluations.stored,
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
    """Return training time without warm-up, and warm-up time, which older runs did not log."""
    timings = parse_json_lines(
        path, lambda line: (float(line["train_seconds"]), float(line.get("warm_up_seconds", 0.0)))
    )
    if not all(math.isfinite(seconds) for timing in timings for seconds in timing):
        raise ValueError(f"{path.name} has a time that is not finite")
    warm_up = sum((warm_up for _, warm_up in timings), 0.0)
    return sum((seconds for seconds, _ in timings), 0.0) - warm_up, warm_up


def _read_json(read: Callable[[Path], T], folder: Path, name: str) -> T:
    try:
        return read(folder)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"cannot read {str(folder / name)!r} ({error}). Give a folder that deat wrote.") from None
