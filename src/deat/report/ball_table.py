"""The table of each ball of a union: rows that were evaluated against several balls at once, ball by ball."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from deat.report.run_results import ReportRow
from deat.report.stats import (
    format_attack_name,
    format_deviation,
    format_interval,
    format_mean,
    list_attacks,
    summarize_accuracy,
)
from deat.threat import format_threat
from deat.utils.text import escape_markdown, format_markdown_table

BALLS_TITLE = "Each ball of the union"
BALLS_NOTE = (
    "The results above count an image as correct only if it is correct in every ball of the union. These are the accuracies "
    "in each ball alone, from the same attacks."
)


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
