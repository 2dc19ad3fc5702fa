"""Validation results of runs that were not evaluated on test images.

They have a table of their own: no column of the results contains them, and nothing is ranked by them.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deat.evaluation.evaluator import DEFAULT_ATTACKS
from deat.evaluation.results import WORST_ONLY
from deat.report.problems import UNEVALUATED
from deat.report.row_statistics import RowCost, format_attack_name, format_minutes, get_task
from deat.report.run_results import ReportRow, RunResults, SeedStatistics
from deat.runs.record_files import RUN_FILE, WEIGHTS_FILE
from deat.tasks import CLASSIFICATION, Task
from deat.training.epoch_records import EpochStats
from deat.training.messages import format_command
from deat.utils.anonymize_paths import anonymize_paths
from deat.utils.safetensors_files import read_note
from deat.utils.text import capitalize_sentence, format_markdown_table, make_printable

HELD_OUT_TITLE = "On held-out examples"
HELD_OUT_NOTE = (
    "{metrics} at the best epoch, on the validation examples by which that epoch was chosen: held out of the training "
    "examples, or from val/. These are not test results, and nothing is ranked by them."
)
EVALUATE_COMMANDS_INTRO = "These commands evaluate the remaining runs on test examples, which fills their columns:"
CSV_FIELDS = ("natural", "robust", "attack", "images", "best_epochs", "seeds")
"""A row's validation results in CSV; each name begins with held_out_."""


@dataclass(frozen=True)
class HeldOutResult:
    """A row's validation results, over those of its seeds that have no test results.

    Attributes:
        row: The row's name.
        row_index: The row's index in the table.
        seeds: The seeds.
        natural: Natural accuracy at each seed's best epoch.
        robust: Accuracy under `attack` at each seed's best epoch.
        attack: The attack that validation used.
        images: The number of validation images.
        best_epochs: The best epochs, from 1.
        total_epochs: The number of epochs that were requested.
        cost: What training cost.
        task: The task, whose first metric `natural` and `robust` are.
    """

    row: str
    row_index: int
    seeds: tuple[int, ...]
    natural: SeedStatistics
    robust: SeedStatistics
    attack: str
    images: int
    best_epochs: tuple[int, ...]
    total_epochs: int
    cost: RowCost
    task: Task = CLASSIFICATION

    @classmethod
    def from_runs(
        cls, row: ReportRow, row_index: int, runs: Sequence[tuple[RunResults, EpochStats]]
    ) -> "HeldOutResult":
        """Summarise runs of a row, each with its best epoch."""
        record, n = runs[0][0].record or {}, len(runs)
        backprops = sum(run.history[-1].backprops for run, _ in runs) / n
        minutes = sum(run.train_seconds for run, _ in runs) / n / 60
        return cls(
            row.name,
            row_index,
            tuple(run.seed for run, _ in runs),
            SeedStatistics(tuple(float(best.val_natural or 0) for _, best in runs)),
            SeedStatistics(tuple(float(best.val_robust or 0) for _, best in runs)),
            str(record["settings"].get("val_attack")),
            int(record["data"].get("held_out") or 0),
            tuple(best.epoch + 1 for _, best in runs),
            int(record["settings"]["epochs"]),
            RowCost(backprops, minutes or None, any(run.concurrent_jobs > 1 for run, _ in runs)),
            get_task(row),
        )

    def as_json(self) -> dict[str, Any]:
        """Return the results as `deat report --json` prints them."""
        return {
            "natural": {"mean": self.natural.mean, "sd": self.natural.sd},
            "robust": {"mean": self.robust.mean, "sd": self.robust.sd},
            "attack": self.attack,
            "images": self.images,
            "best_epochs": self.best_epochs,
            "epochs": self.total_epochs,
            "seeds": self.seeds,
            "cost": self.cost.as_json(),
        }


def collect_held_out_results(rows: Sequence[ReportRow]) -> list[HeldOutResult]:
    """Collect the validation results of rows that have runs without test results.

    Args:
        rows: The rows of a report.

    Returns:
        One result for each row with such runs. Runs that failed or were not validated are left out.
    """
    results = []
    for row_index, row in enumerate(rows):
        unevaluated = [run for run in row.runs if not run.metrics and run.status != "failed" and run.record]
        validated = [
            (run, best) for run in unevaluated if (best := _read_best_epoch(run)) and _has_finite_accuracy(best)
        ]
        if validated:
            results.append(HeldOutResult.from_runs(row, row_index, validated))
    return results


def get_held_out_csv_fields(row: ReportRow) -> dict[str, Any]:
    """Return a row's validation results as CSV fields by column; None in each if it has none."""
    result = next(iter(collect_held_out_results([row])), None)
    values: tuple[Any, ...] = (None,) * len(CSV_FIELDS)
    if result:
        best_epochs, seeds = (" ".join(map(str, numbers)) for numbers in (result.best_epochs, result.seeds))
        values = (result.natural.mean, result.robust.mean, result.attack, result.images, best_epochs, seeds)
    return {f"held_out_{name}": value for name, value in zip(CSV_FIELDS, values, strict=True)}


def get_held_out_header(results: Sequence[HeldOutResult]) -> list[str]:
    """Return the columns of a table of validation results."""
    attacks = {format_attack_name(result.attack) for result in results}
    attack = attacks.pop() if len(attacks) == 1 else "under attack"
    return ["row", "held-out natural", f"held-out {attack}", "best epoch", "examples", "backprops", "minutes", "seeds"]


def format_held_out_cells(result: HeldOutResult, results: Sequence[HeldOutResult]) -> list[str]:
    """Format a row's validation results for the columns after its name.

    Args:
        result: The row's results.
        results: All rows' results. If their attacks differ, each cell names its own.

    Returns:
        One text for each column.
    """
    attack = f" ({format_attack_name(result.attack)})" if len({other.attack for other in results}) > 1 else ""
    return [
        _format_metric(result.natural, result.task),
        _format_metric(result.robust, result.task) + attack,
        f"{', '.join(map(str, result.best_epochs))} of {result.total_epochs}",
        f"{result.images:,}",
        f"{result.cost.backprops:,.0f}",
        format_minutes(result.cost),
        ", ".join(map(str, result.seeds)),
    ]


def render_held_out_markdown(rows: Sequence[ReportRow]) -> str:
    """Render the validation results in Markdown, with the commands that evaluate these runs; empty if none need it."""
    results, commands = collect_held_out_results(rows), list_evaluate_commands(rows)
    parts = []
    if results:
        table_rows = [[result.row, *format_held_out_cells(result, results)] for result in results]
        table = format_markdown_table(get_held_out_header(results), table_rows)
        parts += [f"## {HELD_OUT_TITLE}", describe_held_out(results), table]
    if commands:
        parts += [EVALUATE_COMMANDS_INTRO, "\n".join(["```", *map(make_printable, commands), "```"])]
    return "".join(f"\n{part}\n" for part in parts)


def describe_held_out(results: Sequence[HeldOutResult]) -> str:
    """Say what the numbers of a table of validation results are."""
    tasks = {result.task.name: result.task for result in results}.values()
    metrics = dict.fromkeys(
        task.metric_names[0] + (" in percent" if _is_share(task) else "") for task in tasks or (CLASSIFICATION,)
    )
    text = ", ".join(metrics)
    return HELD_OUT_NOTE.format(metrics=capitalize_sentence(text))


def _is_share(task: Task) -> bool:
    """Whether a task's first metric is a share, which is shown in percent."""
    return task.format_metric(0.5).endswith("%")


def _format_metric(values: SeedStatistics, task: Task) -> str:
    """The mean over seeds, with the standard deviation if there is one: in percent for a share."""
    if _is_share(task):
        return values.percent_text
    return f"{values.mean:.3f}" + ("" if values.sd is None else f" ± {values.sd:.3f}")


def list_evaluate_commands(rows: Sequence[ReportRow]) -> list[str]:
    """List the commands that evaluate the unevaluated runs in the same way as the other rows."""
    flags = _evaluate_flags(rows)
    runs = [run for row in rows for run in row.runs if run.status == UNEVALUATED]
    return [
        anonymize_paths(format_command("evaluate", run.path, run.record["request"]) + flags)
        for run in runs
        if run.record and (run.path / RUN_FILE).is_file()  # a folder of checkpoints is evaluated in Python
    ]


def _read_best_epoch(run: RunResults) -> EpochStats | None:
    """The epoch whose weights a run saved as its best, which the file of these weights names."""
    try:
        number = json.loads(read_note(run.path / "best" / WEIGHTS_FILE) or "")["epoch"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return next((stats for stats in run.history if stats.epoch + 1 == number), None)


def _has_finite_accuracy(stats: EpochStats) -> bool:
    """Whether an epoch was validated with finite results."""
    return all(share is not None and math.isfinite(share) for share in (stats.val_natural, stats.val_robust))


def _evaluate_flags(rows: Sequence[ReportRow]) -> str:
    """The flags that the first evaluated run was evaluated with, where they are not the defaults."""
    evaluation = next((run.evaluation for row in rows for run in row.finished_runs if run.evaluation), None)
    if evaluation is None:
        return ""
    worst_only = evaluation.settings.get(WORST_ONLY, ())
    names = tuple(result.name for result in evaluation.results if result.name not in worst_only)
    attacks = "" if names == DEFAULT_ATTACKS else f" --attacks {','.join(names)}"
    return attacks + (f" --n {evaluation.num_images}" if evaluation.settings["sample"] else "")
