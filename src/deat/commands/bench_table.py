"""A bench's table, for people and for programs."""

from typing import Any

from rich.table import Table

from deat.evaluation.sanity import ADVICE
from deat.evaluation.sanity.flag import link
from deat.live import Screen, is_terminal
from deat.numbers import clock
from deat.plain import plain
from deat.report.cells import coverage, samples
from deat.report.collect import COST, Bench, Row, Spread
from deat.report.gather import flags_of, unchecked

WIDTH = 160
"""Columns of a table that is piped."""


def show(found: Bench) -> None:
    """Print the table, and what a reader must know to read it."""
    console = Screen(soft_wrap=True, width=None if is_terminal() else WIDTH)
    if any(row.done for row in found.rows):
        console.print(table(found))
    for line in notes(found):
        console.print(plain(line))
    console.print(f"every run is in {found.path}")


def table(found: Bench) -> Table:
    """Mean and standard deviation over seeds, in percent, and the cost."""
    names = [name for name in found.columns if name not in COST and not name.startswith("last ")]
    shown = Table(title=f"{found.recipe}: accuracy in percent", title_justify="left", box=None, pad_edge=False)
    shown.add_column("")
    for name in (*names, "backprops", "time", "seeds"):
        shown.add_column(plain(name), justify="right")
    for row in found.rows:
        cells = [spread.percent if (spread := row.spread(name)) else "" for name in names]
        done = f"{len(row.done)}/{len(row.runs)}"
        shown.add_row(plain(row.name), *cells, _count(row.spread("backprops")), _time(row), done)
    return shown


def notes(found: Bench) -> list[str]:
    """What went wrong, what is unfinished, which times say little and which numbers should not be believed."""
    said = [f"{row.name} failed: {row.why}" for row in found.rows if row.why]
    said += [*coverage(found.rows), *samples(found.rows)]
    if any(row.crowded for row in found.rows):
        said.append("* taken while other runs shared the machine")
    open_runs = [run for row in found.rows for run in row.runs if run.status in ("waiting", "running")]
    if open_runs:
        said.append(f"{len(open_runs)} runs are not finished: they wait for another bench, or run in one")
    for row in found.rows:
        said += [f"FLAG {flag.name} of {row.name}, seed {seed}: {flag.seen}" for seed, flag in flags_of(row)]
        said += [f"sanity not checked: {row.name}, seed {seed}" for seed in unchecked(row)]
    return [*said, *_warnings(found)]


def doubtful(found: Bench) -> list[Row]:
    """The rows that carry a flag."""
    return [row for row in found.rows if flags_of(row)]


def _warnings(found: Bench) -> list[str]:
    """Which rows not to believe, and what to do about each kind of flag that they carry."""
    rows = doubtful(found)
    if not rows:
        return []
    names = dict.fromkeys(flag.name for row in rows for _, flag in flags_of(row))
    whose = "every row" if len(rows) == len(found.rows) else ", ".join(row.name for row in rows)
    advice = [f"{name}: {ADVICE[name]} ({link(name)})" for name in names if name in ADVICE]
    return [f"not to be believed, for the flags above: {whose}", *advice]


def as_json(found: Bench) -> dict[str, Any]:
    """The table as one JSON document."""
    return {
        "out": str(found.path),
        "recipe": found.recipe,
        "settings": found.settings,
        "rows": [_row(row) for row in found.rows],
        "notes": notes(found),
    }


def _row(row: Row) -> dict[str, Any]:
    spreads = {name: row.spread(name) for name in row.columns}
    return {
        "name": row.name,
        "method": row.method,
        "model": row.model,
        "runs": [{"seed": run.seed, "status": run.status, "why": run.why} for run in row.runs],
        "crowded": row.crowded,
        "numbers": {n: {"mean": s.mean, "sd": s.sd, "values": list(s.values)} for n, s in spreads.items() if s},
    }


def _count(found: Spread | None) -> str:
    return "" if found is None else f"{found.mean:,.0f}"


def _time(row: Row) -> str:
    found = row.minutes
    return "" if found is None else clock(60 * found) + ("*" if row.crowded else "")
