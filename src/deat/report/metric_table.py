"""The table of every metric of tasks that have several, such as mIoU and pixel accuracy, seed by seed."""

from collections.abc import Sequence

from deat.report.run_results import ReportRow
from deat.report.stats import format_attack_name
from deat.utils.text import format_markdown_table

METRICS_TITLE = "Every metric"
METRICS_NOTE = (
    "Each with its 95 % bootstrap interval over test examples, under each attack and for each example's worst answer."
)


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
