"""The tables below a report's results: each ball of a union, every metric of a task, every evaluation of a run."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from deat.report.row_statistics import (
    format_attack_name,
    format_deviation,
    format_interval,
    format_mean,
    list_attacks,
    summarize_accuracy,
)
from deat.report.run_results import ReportRow, RunResults
from deat.runs.record_files import EVALUATION_FILES
from deat.threat import format_threat
from deat.utils.text import escape_markdown, format_eps, format_markdown_table, format_percent

BALLS_TITLE = "Each ball of the union"
BALLS_NOTE = (
    "The results above count an image as correct only if it is correct in every ball of the union. These are the accuracies "
    "in each ball alone, from the same attacks."
)


METRICS_TITLE = "Every metric"
METRICS_NOTE = (
    "Each with its 95 % bootstrap interval over test examples, under each attack and for each example's worst answer."
)
EVALUATIONS_TITLE = "Every evaluation"
EVALUATIONS_NOTE = (
    "These runs were evaluated more than once. The results above are those of the strongest evaluation on a run's own data "
    "and radius: first with an attack of more than one step, then with the most examples, then with the strongest attack. "
    "Evaluations of the same weights, examples and radius are combined with it: an example counts as correct in the worst "
    "case only if it is correct in all of them."
)
EVALUATIONS_HEADER = ("row", "seed", "file", "epoch", "examples", "radius", "accuracy", "in this report")


def list_ball_attacks(rows: Sequence[ReportRow]) -> list[str]:
    """List the attacks that the table has columns for; empty if no row was evaluated against a union."""
    return list_attacks([only for row in rows for _, only in split_balls(row)])


def list_ball_rows(rows: Sequence[ReportRow]) -> list[tuple[int, list[str]]]:
    """List each row's accuracies in each ball, with the index of the row."""
    attacks = list_ball_attacks(rows)
    return [
        (index, [row.name, ball, *(_format_cell(only, attack) for attack in attacks)])
        for index, row in enumerate(rows)
        for ball, only in split_balls(row)
    ]


def format_ball_header(rows: Sequence[ReportRow]) -> list[str]:
    """Return the table's header."""
    return ["row", "ball", *map(format_attack_name, list_ball_attacks(rows))]


def render_balls_markdown(rows: Sequence[ReportRow]) -> str:
    """Render the table in Markdown; empty if no row was evaluated against a union."""
    cells = [cells for _, cells in list_ball_rows(rows)]
    if not cells:
        return ""
    table = format_markdown_table(format_ball_header(rows), cells)
    return f"\n## {BALLS_TITLE}\n\n{escape_markdown(BALLS_NOTE)}\n\n{table}\n"


def split_balls(row: ReportRow) -> Iterator[tuple[str, ReportRow]]:
    """Yield each ball that all of a row's runs were evaluated in, and the row as it is in that ball alone."""
    evaluations = [run.evaluation for run in row.finished_runs if run.evaluation]
    for name in evaluations[0].balls if evaluations else ():
        if all(name in evaluation.balls for evaluation in evaluations):
            runs = tuple(
                replace(run, evaluation=run.evaluation.balls[name], extra_evaluations={})
                for run in row.finished_runs
                if run.evaluation
            )
            yield format_threat(evaluations[0].balls[name].settings["threat"]), replace(row, runs=runs)


def _format_cell(row: ReportRow, attack: str) -> str:
    cell = summarize_accuracy(row, attack)
    return "—" if cell is None else f"{format_mean(cell)}{format_deviation(cell)} ({format_interval(cell)})"


def list_metric_columns(rows: Sequence[ReportRow]) -> list[str]:
    """List the metrics of the rows' tasks; empty if no task has more than one."""
    tasks = [run.evaluation.task for row in rows for run in row.finished_runs if run.evaluation]
    return list(dict.fromkeys(name for task in tasks if task.is_graded for name in task.metric_names))


def list_metric_rows(rows: Sequence[ReportRow]) -> list[tuple[int, list[str]]]:
    """List the metrics of every run of a task with several, one row for each attack, with the index of the row."""
    columns = list_metric_columns(rows)
    body = []
    for index, row in enumerate(rows):
        for run in row.finished_runs:
            if run.evaluation is None or not run.evaluation.task.is_graded:
                continue
            for attack in run.evaluation.accuracy:
                metrics, intervals = run.evaluation.metrics[attack], run.evaluation.metric_intervals[attack]
                cells = [
                    f"{metrics[name]:.4f} ({intervals[name][0]:.3f} to {intervals[name][1]:.3f})"
                    if name in metrics
                    else "—"
                    for name in columns
                ]
                body.append((index, [row.name, str(run.seed), format_attack_name(attack), *cells]))
    return body


def render_metrics_markdown(rows: Sequence[ReportRow]) -> str:
    """Render the table in Markdown; empty if no task has several metrics."""
    body = [cells for _, cells in list_metric_rows(rows)]
    if not body:
        return ""
    table = format_markdown_table(["row", "seed", "attack", *list_metric_columns(rows)], body)
    return f"\n## {METRICS_TITLE}\n\n{METRICS_NOTE}\n\n{table}\n"


def list_evaluation_rows(rows: Sequence[ReportRow]) -> list[tuple[int, list[str]]]:
    """List every evaluation of the runs that have more than `deat bench` makes, with the index of their row."""
    return [
        (index, [row.name, str(run.seed), *cells])
        for index, row in enumerate(rows)
        for run in row.runs
        if any(one.file not in EVALUATION_FILES.values() for one in run.stored_evaluations)
        for cells in _format_evaluations(run)
    ]


def render_evaluations_markdown(rows: Sequence[ReportRow]) -> str:
    """Render the table in Markdown; empty if no run was evaluated more than once."""
    cells = [cells for _, cells in list_evaluation_rows(rows)]
    if not cells:
        return ""
    table = format_markdown_table(EVALUATIONS_HEADER, cells)
    return f"\n## {EVALUATIONS_TITLE}\n\n{escape_markdown(EVALUATIONS_NOTE)}\n\n{table}\n"


def describe_evaluations(run: RunResults) -> list[dict[str, Any]]:
    """Describe every evaluation of a run as `deat report --json` prints it."""
    return [
        {
            "file": one.file,
            "images": one.evaluation.num_images,
            "threat": one.evaluation.settings.get("threat"),
            "epoch": _read_about(one.evaluation, "epoch"),
            "accuracy": one.evaluation.accuracy,
            "flags": [flag.name for flag in one.evaluation.flags],
            "use": one.use,
        }
        for one in run.stored_evaluations
    ]


def _format_evaluations(run: RunResults) -> Iterator[list[str]]:
    for one in run.stored_evaluations:
        evaluation = one.evaluation
        threat = evaluation.settings.get("threat") or {}
        is_share = not evaluation.task.is_graded
        shares = [
            f"{format_attack_name(name)} {format_percent(value) if is_share else f'{value:.4g}'}"
            for name, value in evaluation.accuracy.items()
        ]
        flags = [f"⚑ {flag.name}" for flag in evaluation.flags]
        yield [
            one.file,
            str(_read_about(evaluation, "epoch") or "—"),
            f"{evaluation.num_images:,}",
            " + ".join(map(_format_radius, threat.get("threats", [threat]))),
            ", ".join([*shares, *flags]),
            one.use,
        ]


def _format_radius(threat: dict[str, Any]) -> str:
    eps = threat.get("eps")
    return f"{threat.get('norm')} {format_eps(eps)}" if isinstance(eps, int | float) else str(threat.get("norm"))


def _read_about(evaluation: Any, key: str) -> Any:
    about = evaluation.settings.get("about")
    return about.get(key) if isinstance(about, dict) else None
