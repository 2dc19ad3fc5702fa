"""Who is the best of several rows, who is not told apart from it, and whom rows are tested against."""

from collections.abc import Sequence

from deat.report.cells import cell, cost
from deat.report.collect import Row
from deat.report.gather import believed
from deat.report.likeness import comparable
from deat.report.paired import compare

USUAL = "m+deat"
"""The method that rows are tested against where it is among them: the one that all this is about."""
SURE = 0.05
"""The p-value from which on two rows are not told apart."""
NAMED = 3
"""Rows that are named, at most, before the others are counted."""


def usual(rows: Sequence[Row], attack: str | None) -> Row | None:
    """The row that others are tested against unless one is named: M+DEAT's, or else the most robust one.

    Both only among those that may be believed. Of several rows of M+DEAT it is the one that is called just so, if any.
    """
    sound = believed([row for row in rows if row.done])
    called = [row for row in sound if row.name == USUAL]
    mine = called or [row for row in sound if row.method == USUAL]
    return mine[0] if len(mine) == 1 else most_robust(sound, attack)


def rivals(rows: Sequence[Row]) -> list[Row]:
    """The rows one of which is the best: those that may be believed, or none where these were not judged alike."""
    sound = believed(rows)
    return sound if comparable(sound) else []


def most_robust(rows: Sequence[Row], attack: str | None) -> Row | None:
    """The row with the highest accuracy under an attack, the cheaper of equals; the first where none has one."""
    return max(rows, key=lambda row: _standing(row, attack), default=None)


def doubt(best: Row, rivals: Sequence[Row], attack: str) -> str:
    """Which rivals the paired test does not tell from the best one, for people; empty where it tells all.

    Where there are rivals that it cannot test, since no verdicts on the same images are there, the interval speaks.
    """
    others = [row for row in rivals if row is not best and cell(row, attack)]
    tested = compare([best, *others], best, attack)
    alike = [row.name for row in others if row.name in tested and tested[row.name].p >= SURE]
    found = cell(best, attack)
    parts = [f"not told apart from {_listed(alike)} (p ≥ {SURE})"] if alike else []
    if found and len(tested) < len(others):
        parts.append(f"95 % interval {100 * found.low:.1f} to {100 * found.high:.1f}")
    return "; ".join(parts)


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - NAMED
    return ", ".join(names) if rest <= 1 else f"{', '.join(names[:NAMED])} and {rest} others"


def _standing(row: Row, attack: str | None) -> tuple[float, float]:
    found, spent = cell(row, attack) if attack else None, cost(row)
    return (found.mean if found else -1.0), -(spent.backprops if spent else 0.0)
