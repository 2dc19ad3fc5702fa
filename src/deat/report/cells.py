"""The numbers of a report's table: each with its spread over seeds, its interval and the paper's value."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deat.evaluation.intervals import wilson_share
from deat.report.collect import COST, OneRun, Row, columns_of

STRENGTH = ("fgsm", "square", "pgd", "apgd-ce", "cw", "fab-t", "apgd-t", "aa")
"""Attacks from weak to strong, by what their name begins with."""


@dataclass(frozen=True)
class Cell:
    """An accuracy: mean and standard deviation over seeds, and the 95 % interval that the choice of images leaves."""

    mean: float
    sd: float | None
    low: float
    high: float
    seeds: int
    images: int


@dataclass(frozen=True)
class Cost:
    """What a row cost: means over seeds. minutes is None where no clock was kept."""

    backprops: float
    minutes: float | None
    crowded: bool


def attacks_of(rows: Sequence[Row]) -> list[str]:
    """The attacks that some row has an accuracy for, natural first, then from weak to strong, worst of all last."""
    names = [n for n in columns_of(rows) if n not in COST and not n.startswith("last ")]
    return sorted(names, key=_order)


def headline(rows: Sequence[Row]) -> str | None:
    """By what rows are ranked: the worst of all attacks, or else the strongest that most rows were judged by.

    The worst is it where every finished run was judged by the same attacks, several and the strongest among them.
    """
    held = {name: sum(name in row.columns for row in rows) for name in attacks_of(rows)}
    robust = [name for name in held if name not in ("natural", "worst")] or list(held)
    strongest = max(robust, key=lambda name: (held[name], _order(name)), default=None)
    judged = {frozenset(r.name for r in run.evaluation.results) for row in rows for run in row.done if run.evaluation}
    alike = next(iter(judged)) - {"natural"} if len(judged) == 1 else frozenset()
    return "worst" if len(alike) > 1 and strongest in alike and "worst" in held else strongest


def title(attack: str) -> str:
    """An attack's name as the paper writes it."""
    if attack in ("natural", "worst"):
        return attack
    return re.sub(r"(\d)X(\d)", r"\1×\2", attack.upper()).replace("-LAST", ", last iterate")


def cell(row: Row, attack: str) -> Cell | None:
    """A row's accuracy under an attack; None where no finished run has it."""
    spread = row.spread(attack)
    if spread is None or not math.isfinite(spread.mean):
        return None
    images = min(_images(run, attack) for run in row.done if attack in run.numbers)
    low, high = wilson_share(spread.mean, images)
    return Cell(spread.mean, spread.sd, low, high, len(spread.values), images)


def coverage(rows: Sequence[Row]) -> Iterator[str]:
    """What "worst" is the worst of, and which attacks the last epoch was not judged by."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        for told in dict.fromkeys(_covered(run) for run in row.done):
            groups.setdefault(told, []).append(row.name)
    for told, names in groups.items():
        whose = "" if len(groups) == 1 else f" of {', '.join(names)}"
        yield f"worst{whose} {told}"
    both = [row for row in rows if "last natural" in row.columns]
    spared = [n for n in attacks_of(both) if any(n in r.columns and f"last {n}" not in r.columns for r in both)]
    if attacks := [title(name) for name in spared if name != "worst"]:
        hence = ", so its worst would be another and is not shown" if "worst" in spared else ""
        yield f"The last epoch was not judged by {', '.join(attacks)}{hence}."


def cost(row: Row) -> Cost | None:
    """A row's cost; None where no run is finished."""
    spent = row.spread("backprops")
    if spent is None:
        return None
    clocks = [run.seconds / 60 for run in row.done if run.seconds > 0]
    return Cost(spent.mean, sum(clocks) / len(clocks) if clocks else None, row.crowded)


def front(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Which points (cost, accuracy) no other one beats: none is at least as cheap and as good, and better in one."""
    return [not any(c <= cost and a >= acc and (c, a) != (cost, acc) for c, a in points) for cost, acc in points]


def _covered(run: OneRun) -> str:
    names = [r.name for r in run.evaluation.results] if run.evaluation else []
    aside = (
        "; AA was run apart, on fewer images for some or all seeds, and is not among them"
        if "aa" in run.beside and "aa" not in names
        else ""
    )
    return f"counts an image only if it stands against all of {', '.join(map(title, names))}{aside}."


def _images(run: OneRun, attack: str) -> int:
    last = run.beside.get("last")
    return len(last.labels) if attack.startswith("last ") and last else run.images[attack]


def _order(name: str) -> tuple[int, int, str]:
    if name in ("natural", "worst"):
        return (-1 if name == "natural" else len(STRENGTH) + 1), 0, name
    family = max((i for i, known in enumerate(STRENGTH) if name.startswith(known)), default=0)
    steps = re.search(r"\d+", name)
    return family, int(steps[0]) if steps else 0, name
