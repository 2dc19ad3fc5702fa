"""What a bench was given in place of its recipe's own settings, so that the paper's numbers are about another setup."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from deat.paths import tidy
from deat.plain import plain
from deat.recipes import names, recipe
from deat.recipes.overrides import SPECIAL
from deat.recipes.paper import paper_table
from deat.report.collect import Bench, Row

OTHER = "‡"
"""Beside a number of the paper whose row was given other settings."""
SAME = ("engine", "block", "workers", "device", "threads", "deterministic", "aa_n", "aa_whole")
"""Settings that change neither training nor judging; on how many images AutoAttack was run is told as a sample."""


def marked(bench: Bench) -> Iterator[Row]:
    """A bench's rows, each with what it was given, and with the backprops that it had to spend."""
    budget = bench.settings.get("budget_bp")
    held = budget if isinstance(budget, int) else None
    common = [*_data(bench), *([f"a budget of {held:,} backprops"] if held else [])]
    for row in bench.rows:
        yield replace(row, differs=(*common, *_network(bench, row), *_settings(bench, row)), budget=held)


def notes_on(rows: Sequence[Row]) -> Iterator[str]:
    """Which rows were given what."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(row.differs, []).append(row)
    for differs, same in groups.items():
        if differs:
            who = "All rows" if len(groups) == 1 else ", ".join(row.name for row in same)
            paper = any(paper_table(row.table, row.paper_row) for row in same)
            mark = f" {OTHER} marks numbers of the paper, which are for its own setup." if paper else ""
            yield f"{who}: given {', '.join(differs)} in place of the recipe's own.{mark}"


def _data(bench: Bench) -> Iterator[str]:
    own = recipe(bench.recipe).data if bench.recipe in names() else None
    given = bench.settings.get("data", own)
    if given != own:
        folder = " (the paper's images only if it holds them)" if str(given).startswith("folder:") else ""
        yield plain(f"data {given}{folder}")


def _network(bench: Bench, row: Row) -> Iterator[str]:
    """A network that neither the recipe nor the paper's table has."""
    own = recipe(bench.recipe).models if bench.recipe in names() else (row.model,)
    if row.model not in own and not paper_table(row.table, row.paper_row):
        yield plain(f"the network {tidy(row.model)}")


def _settings(bench: Bench, row: Row) -> Iterator[str]:
    given = bench.settings.get("set", {})
    for name, text in given.items() if isinstance(given, dict) else ():
        if name not in SAME and not (name in SPECIAL and _lacks(row, name)):
            yield plain(f"{name}={text}")


def _lacks(row: Row, name: str) -> bool:
    """Whether a method's own setting did not reach this row, whose method does not have it."""
    requests = [run.record["request"] for run in row.runs if run.record]
    return bool(requests) and all(request.get(name) is None for request in requests)
