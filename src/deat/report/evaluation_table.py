"""The table of every evaluation of runs that were evaluated more than once, and what the report does with each."""

from collections.abc import Iterator, Sequence
from typing import Any

from deat.report.run_results import ReportRow, RunResults
from deat.report.stats import format_attack_name
from deat.runs.schema import EVALUATION_FILES
from deat.utils.text import escape_markdown, format_eps, format_markdown_table, format_percent

EVALUATIONS_TITLE = "Every evaluation"
EVALUATIONS_NOTE = (
    "These runs were evaluated more than once. The results above are those of the strongest evaluation: first with an "
    "attack of more than one step, then with the most images, then with the strongest attack. Evaluations of the same "
    "weights, images and radius are combined with it: an image counts as correct in the worst case only if it is correct "
    "in all of them."
)
EVALUATIONS_HEADER = ("row", "seed", "file", "epoch", "images", "radius", "accuracy", "in this report")


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
