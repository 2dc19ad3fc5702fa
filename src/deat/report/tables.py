"""The table of a report as Markdown and CSV, and its numbers as people read them."""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from deat.recipes.paper_tables import Value, paper_table, paper_value
from deat.report.grouping import OTHER, Subject, flags_of, troubles, unchecked
from deat.report.held_out import held_out, held_out_record
from deat.report.load import OneRun, ReportRow
from deat.report.paper_claims import Checked, given
from deat.report.run_summary import score_table
from deat.report.significance import HOW, Versus, compare, usual
from deat.report.stats import Cell, Cost, attacks_of, cell, cost, coverage, headline, title
from deat.training.overfit_watch import NOTED, kind_of
from deat.training.records import EpochWatch
from deat.utils.text import markdown

DONE = {"warn": "warned, and went on", "stop": "stopped", "rollback": "rolled back, and went on"}
CALM = "The overfit watch noted a leap of l_X that the accuracies do not bear out, and did nothing"


def alarms(row: ReportRow, short: bool = False) -> list[str]:
    """Each collapse of a row's runs: its seed, its epoch, what was done and, unless short, what was seen."""
    return [
        f"seed {run.seed}: {_alarm(event)}{'' if short else f': {event.reason}'}"
        for run in row.runs
        for event in run.watch
        if event.reason and event.action != NOTED
    ]


def noted(rows: Sequence[ReportRow]) -> list[str]:
    """The leaps of l_X that were only noted, all in one line."""
    found = [
        f"{row.name} seed {run.seed} in epoch{'' if len(epochs) == 1 else 's'} {', '.join(map(str, epochs))}"
        for row in rows
        for run in row.runs
        if (epochs := [event.epoch + 1 for event in run.watch if event.action == NOTED])
    ]
    return [f"{CALM}: {'; '.join(found)}."] if found else []


def _alarm(event: EpochWatch) -> str:
    return f"{kind_of(event)} in epoch {event.epoch + 1} ({DONE.get(str(event.action), event.action)})"


CROWDED, MISPRINT, FLAGGED = "*", "†", "⚑"
NOTES = {
    CROWDED: "minutes taken while several jobs ran at once, which says little about speed",
    MISPRINT: "a misprint of the paper: the authors' own log says the number in brackets",
    FLAGGED: "a sanity flag was raised: not to be believed as it stands",
}
CLAIMED = ("the paper says", "paper", "its own tables", "ours, backprops", "ours, seconds")
"""The columns of the table of claims."""
SPREAD = "Accuracies are in percent: mean ± standard deviation over seeds{rest}. A dash is a number that is not there."
INTERVALS = ", and {where} the 95 % interval (Wilson) that the choice of test images leaves"


@dataclass(frozen=True, eq=False)
class Sheet:
    """A table's content: its rows, their attacks, and how each row stands against a chosen one."""

    subject: Subject
    attacks: list[str]
    headline: str | None
    against: ReportRow | None
    versus: dict[str, dict[str, Versus]]

    @property
    def rows(self) -> tuple[ReportRow, ...]:
        """The rows, in order."""
        return self.subject.rows


def sheet(subject: Subject, against: str | None) -> Sheet:
    """What a table of these rows says. Without a choice, rows stand against M+DEAT's, or else the most robust one."""
    attacks, rows, ranked = attacks_of(subject.rows), subject.rows, headline(subject.rows)
    several = sum(bool(row.done) for row in rows) > 1
    chosen = subject.row(against) if against else usual(rows, ranked) if several else None
    versus = {attack: compare(rows, chosen, attack) for attack in attacks} if chosen else {}
    return Sheet(subject, attacks, ranked, chosen, versus)


def markdown_table(of: Sheet) -> str:
    """The table in Markdown, with its notes."""
    head = [markdown(text) for text in _head(of)]
    body = [[markdown(part) for part in _row(of, row)] for row in of.rows]
    lines = [" | ".join(["", *cells, ""]).strip() for cells in (head, ["---"] + ["---:"] * (len(head) - 1), *body)]
    told = (f"\\{note}" if note.startswith(CROWDED) else note for note in map(markdown, notes(of)))  # no item of a list
    return "\n".join([*lines, "", *(f"{note}\n" for note in told)])


def csv_table(of: Sheet) -> str:
    """Every number of the table in full, one column each; a number that is not there is an empty field."""
    apart = any(held_out(of.rows))
    records = [_record(of, row) | (held_out_record(row) if apart else {}) for row in of.rows]
    return csv_text([list(records[0]), *(list(record.values()) for record in records)])


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
    """Rows as a CSV file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def claims_table(claims: Sequence[Checked]) -> str:
    """The paper's claims beside ours, in Markdown."""
    lines = [f"| {' | '.join(CLAIMED)} |", "|---|---:|---:|---:|---:|"]
    for c in claims:
        cells = [c.claim.text, *claimed(c)]
        lines.append(f"| {' | '.join(markdown(text) for text in cells)} |")
    return "\n".join([*lines, *(f"\n{markdown(text)}" for text in given(claims))]) + "\n"


def claimed(c: Checked) -> list[str]:
    """What the paper says and what its tables give, and ours in backprops and on the clock, for people."""
    paper = [saving(c.claim.percent), saving(c.claim.tabled, ".1f")]
    if c.missing:
        return [*paper, c.missing, "—"]
    mark = OTHER if c.differs else ""
    return [*paper, saving(c.backprops) + mark, saving(c.seconds) + (CROWDED if c.crowded else "") + mark]


def compared(rows: Sequence[ReportRow]) -> list[tuple[ReportRow, OneRun]]:
    """The runs whose training scored what no evaluation did: others beside it, such as natural training, or itself."""
    return [(row, run) for row in rows for run in row.runs if len(run.scores) > (1 if run.evaluation else 0)]


def scores_note(row: ReportRow, run: OneRun) -> str:
    """What the table of such a run is."""
    beside = " A model beside the run itself was not evaluated further, so it has no row among the results."
    return (
        f"What deat train showed at the end of {row.name}, seed {run.seed}: accuracy on {run.scores[0].images:,} test "
        f"images, without sanity checks.{beside if len(run.scores) > 1 else ''}"
    )


def scores_tables(rows: Sequence[ReportRow]) -> str:
    """The tables that runs ended with, in Markdown; empty where there is none."""
    parts = [f"{markdown(scores_note(row, run))}\n\n{score_table(run.scores)}\n" for row, run in compared(rows)]
    return "\n".join(["\n## At the end of training\n", *parts]) if parts else ""


def saving(value: float | None, form: str = ".0f") -> str:
    """A percentage less, for people."""
    return "—" if value is None else f"{value:{form}} %" if value >= 0 else f"{-value:{form}} % more"


def accuracy(found: Cell | None) -> str:
    """An accuracy for people: mean, standard deviation and interval."""
    if found is None:
        return "—"
    return f"{mean(found)}{deviation(found)} ({'; '.join(filter(None, (interval(found), found.behind)))})"


def mean(found: Cell) -> str:
    """A mean in percent, for people."""
    return f"{100 * found.mean:.2f}"


def deviation(found: Cell) -> str:
    """The deviation over seeds as it stands behind a mean; empty for a single seed."""
    return "" if found.sd is None else f" ± {100 * found.sd:.2f}"


def interval(found: Cell) -> str:
    """An interval in percent, for people."""
    return f"{100 * found.low:.1f} to {100 * found.high:.1f}"


def printed(value: Value, form: str = ".2f") -> str:
    """The paper's value, with the logged one where it is a misprint."""
    logged = "" if value.logged is None else f"{MISPRINT} ({value.logged:{form}})"
    return f"{value.printed:{form}}{logged}"


def minutes(spent: Cost | None) -> str:
    """Minutes for people, marked where several jobs ran at once."""
    if spent is None or spent.minutes is None:
        return "—"
    shown = f"{spent.minutes:.1f}" if spent.minutes >= 10 else f"{spent.minutes:#.2g}"
    return shown + (CROWDED if spent.crowded else "")


def significance(found: Versus | None) -> str:
    """A difference in points and its p-value, for people."""
    return "—" if found is None else f"{difference(found)}, {chance(found)}"


def difference(found: Versus) -> str:
    """A difference in points, for people."""
    return f"{100 * found.difference:+.2f}".replace("-", "−")


def chance(found: Versus) -> str:
    """A p-value, for people, and of how many seeds and images it is, where its rows have others."""
    shown = "p < 0.001" if found.p < 0.001 else f"p = {found.p:.3f}"
    return f"{shown}, {found.shared}" if found.shared else shown


def notes(of: Sheet, where: str = "in brackets") -> list[str]:
    """What a reader of the table must know; `where` is where the intervals stand in it."""
    covered = [*coverage(of.rows), *warmed_up(of.rows), *source(of.rows), *tested(of), *marks(of)]
    return [SPREAD.format(rest=INTERVALS.format(where=where)), *covered, *noted(of.rows), *of.subject.notes]


def warmed_up(rows: Sequence[ReportRow]) -> list[str]:
    """What is not in the minutes."""
    found = [run.warm_up for row in rows for run in row.done if run.warm_up]
    if not found:
        return []
    return [f"Minutes are without warm-up, in which moves are compiled and recorded: up to {max(found):.0f} s a run."]


def tested(of: Sheet) -> list[str]:
    """How rows were tested against another, if they were."""
    return [HOW.format(against=of.against.name)] if of.against else []


def marks(of: Sheet) -> list[str]:
    """What the marks in a table mean, for those that are in it."""
    body = " ".join(part for row in of.rows for part in _row(of, row))
    return [f"{mark} {meaning}." for mark, meaning in NOTES.items() if mark in body]


def source(rows: Sequence[ReportRow]) -> list[str]:
    """Which tables of the paper its numbers are from."""
    found = dict.fromkeys(held.number for row in rows if (held := paper_table(row.table, row.paper_row)))
    return [f"The paper's numbers are from its {' and '.join(found)}."] if found else []


def _head(of: Sheet) -> list[str]:
    versus = [f"vs {of.against.name}, {title(of.headline)}"] if of.against and of.headline else []
    return ["row", *map(title, of.attacks), "backprops", "minutes", "seeds", *versus, "remarks"]


def _row(of: Sheet, row: ReportRow) -> list[str]:
    spent = cost(row)
    cells = [_cell(of, row, attack) for attack in of.attacks]
    bill = [
        _beside(backprops(row), *paper_cost(row, "per_batch")),
        _beside(minutes(spent), *paper_cost(row, "minutes", "hours")),
    ]
    return [row.name, *cells, *bill, whole(row), *_versus(of, row), "; ".join(remarks(row))]


def backprops(row: ReportRow) -> str:
    """A row's backprops for people, also by batch of an epoch where the paper counts so."""
    spent, batch = cost(row), row.spread("per_batch")
    if spent is None or batch is None:
        return "—"
    each = f" ({batch.mean:.0f} a batch)" if paper_cost(row, "per_batch") else ""
    return f"{spent.backprops:,.0f}{each}"


def paper_accuracy(row: ReportRow, attack: str) -> list[str]:
    """What the paper has for an accuracy, or nothing."""
    value = paper_value(row.table, row.paper_row, attack)
    return [printed(value) + _other(row)] if value else []


def paper_cost(row: ReportRow, *names: str) -> list[str]:
    """What the paper has for a cost, by the first of these names that it uses."""
    units = {"minutes": (".1f", ""), "hours": (".2f", " h"), "per_batch": (".0f", " a batch")}
    found = [(units[name], paper_value(row.table, row.paper_row, name)) for name in names]
    return [f"{printed(value, form)}{unit}{_other(row)}" for (form, unit), value in found if value][:1]


def remarks(row: ReportRow) -> list[str]:
    """A row's flags, what the watch saw, and what keeps it from being whole."""
    raised = sorted({f"{FLAGGED} {flag.name}" for _, flag in flags_of(row)})
    return [*raised, *(["sanity not checked"] if unchecked(row) else []), *alarms(row), *comments(row)]


def comments(row: ReportRow) -> list[str]:
    """What is wrong with a row's runs, and what its budget left over."""
    spent = cost(row)
    left = row.budget - spent.backprops if row.budget and spent else 0
    unspent = [f"{left:,.0f} of {row.budget:,} backprops not spent"] if left >= 1 else []
    return [*troubles(row), *unspent]


def _other(row: ReportRow) -> str:
    """The mark of a number of the paper beside a row that was given other settings."""
    return OTHER if row.differs else ""


def whole(row: ReportRow) -> str:
    """How many of a row's seeds count, for people."""
    return f"{len(row.done)} of {len(row.runs)}"


def _versus(of: Sheet, row: ReportRow) -> list[str]:
    if not of.against or not of.headline:
        return []
    return ["" if row is of.against else significance(of.versus[of.headline].get(row.name))]


def _cell(of: Sheet, row: ReportRow, attack: str) -> str:
    ours = "; ".join(filter(None, (accuracy(cell(row, attack)), last_epoch(of, row, attack))))
    return _beside(ours, *paper_accuracy(row, attack))


def last_epoch(of: Sheet, row: ReportRow, attack: str) -> str:
    """The last epoch's accuracy for people, in columns where some row has one: the row's own is of its best epoch."""
    found, last = cell(row, attack), cell(row, f"last {attack}")
    if not (found or last) or not any(cell(other, f"last {attack}") for other in of.rows):
        return ""
    return "last epoch " + ("—" if last is None else "the same" if last == found else mean(last))


def _beside(ours: str, *paper: str) -> str:
    return "; paper ".join([ours, *paper])


def _record(of: Sheet, row: ReportRow) -> dict[str, Any]:
    spent = cost(row)
    record: dict[str, Any] = {"row": row.name, "method": row.method, "model": row.model}
    record |= {"seeds": " ".join(str(run.seed) for run in row.done), "runs": len(row.runs)}
    for attack in [*of.attacks, *_last(of.rows)]:
        record |= _accuracy_record(of, row, attack)
    record |= {"backprops": spent.backprops if spent else None, "minutes": spent.minutes if spent else None}
    record |= {"minutes_crowded": bool(spent and spent.crowded)}
    for name in ("minutes", "hours", "per_batch"):
        value = paper_value(row.table, row.paper_row, name)
        record[f"paper_{name}"] = value.printed if value else None
    return {**record, "given": "; ".join(row.differs), "remarks": "; ".join(remarks(row))}


def _accuracy_record(of: Sheet, row: ReportRow, attack: str) -> dict[str, Any]:
    found, paper = cell(row, attack), paper_value(row.table, row.paper_row, attack)
    versus = of.versus.get(attack, {}).get(row.name)
    each = " ".join(map(str, found.each)) if found else None
    ours = (found.mean, found.sd, found.low, found.high, found.images, each) if found else (None,) * 6
    theirs = (paper.printed, paper.logged) if paper else (None,) * 2
    tested = (versus.difference, versus.p) if versus else (None,) * 2
    names = ("", "sd", "low", "high", "images", "images_each", "paper", "paper_logged", "difference", "p")
    fields = dict(zip(names, (*ours, *theirs, *tested), strict=True))
    return {f"{attack} {name}".strip(): value for name, value in fields.items()}


def _last(rows: Sequence[ReportRow]) -> list[str]:
    return list(dict.fromkeys(n for row in rows for n in row.columns if n.startswith("last ")))
