"""The table of a report as Markdown and CSV, and its numbers as people read them."""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from deat.recipes.paper_tables import PaperValue, find_paper_table, find_paper_value
from deat.report.escape import escape_csv
from deat.report.grouping import OTHER_SETUP_MARK, ReportData, collect_flags, list_run_problems, list_unchecked_seeds
from deat.report.held_out import collect_held_out_results, get_held_out_csv_fields
from deat.report.load import ReportRow, RunResults
from deat.report.paper_claims import CheckedClaim, describe_claim_setups
from deat.report.significance import TEST_DESCRIPTION, PairedComparison, choose_baseline, compare_rows
from deat.report.stats import (
    AccuracyCell,
    RowCost,
    choose_ranking_attack,
    describe_coverage,
    format_attack_name,
    list_attacks,
    summarize_accuracy,
    summarize_cost,
)
from deat.runs.summary import render_score_table
from deat.training.overfit_watch import NOTE_ACTION, classify_collapse
from deat.training.records import EpochWatch
from deat.utils.text import escape_markdown

WATCH_ACTION_TEXTS = {"warn": "warned, and went on", "stop": "stopped", "rollback": "rolled back, and went on"}
NOTED_LEAP_TEXT = "The overfit watch noted a leap of l_X that the accuracies do not bear out, and did nothing"


def list_watch_alarms(row: ReportRow, short: bool = False) -> list[str]:
    """Each collapse of a row's runs: its seed, its epoch, what was done and, unless short, what was seen."""
    return [
        f"seed {run.seed}: {_format_alarm(event)}{'' if short else f': {event.reason}'}"
        for run in row.runs
        for event in run.watch
        if event.reason and event.action != NOTE_ACTION
    ]


def describe_noted_leaps(rows: Sequence[ReportRow]) -> list[str]:
    """The leaps of l_X that were only noted, all in one line."""
    found = [
        f"{row.name} seed {run.seed} in epoch{'' if len(epochs) == 1 else 's'} {', '.join(map(str, epochs))}"
        for row in rows
        for run in row.runs
        if (epochs := [event.epoch + 1 for event in run.watch if event.action == NOTE_ACTION])
    ]
    return [f"{NOTED_LEAP_TEXT}: {'; '.join(found)}."] if found else []


def _format_alarm(event: EpochWatch) -> str:
    return f"{classify_collapse(event)} in epoch {event.epoch + 1} ({WATCH_ACTION_TEXTS.get(str(event.action), event.action)})"


CROWDED_MARK, MISPRINT_MARK, FLAGGED_MARK = "*", "†", "⚑"
MARK_MEANINGS = {
    CROWDED_MARK: "minutes taken while several jobs ran at once, which says little about speed",
    MISPRINT_MARK: "a misprint of the paper: the authors' own log says the number in brackets",
    FLAGGED_MARK: "a sanity flag was raised: not to be believed as it stands",
}
CLAIM_COLUMNS = ("the paper says", "paper", "its own tables", "ours, backprops", "ours, seconds")
"""The columns of the table of claims."""
ACCURACY_NOTE = (
    "Accuracies are in percent: mean ± standard deviation over seeds{rest}. A dash is a number that is not there."
)
INTERVAL_NOTE = ", and {where} the 95 % interval (Wilson) that the choice of test images leaves"


@dataclass(frozen=True, eq=False)
class ResultsTable:
    """A table's content: its rows, their attacks, and how each row stands against a chosen one."""

    data: ReportData
    attacks: list[str]
    ranking_attack: str | None
    against: ReportRow | None
    comparisons: dict[str, dict[str, PairedComparison]]

    @property
    def rows(self) -> tuple[ReportRow, ...]:
        """The rows, in order."""
        return self.data.rows


def build_results_table(data: ReportData, baseline_name: str | None) -> ResultsTable:
    """What a table of these rows says. Without a choice, rows stand against M+DEAT's, or else the most robust one."""
    attacks, rows, ranked = list_attacks(data.rows), data.rows, choose_ranking_attack(data.rows)
    several = sum(bool(row.done) for row in rows) > 1
    chosen = data.row(baseline_name) if baseline_name else choose_baseline(rows, ranked) if several else None
    versus = {attack: compare_rows(rows, chosen, attack) for attack in attacks} if chosen else {}
    return ResultsTable(data, attacks, ranked, chosen, versus)


def render_markdown_table(results: ResultsTable) -> str:
    """The table in Markdown, with its notes."""
    head = [escape_markdown(text) for text in _table_header(results)]
    body = [[escape_markdown(part) for part in _format_row(results, row)] for row in results.rows]
    lines = [" | ".join(["", *cells, ""]).strip() for cells in (head, ["---"] + ["---:"] * (len(head) - 1), *body)]
    told = (
        f"\\{note}" if note.startswith(CROWDED_MARK) else note
        for note in map(escape_markdown, collect_table_notes(results))
    )  # no item of a list
    return "\n".join([*lines, "", *(f"{note}\n" for note in told)])


def render_csv_table(results: ResultsTable) -> str:
    """Every number of the table in full, one column each; a number that is not there is an empty field."""
    apart = any(collect_held_out_results(results.rows))
    records = [_csv_record(results, row) | (get_held_out_csv_fields(row) if apart else {}) for row in results.rows]
    return format_csv([list(records[0]), *(list(record.values()) for record in records)])


def format_csv(rows: Iterable[Sequence[Any]]) -> str:
    """Rows as a CSV file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([escape_csv(field) for field in row] for row in rows)
    return text.getvalue()


def render_claims_table(claims: Sequence[CheckedClaim]) -> str:
    """The paper's claims beside ours, in Markdown."""
    lines = [f"| {' | '.join(CLAIM_COLUMNS)} |", "|---|---:|---:|---:|---:|"]
    for c in claims:
        cells = [c.claim.text, *format_claim_cells(c)]
        lines.append(f"| {' | '.join(escape_markdown(text) for text in cells)} |")
    return "\n".join([*lines, *(f"\n{escape_markdown(text)}" for text in describe_claim_setups(claims))]) + "\n"


def format_claim_cells(checked: CheckedClaim) -> list[str]:
    """What the paper says and what its tables give, and ours in backprops and on the clock, for people."""
    paper = [format_saving(checked.claim.percent), format_saving(checked.claim.percent_from_table, ".1f")]
    if checked.missing:
        return [*paper, checked.missing, "—"]
    mark = OTHER_SETUP_MARK if checked.differs else ""
    return [
        *paper,
        format_saving(checked.backprops) + mark,
        format_saving(checked.seconds) + (CROWDED_MARK if checked.crowded else "") + mark,
    ]


def list_scored_runs(rows: Sequence[ReportRow]) -> list[tuple[ReportRow, RunResults]]:
    """The runs whose training scored what no evaluation did: others beside it, such as natural training, or itself."""
    return [(row, run) for row in rows for run in row.runs if len(run.scores) > (1 if run.evaluation else 0)]


def describe_scores(row: ReportRow, run: RunResults) -> str:
    """What the table of such a run is."""
    beside = " A model beside the run itself was not evaluated further, so it has no row among the results."
    return (
        f"What deat train showed at the end of {row.name}, seed {run.seed}: accuracy on {run.scores[0].images:,} test "
        f"images, without sanity checks.{beside if len(run.scores) > 1 else ''}"
    )


def render_scores_tables(rows: Sequence[ReportRow]) -> str:
    """The tables that runs ended with, in Markdown; empty where there is none."""
    parts = [
        f"{escape_markdown(describe_scores(row, run))}\n\n{render_score_table(run.scores)}\n"
        for row, run in list_scored_runs(rows)
    ]
    return "\n".join(["\n## At the end of training\n", *parts]) if parts else ""


def format_saving(value: float | None, format_spec: str = ".0f") -> str:
    """A percentage less, for people."""
    return "—" if value is None else f"{value:{format_spec}} %" if value >= 0 else f"{-value:{format_spec}} % more"


def format_accuracy(cell: AccuracyCell | None) -> str:
    """An accuracy for people: mean, standard deviation and interval."""
    if cell is None:
        return "—"
    return (
        f"{format_mean(cell)}{format_deviation(cell)} ({'; '.join(filter(None, (format_interval(cell), cell.behind)))})"
    )


def format_mean(cell: AccuracyCell) -> str:
    """A mean in percent, for people."""
    return f"{100 * cell.mean:.2f}"


def format_deviation(cell: AccuracyCell) -> str:
    """The deviation over seeds as it stands behind a mean; empty for a single seed."""
    return "" if cell.sd is None else f" ± {100 * cell.sd:.2f}"


def format_interval(cell: AccuracyCell) -> str:
    """An interval in percent, for people."""
    return f"{100 * cell.low:.1f} to {100 * cell.high:.1f}"


def format_paper_value(value: PaperValue, format_spec: str = ".2f") -> str:
    """The paper's value, with the logged one where it is a misprint."""
    logged = "" if value.logged is None else f"{MISPRINT_MARK} ({value.logged:{format_spec}})"
    return f"{value.printed:{format_spec}}{logged}"


def format_minutes(cost: RowCost | None) -> str:
    """Minutes for people, marked where several jobs ran at once."""
    if cost is None or cost.minutes is None:
        return "—"
    shown = f"{cost.minutes:.1f}" if cost.minutes >= 10 else f"{cost.minutes:#.2g}"
    return shown + (CROWDED_MARK if cost.crowded else "")


def format_comparison(comparison: PairedComparison | None) -> str:
    """A difference in points and its p-value, for people."""
    return "—" if comparison is None else f"{format_difference(comparison)}, {format_p_value(comparison)}"


def format_difference(comparison: PairedComparison) -> str:
    """A difference in points, for people."""
    return f"{100 * comparison.difference:+.2f}".replace("-", "−")


def format_p_value(comparison: PairedComparison) -> str:
    """A p-value, for people, and of how many seeds and images it is, where its rows have others."""
    shown = "p < 0.001" if comparison.p < 0.001 else f"p = {comparison.p:.3f}"
    return f"{shown}, {comparison.shared}" if comparison.shared else shown


def collect_table_notes(results: ResultsTable, where: str = "in brackets") -> list[str]:
    """What a reader of the table must know; `where` is where the intervals stand in it."""
    covered = [
        *describe_coverage(results.rows),
        *describe_warm_up(results.rows),
        *describe_paper_source(results.rows),
        *describe_test(results),
        *describe_marks(results),
    ]
    return [
        ACCURACY_NOTE.format(rest=INTERVAL_NOTE.format(where=where)),
        *covered,
        *describe_noted_leaps(results.rows),
        *results.data.notes,
    ]


def describe_warm_up(rows: Sequence[ReportRow]) -> list[str]:
    """What is not in the minutes."""
    found = [run.warm_up for row in rows for run in row.done if run.warm_up]
    if not found:
        return []
    return [f"Minutes are without warm-up, in which moves are compiled and recorded: up to {max(found):.0f} s a run."]


def describe_test(results: ResultsTable) -> list[str]:
    """How rows were tested against another, if they were."""
    return [TEST_DESCRIPTION.format(against=results.against.name)] if results.against else []


def describe_marks(results: ResultsTable) -> list[str]:
    """What the marks in a table mean, for those that are in it."""
    body = " ".join(part for row in results.rows for part in _format_row(results, row))
    return [f"{mark} {meaning}." for mark, meaning in MARK_MEANINGS.items() if mark in body]


def describe_paper_source(rows: Sequence[ReportRow]) -> list[str]:
    """Which tables of the paper its numbers are from."""
    found = dict.fromkeys(held.number for row in rows if (held := find_paper_table(row.table, row.paper_row)))
    return [f"The paper's numbers are from its {' and '.join(found)}."] if found else []


def _table_header(results: ResultsTable) -> list[str]:
    versus = (
        [f"vs {results.against.name}, {format_attack_name(results.ranking_attack)}"]
        if results.against and results.ranking_attack
        else []
    )
    return ["row", *map(format_attack_name, results.attacks), "backprops", "minutes", "seeds", *versus, "remarks"]


def _format_row(results: ResultsTable, row: ReportRow) -> list[str]:
    spent = summarize_cost(row)
    cells = [_format_accuracy_cell(results, row, attack) for attack in results.attacks]
    bill = [
        _append_paper_values(format_backprops(row), *format_paper_cost(row, "per_batch")),
        _append_paper_values(format_minutes(spent), *format_paper_cost(row, "minutes", "hours")),
    ]
    return [
        row.name,
        *cells,
        *bill,
        format_seed_count(row),
        *_format_comparison_cells(results, row),
        "; ".join(collect_remarks(row)),
    ]


def format_backprops(row: ReportRow) -> str:
    """A row's backprops for people, also by batch of an epoch where the paper counts so."""
    spent, batch = summarize_cost(row), row.seed_statistics("per_batch")
    if spent is None or batch is None:
        return "—"
    each = f" ({batch.mean:.0f} a batch)" if format_paper_cost(row, "per_batch") else ""
    return f"{spent.backprops:,.0f}{each}"


def format_paper_accuracy(row: ReportRow, attack: str) -> list[str]:
    """What the paper has for an accuracy, or nothing."""
    value = find_paper_value(row.table, row.paper_row, attack)
    return [format_paper_value(value) + _setup_mark(row)] if value else []


def format_paper_cost(row: ReportRow, *names: str) -> list[str]:
    """What the paper has for a cost, by the first of these names that it uses."""
    units = {"minutes": (".1f", ""), "hours": (".2f", " h"), "per_batch": (".0f", " a batch")}
    found = [(units[name], find_paper_value(row.table, row.paper_row, name)) for name in names]
    return [f"{format_paper_value(value, form)}{unit}{_setup_mark(row)}" for (form, unit), value in found if value][:1]


def collect_remarks(row: ReportRow) -> list[str]:
    """A row's flags, what the watch saw, and what keeps it from being whole."""
    raised = sorted({f"{FLAGGED_MARK} {flag.name}" for _, flag in collect_flags(row)})
    return [
        *raised,
        *(["sanity not checked"] if list_unchecked_seeds(row) else []),
        *list_watch_alarms(row),
        *list_row_problems(row),
    ]


def list_row_problems(row: ReportRow) -> list[str]:
    """What is wrong with a row's runs, and what its budget left over."""
    spent = summarize_cost(row)
    left = row.budget - spent.backprops if row.budget and spent else 0
    unspent = [f"{left:,.0f} of {row.budget:,} backprops not spent"] if left >= 1 else []
    return [*list_run_problems(row), *unspent]


def _setup_mark(row: ReportRow) -> str:
    """The mark of a number of the paper beside a row that was given other settings."""
    return OTHER_SETUP_MARK if row.differs else ""


def format_seed_count(row: ReportRow) -> str:
    """How many of a row's seeds count, for people."""
    return f"{len(row.done)} of {len(row.runs)}"


def _format_comparison_cells(results: ResultsTable, row: ReportRow) -> list[str]:
    if not results.against or not results.ranking_attack:
        return []
    return [
        "" if row is results.against else format_comparison(results.comparisons[results.ranking_attack].get(row.name))
    ]


def _format_accuracy_cell(results: ResultsTable, row: ReportRow, attack: str) -> str:
    ours = "; ".join(
        filter(None, (format_accuracy(summarize_accuracy(row, attack)), format_last_epoch(results, row, attack)))
    )
    return _append_paper_values(ours, *format_paper_accuracy(row, attack))


def format_last_epoch(results: ResultsTable, row: ReportRow, attack: str) -> str:
    """The last epoch's accuracy for people, in columns where some row has one: the row's own is of its best epoch."""
    found, last = summarize_accuracy(row, attack), summarize_accuracy(row, f"last {attack}")
    if not (found or last) or not any(summarize_accuracy(other, f"last {attack}") for other in results.rows):
        return ""
    return "last epoch " + ("—" if last is None else "the same" if last == found else format_mean(last))


def _append_paper_values(ours: str, *paper: str) -> str:
    return "; paper ".join([ours, *paper])


def _csv_record(results: ResultsTable, row: ReportRow) -> dict[str, Any]:
    spent = summarize_cost(row)
    record: dict[str, Any] = {"row": row.name, "method": row.method, "model": row.model}
    record |= {"seeds": " ".join(str(run.seed) for run in row.done), "runs": len(row.runs)}
    for attack in [*results.attacks, *_last_epoch_columns(results.rows)]:
        record |= _csv_accuracy_fields(results, row, attack)
    record |= {"backprops": spent.backprops if spent else None, "minutes": spent.minutes if spent else None}
    record |= {"minutes_crowded": bool(spent and spent.crowded)}
    for name in ("minutes", "hours", "per_batch"):
        value = find_paper_value(row.table, row.paper_row, name)
        record[f"paper_{name}"] = value.printed if value else None
    return {**record, "given": "; ".join(row.differs), "remarks": "; ".join(collect_remarks(row))}


def _csv_accuracy_fields(results: ResultsTable, row: ReportRow, attack: str) -> dict[str, Any]:
    found, paper = summarize_accuracy(row, attack), find_paper_value(row.table, row.paper_row, attack)
    versus = results.comparisons.get(attack, {}).get(row.name)
    each = " ".join(map(str, found.each)) if found else None
    ours = (found.mean, found.sd, found.low, found.high, found.images, each) if found else (None,) * 6
    theirs = (paper.printed, paper.logged) if paper else (None,) * 2
    tested = (versus.difference, versus.p) if versus else (None,) * 2
    names = ("", "sd", "low", "high", "images", "images_each", "paper", "paper_logged", "difference", "p")
    fields = dict(zip(names, (*ours, *theirs, *tested), strict=True))
    return {f"{attack} {name}".strip(): value for name, value in fields.items()}


def _last_epoch_columns(rows: Sequence[ReportRow]) -> list[str]:
    return list(dict.fromkeys(n for row in rows for n in row.columns if n.startswith("last ")))
