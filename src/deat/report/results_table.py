"""The results table of a report in Markdown and CSV, and the text of its cells and notes."""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from deat.recipes.paper_numbers import PaperValue, find_paper_table, find_paper_value
from deat.report.check_paper_claims import CheckedClaim, describe_claim_setups
from deat.report.escape_latex_csv import escape_csv
from deat.report.problems import FLAGGED_MARK, collect_remarks, describe_noted_jumps
from deat.report.report_data import OTHER_SETUP_MARK, ReportData
from deat.report.row_statistics import (
    CONCURRENT_MARK,
    AccuracyCell,
    choose_ranking_attack,
    describe_coverage,
    format_attack_name,
    format_deviation,
    format_interval,
    format_mean,
    format_minutes,
    get_task,
    list_attacks,
    summarize_accuracy,
    summarize_cost,
)
from deat.report.run_results import ReportRow, RunResults
from deat.report.significance import TEST_DESCRIPTION, PairedComparison, choose_baseline, compare_rows
from deat.report.validation_results import collect_held_out_results, get_held_out_csv_fields
from deat.runs.run_report import render_score_table
from deat.tasks import CLASSIFICATION, Task, build_task
from deat.utils.text import escape_markdown, format_markdown_table

MISPRINT_MARK = "†"
"""Marks a number that the paper misprints."""
MARK_MEANINGS = {
    CONCURRENT_MARK: "minutes measured while several jobs ran at once, which say little about speed",
    MISPRINT_MARK: "a misprint of the paper: the authors' own log has the number in brackets",
    FLAGGED_MARK: "a sanity flag was raised: do not rely on these numbers",
}
CLAIM_COLUMNS = ("claim of the paper", "as stated", "by the paper's tables", "ours, backprops", "ours, seconds")


@dataclass(frozen=True, eq=False)
class ResultsTable:
    """What a results table shows.

    Attributes:
        data: The rows and their notes.
        attacks: The columns of accuracies.
        ranking_attack: The accuracy that rows are ranked by, or None.
        baseline: The row that the others are compared with; None if there is nothing to compare.
        comparisons: For each attack, each row's comparison with the baseline.
    """

    data: ReportData
    attacks: list[str]
    ranking_attack: str | None
    baseline: ReportRow | None
    comparisons: dict[str, dict[str, PairedComparison]]

    @property
    def rows(self) -> tuple[ReportRow, ...]:
        """The rows, in order."""
        return self.data.rows

    @property
    def ranking_comparisons(self) -> dict[str, PairedComparison] | None:
        """Each row's comparison with the baseline under the ranking attack; None if there is no such column."""
        return self.comparisons[self.ranking_attack] if self.baseline and self.ranking_attack else None


def build_results_table(data: ReportData, baseline_name: str | None) -> ResultsTable:
    """Choose the columns of a results table and compare its rows with a baseline.

    Args:
        data: The rows.
        baseline_name: The row to compare with. By default it is M+DEAT's, or else the most robust one.

    Returns:
        What the table shows.

    Raises:
        UsageError: There is no row of that name.
    """
    rows, attacks, ranking_attack = data.rows, list_attacks(data.rows), choose_ranking_attack(data.rows)
    baseline = data.get_row(baseline_name) if baseline_name else None
    has_tests = not all(get_task(row).is_graded for row in rows if row.finished_runs)
    if not baseline_name and has_tests and sum(bool(row.finished_runs) for row in rows) > 1:
        baseline = choose_baseline(rows, ranking_attack)
    comparisons = {attack: compare_rows(rows, baseline, attack) for attack in attacks} if baseline else {}
    return ResultsTable(data, attacks, ranking_attack, baseline, comparisons)


def render_markdown_table(results: ResultsTable) -> str:
    """Render the results table in Markdown, with its notes below."""
    header = ["row", *map(format_attack_name, results.attacks), "backprops", "minutes", "seeds"]
    header += [*format_comparison_header(results), "remarks"]
    table = format_markdown_table(header, [_format_row(results, row) for row in results.rows])
    notes = map(escape_markdown, collect_table_notes(results))
    # a line that begins with an asterisk would be a list item
    note_lines = (f"\\{note}" if note.startswith(CONCURRENT_MARK) else note for note in notes)
    return "\n".join([table, "", *(f"{line}\n" for line in note_lines)])


def render_csv_table(results: ResultsTable) -> str:
    """Render the results table in CSV: every number in full and in a column of its own, empty if there is none."""
    has_held_out = any(collect_held_out_results(results.rows))
    records = [
        _csv_record(results, row) | (get_held_out_csv_fields(row) if has_held_out else {}) for row in results.rows
    ]
    return format_csv([list(records[0]), *(list(record.values()) for record in records)])


def format_csv(rows: Iterable[Sequence[Any]]) -> str:
    """Format rows as a CSV file, in which no text is a formula for a spreadsheet."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([escape_csv(field) for field in row] for row in rows)
    return text.getvalue()


def render_claims_table(claims: Sequence[CheckedClaim]) -> str:
    """Render the paper's claims next to ours in Markdown."""
    table = format_markdown_table(CLAIM_COLUMNS, [[c.claim.text, *format_claim_cells(c)] for c in claims])
    return "\n".join([table, *(f"\n{escape_markdown(text)}" for text in describe_claim_setups(claims))]) + "\n"


def format_claim_cells(checked: CheckedClaim) -> list[str]:
    """Format what the paper says, what its tables give, and what our runs give in backprops and in seconds."""
    paper = [format_saving(checked.claim.percent), format_saving(checked.claim.percent_from_table, ".1f")]
    if checked.missing:
        return [*paper, checked.missing, "—"]
    mark = OTHER_SETUP_MARK if checked.deviations else ""
    concurrent_mark = CONCURRENT_MARK if checked.ran_concurrently else ""
    return [*paper, format_saving(checked.backprops) + mark, format_saving(checked.seconds) + concurrent_mark + mark]


def format_saving(percent: float | None, format_spec: str = ".0f") -> str:
    """Format by how many percent a row costs less, or "more" for a negative number; a dash for None."""
    if percent is None:
        return "—"
    return f"{percent:{format_spec}} %" if percent >= 0 else f"{-percent:{format_spec}} % more"


def render_scores_tables(rows: Sequence[ReportRow]) -> str:
    """Render the tables that `deat train` ended with in Markdown; empty if no run has one to show."""
    parts = [
        f"{escape_markdown(describe_scores(row, run))}\n\n{render_score_table(run.scores, read_task(run))}\n"
        for row, run in list_scored_runs(rows)
    ]
    return "\n".join(["\n## Test scores of deat train\n", *parts]) if parts else ""


def read_task(run: RunResults) -> Task:
    """The task in a run's record."""
    return build_task((run.record or {}).get("task"))


def list_scored_runs(rows: Sequence[ReportRow]) -> list[tuple[ReportRow, RunResults]]:
    """List the runs with scores of `deat train`."""
    return [(row, run) for row in rows for run in row.runs if run.scores]


def describe_scores(row: ReportRow, run: RunResults) -> str:
    """Describe the table of scores that a run of `deat train` ended with."""
    others = " Models other than the run itself were not evaluated further, so the results have no row for them."
    return (
        f"Measured by deat train at the end of {row.name}, seed {run.seed}, on the first {run.scores[0].images:,} test "
        "examples, quickly and without sanity checks: not the results of an evaluation, and nothing is ranked by them."
        f"{others if len(run.scores) > 1 else ''}"
    )


def collect_table_notes(results: ResultsTable, interval_place: str = "in brackets") -> list[str]:
    """Collect the notes that a reader of the table needs.

    Args:
        results: The table.
        interval_place: Where the table has its intervals.

    Returns:
        One sentence or more for each note.
    """
    return [
        *_describe_values(results.rows, interval_place),
        *describe_coverage(results.rows),
        *_describe_warm_up(results.rows),
        *_describe_paper_source(results.rows),
        *([TEST_DESCRIPTION.format(baseline=results.baseline.name)] if results.baseline else []),
        *_describe_marks(results),
        *describe_noted_jumps(results.rows),
        *results.data.notes,
    ]


def _describe_values(rows: Sequence[ReportRow], interval_place: str) -> list[str]:
    """What the numbers of the table are, for each task among the rows."""
    tasks = list({get_task(row).name: get_task(row) for row in rows if row.finished_runs}.values())
    texts = []
    for task in tasks or [CLASSIFICATION]:
        metric = "Accuracies are" if not task.is_graded else f"Values for {task.name} are {task.metric_names[0]}"
        unit = " in percent" if task.format_metric(0.5).endswith("%") else ""
        kind = "bootstrap over examples" if task.is_graded else "Wilson"
        texts.append(
            f"{metric}{unit}: mean ± standard deviation over seeds, and {interval_place} the 95 % interval ({kind}) for "
            f"the choice of test examples. A dash means that there is no value."
        )
        if task.is_graded:
            texts.append(
                "Rows of this task are not compared by a paired test, which needs answers that are right or wrong."
            )
    return texts


def format_comparison_header(results: ResultsTable) -> list[str]:
    """Return the header of the column of comparisons, or nothing if there is no such column."""
    if not results.baseline or not results.ranking_attack:
        return []
    return [f"vs {results.baseline.name}, {format_attack_name(results.ranking_attack)}"]


def format_difference(comparison: PairedComparison) -> str:
    """Format a difference in percentage points."""
    return f"{100 * comparison.difference:+.2f}".replace("-", "−")


def format_p_value(comparison: PairedComparison) -> str:
    """Format a p-value, with the numbers of shared seeds and images where a row has more."""
    p = "p < 0.001" if comparison.p < 0.001 else f"p = {comparison.p:.3f}"
    return f"{p}, {comparison.shared_note}" if comparison.shared_note else p


def format_backprops(row: ReportRow) -> str:
    """Format a row's backprops, also for each batch of an epoch if the paper's table counts so."""
    cost, per_batch = summarize_cost(row), row.seed_statistics("per_batch")
    if cost is None or per_batch is None:
        return "—"
    suffix = f" ({per_batch.mean:.0f} a batch)" if format_paper_cost(row, "per_batch") else ""
    return f"{cost.backprops:,.0f}{suffix}"


def format_seed_count(row: ReportRow) -> str:
    """Format how many of a row's seeds are finished."""
    return f"{len(row.finished_runs)} of {len(row.runs)}"


def format_last_epoch(results: ResultsTable, row: ReportRow, attack: str) -> str:
    """Format the last epoch's accuracy where a row's own is of its best epoch; empty in columns without any."""
    best, last = summarize_accuracy(row, attack), summarize_accuracy(row, f"last {attack}")
    if not (best or last) or not any(summarize_accuracy(other, f"last {attack}") for other in results.rows):
        return ""
    return "last epoch " + ("—" if last is None else "the same" if last == best else format_mean(last))


def format_paper_accuracy(row: ReportRow, attack: str) -> list[str]:
    """Format the paper's accuracy; nothing if the paper has none."""
    value = find_paper_value(row.table, row.paper_row, attack)
    return [_format_paper_value(value) + _setup_mark(row)] if value else []


def format_paper_cost(row: ReportRow, *names: str) -> list[str]:
    """Format the paper's cost by the first of these names that its table has; nothing if it has none."""
    units = {"minutes": (".1f", ""), "hours": (".2f", " h"), "per_batch": (".0f", " a batch")}
    for name in names:
        if value := find_paper_value(row.table, row.paper_row, name):
            format_spec, unit = units[name]
            return [f"{_format_paper_value(value, format_spec)}{unit}{_setup_mark(row)}"]
    return []


def _format_row(results: ResultsTable, row: ReportRow) -> list[str]:
    comparisons = results.ranking_comparisons
    comparison = comparisons.get(row.name) if comparisons is not None else None
    minutes = format_minutes(summarize_cost(row))
    return [
        row.name,
        *(_format_accuracy_cell(results, row, attack) for attack in results.attacks),
        _append_paper_values(format_backprops(row), format_paper_cost(row, "per_batch")),
        _append_paper_values(minutes, format_paper_cost(row, "minutes", "hours")),
        format_seed_count(row),
        *([] if comparisons is None else ["" if row is results.baseline else _format_comparison(comparison)]),
        "; ".join(collect_remarks(row)),
    ]


def _format_accuracy_cell(results: ResultsTable, row: ReportRow, attack: str) -> str:
    measured = [_format_accuracy(summarize_accuracy(row, attack)), format_last_epoch(results, row, attack)]
    return _append_paper_values("; ".join(filter(None, measured)), format_paper_accuracy(row, attack))


def _format_accuracy(cell: AccuracyCell | None) -> str:
    """Mean, standard deviation and interval."""
    if cell is None:
        return "—"
    brackets = "; ".join(filter(None, (format_interval(cell), cell.sample_note)))
    return f"{format_mean(cell)}{format_deviation(cell)} ({brackets})"


def _format_comparison(comparison: PairedComparison | None) -> str:
    """Difference and p-value."""
    return "—" if comparison is None else f"{format_difference(comparison)}, {format_p_value(comparison)}"


def _append_paper_values(ours: str, paper: Sequence[str]) -> str:
    return "; paper ".join([ours, *paper])


def _format_paper_value(value: PaperValue, format_spec: str = ".2f") -> str:
    """The printed value, with the logged one in brackets if it is a misprint."""
    logged = "" if value.logged is None else f"{MISPRINT_MARK} ({value.logged:{format_spec}})"
    return f"{value.printed:{format_spec}}{logged}"


def _setup_mark(row: ReportRow) -> str:
    return OTHER_SETUP_MARK if row.deviations else ""


def _describe_warm_up(rows: Sequence[ReportRow]) -> list[str]:
    seconds = [run.warm_up_seconds for row in rows for run in row.finished_runs if run.warm_up_seconds]
    if not seconds:
        return []
    return [f"Minutes exclude warm-up, in which moves are compiled and recorded: up to {max(seconds):.0f} s a run."]


def _describe_paper_source(rows: Sequence[ReportRow]) -> list[str]:
    tables = (find_paper_table(row.table, row.paper_row) for row in rows)
    numbers = dict.fromkeys(table.number for table in tables if table)
    return [f"The paper's numbers are from its {' and '.join(numbers)}."] if numbers else []


def _describe_marks(results: ResultsTable) -> list[str]:
    """The meaning of each mark that the table contains."""
    text = " ".join(cell for row in results.rows for cell in _format_row(results, row))
    return [f"{mark} {meaning}." for mark, meaning in MARK_MEANINGS.items() if mark in text]


def _csv_record(results: ResultsTable, row: ReportRow) -> dict[str, Any]:
    cost = summarize_cost(row)
    last_epoch_columns = dict.fromkeys(n for r in results.rows for n in r.columns if n.startswith("last "))
    record: dict[str, Any] = {"row": row.name, "method": row.method, "model": row.model}
    record |= {"seeds": " ".join(str(run.seed) for run in row.finished_runs), "runs": len(row.runs)}
    for attack in [*results.attacks, *last_epoch_columns]:
        record |= _csv_accuracy_fields(results, row, attack)
    record |= {"backprops": cost.backprops if cost else None, "minutes": cost.minutes if cost else None}
    record |= {"minutes_crowded": bool(cost and cost.ran_concurrently)}
    for name in ("minutes", "hours", "per_batch"):
        value = find_paper_value(row.table, row.paper_row, name)
        record[f"paper_{name}"] = value.printed if value else None
    return {**record, "given": "; ".join(row.deviations), "remarks": "; ".join(collect_remarks(row))}


def _csv_accuracy_fields(results: ResultsTable, row: ReportRow, attack: str) -> dict[str, Any]:
    cell, paper = summarize_accuracy(row, attack), find_paper_value(row.table, row.paper_row, attack)
    comparison = results.comparisons.get(attack, {}).get(row.name)
    fields = {
        "": cell and cell.mean,
        "sd": cell and cell.sd,
        "low": cell and cell.low,
        "high": cell and cell.high,
        "images": cell and cell.images,
        "images_each": cell and " ".join(map(str, cell.images_per_seed)),
        "paper": paper and paper.printed,
        "paper_logged": paper and paper.logged,
        "difference": comparison and comparison.difference,
        "p": comparison and comparison.p,
    }
    return {f"{attack} {name}".strip(): value for name, value in fields.items()}
