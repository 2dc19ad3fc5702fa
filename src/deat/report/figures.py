"""The data of every figure: panels of lines, which are drawn, written as CSV and embedded into the page alike."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from deat.report.grouping import flags_of
from deat.report.load import OneRun, ReportRow
from deat.report.significance import rivals
from deat.report.stats import cell, cost, far_below, front, title
from deat.training.records import EpochStats
from deat.utils.numbers import level


@dataclass(frozen=True)
class Line:
    """One run's values in a panel; a value that is not there is None. spans are the values' 95 % intervals, if told.

    Of a row's point, good says that it is on the Pareto front, low that it lies far below the others, and flagged that
    a sanity flag speaks against it.
    """

    row: str
    seed: int | None
    x: list[float]
    y: list[float | None]
    spans: list[tuple[float, float]] = field(default_factory=list)
    good: bool = False
    low: bool = False
    flagged: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes. kind is line, step, bar or point; percent says that y is a share."""

    title: str
    x: str
    y: str
    lines: list[Line]
    kind: str = "line"
    percent: bool = False

    @property
    def has_front(self) -> bool:
        """Whether its points are compared with each other."""
        return any(line.row == FRONT for line in self.lines)


@dataclass(frozen=True)
class Layout:
    """How a figure's panels stand: side by side, unless tall says one over the other, above one x axis.

    alike panels have the same axes, to be compared; named ones have each point's name beside it. A figure that is
    apart has a section of the page's own, with a chart that answers, in place of its panels.
    """

    tall: bool = False
    alike: bool = False
    named: bool = False
    apart: bool = False


USUAL = Layout()


@dataclass(frozen=True)
class Figure:
    """One figure; without panels, `missing` says what they would need, if anybody looks for them.

    titled says what it is called where only some of its panels are shown, if that is not its title.
    """

    name: str
    title: str
    panels: list[Panel] = field(default_factory=list)
    missing: str = ""
    layout: Layout = USUAL
    titled: Callable[[Sequence[Panel]], str] | None = None


FRONT = "Pareto front"
"""What the line is called that stands for no row."""
Read = Callable[[EpochStats], float | None]
Guided = dict[float, dict[float, list[tuple[float, float]]]]
"""Costs and errors by gamma and alpha."""


def figures(rows: Sequence[ReportRow], attack: str | None) -> list[Figure]:
    """Every figure that can be drawn from records alone."""
    return [
        training_process(rows),
        validation(rows),
        backprops(rows),
        trade_off(rows, attack),
        alpha_gamma(rows, attack),
    ]


def training_process(rows: Sequence[ReportRow]) -> Figure:
    """The paper's six rows: how training accuracy, robustness, its gain, l_X and the Lipschitz bound go by epoch."""
    how = _attack_used(rows)
    panels = [
        by_epoch(rows, "training accuracy", "accuracy", lambda h: h.train_accuracy, percent=True),
        by_epoch(rows, "natural accuracy, held out", "accuracy", lambda h: h.val_natural, percent=True),
        by_epoch(rows, f"{how} accuracy, held out", "accuracy", lambda h: h.val_robust, percent=True),
        gains(by_epoch(rows, "robustness gain", "change, points", lambda h: h.val_robust, percent=True)),
        by_epoch(rows, "gradient magnitude l_X", "l_X per image", lambda h: h.magnitude / h.examples if h.k else None),
        by_epoch(rows, "Lipschitz bound", "log10", lambda h: h.log10_lipschitz),
    ]
    return _whole("training-process", "The training process", panels, "runs with a history", Layout(tall=True))


def validation(rows: Sequence[ReportRow]) -> Figure:
    """Accuracy and loss on held-out images, and the training loss."""
    how = _attack_used(rows)
    panels = [
        by_epoch(rows, "natural accuracy, held out", "accuracy", lambda h: h.val_natural, percent=True),
        by_epoch(rows, f"{how} accuracy, held out", "accuracy", lambda h: h.val_robust, percent=True),
        by_epoch(rows, "natural loss, held out", "loss", lambda h: h.val_loss),
        by_epoch(rows, "training loss", "loss", lambda h: h.loss),
    ]
    return replace(_whole("validation", _validated(panels), panels, "runs with a history"), titled=_validated)


def heading(figure: Figure, shown: Sequence[Panel]) -> str:
    """What a figure is called where these of its panels are shown."""
    return figure.titled(shown) if figure.titled else figure.title


def _validated(panels: Sequence[Panel]) -> str:
    """What the figure on validation is called: what its panels show."""
    held = {panel.y for panel in panels if panel.lines and panel.title.endswith(", held out")}
    names = {
        ("accuracy", "loss"): "Validation accuracy and loss",
        ("accuracy",): "Validation accuracy and training loss",
        ("loss",): "Validation and training loss",
    }
    return names.get(tuple(sorted(held)), "Training loss")


def backprops(rows: Sequence[ReportRow]) -> Figure:
    """k's staircase, and what it adds up to."""
    panels = [
        by_epoch(rows, "adversarial steps k", "k", lambda h: h.k, kind="step"),
        by_epoch(rows, "backprops so far", "backprops", lambda h: h.backprops),
    ]
    return _whole("backprops", "Backprops by epoch", panels, "runs with a history")


def trade_off(rows: Sequence[ReportRow], attack: str | None) -> Figure:
    """Robustness against cost; a line's points are one row, and "Pareto front" are the believed ones none beats.

    Rows that were not judged alike have no front.
    """
    panels = []
    for name in ("backprops", "minutes"):
        points = [
            (row, spent, found)
            for row in rows
            if attack and (found := cell(row, attack)) and (spent := _spent(row, name))
        ]
        sound = {id(row) for row in rivals([row for row, _, _ in points])}
        costs = [(c, found.mean) for row, c, found in points if id(row) in sound]
        best = sorted(point for point, is_good in zip(costs, front(costs), strict=True) if is_good)
        below = far_below([found.mean for _, _, found in points])
        lines = []
        for (row, c, a), low in zip(points, below, strict=True):
            good = id(row) in sound and (c, a.mean) in best
            lines.append(Line(row.name, None, [c], [a.mean], [(a.low, a.high)], good, low, bool(flags_of(row))))
        if best:
            lines.append(Line(FRONT, None, [c for c, _ in best], [a for _, a in best]))
        about = f"{title(attack or '')} accuracy against {name}{_crowd(rows) if name == 'minutes' else ''}"
        panels.append(Panel(about, name, "accuracy", lines, "point", True))
    return _whole("cost", "Robustness against cost", panels, "evaluated runs", Layout(named=True, apart=True))


def alpha_gamma(rows: Sequence[ReportRow], attack: str | None) -> Figure:
    """M+'s error against its cost, a panel for each gamma, a line for each alpha, a point for each seed."""
    several = {m: found for m, found in _guided(rows, attack).items() if sum(map(len, found.values())) > 1}
    y = f"{title(attack or '')} error"
    panels = [
        Panel(f"{method}, gamma {gamma:g}", "backprops", y, list(_alphas(held)), "point", True)
        for method, found in several.items()
        for gamma, held in sorted(found.items(), reverse=True)
    ]
    chosen = {(row.method, row.model, found) for row in rows for run in row.runs if (found := _alpha_gamma(run))}
    wanted = len(chosen) > len({about[:2] for about in chosen})  # else nobody varied them
    what = "evaluated M+ runs of one method with different alpha or gamma" if wanted and not panels else ""
    return Figure("alpha-gamma", "Step size alpha and gamma", panels, what, Layout(alike=True))


def by_epoch(
    rows: Sequence[ReportRow], name: str, y: str, read: Read, *, kind: str = "line", percent: bool = False
) -> Panel:
    """A panel of something that every epoch's record tells."""
    lines = [_line(row.name, run, read) for row in rows for run in row.runs if run.history]
    return Panel(name, "epoch", y, [line for line in lines if any(v is not None for v in line.y)], kind, percent)


def gains(panel: Panel) -> Panel:
    """The same panel's changes from one epoch to the next."""
    lines = [Line(m.row, m.seed, m.x[1:], [_minus(b, a) for a, b in pairwise(m.y)]) for m in panel.lines]
    return Panel(panel.title, panel.x, panel.y, [line for line in lines if line.x], "bar", panel.percent)


def table_of(figure: Figure) -> list[list[Any]]:
    """A figure's data as rows of a CSV file; an empty field is a value that is not there."""
    ends = ["low", "high"] if any(line.spans for panel in figure.panels for line in panel.lines) else []
    return [["panel", "row", "seed", "x", "y", *ends], *(row[: 5 + len(ends)] for row in _fields(figure))]


def _fields(figure: Figure) -> Iterator[list[Any]]:
    for panel in figure.panels:
        for line in panel.lines:
            for n, (x, y) in enumerate(zip(line.x, line.y, strict=True)):
                span = line.spans[n] if line.spans else ("", "")
                yield [panel.title, line.row, "" if line.seed is None else line.seed, x, "" if y is None else y, *span]


def _line(name: str, run: OneRun, read: Read) -> Line:
    return Line(name, run.seed, [float(h.epoch + 1) for h in run.history], [_finite(read(h)) for h in run.history])


def _whole(name: str, heading: str, panels: list[Panel], needs: str, layout: Layout = USUAL) -> Figure:
    kept = [panel for panel in panels if panel.lines]
    return Figure(name, heading, kept, "" if kept else needs, layout)


def _spent(row: ReportRow, name: str) -> float | None:
    spent = cost(row)
    if spent is None:
        return None
    return spent.backprops if name == "backprops" else spent.minutes


def _crowd(rows: Sequence[ReportRow]) -> str:
    """What a title says of minutes that were taken while other jobs ran."""
    crowded = [row.crowded for row in rows if row.done]
    return "" if not any(crowded) else f", {'' if all(crowded) else 'some '}taken with several jobs at once"


def _guided(rows: Sequence[ReportRow], attack: str | None) -> dict[str, Guided]:
    """Every M+ run's cost and error, by its method on its network, gamma and alpha."""
    several = len({row.model for row in rows}) > 1
    found: dict[str, Guided] = {}
    for row in rows:
        for run in row.done:
            chosen = _alpha_gamma(run)
            if chosen and attack and attack in run.numbers:
                points = found.setdefault(f"{row.method}, {row.model}" if several else row.method, {})
                point = (run.numbers["backprops"], 1 - run.numbers[attack])
                points.setdefault(chosen[1], {}).setdefault(chosen[0], []).append(point)
    return found


def _alpha_gamma(run: OneRun) -> tuple[float, float] | None:
    record = run.record or {}
    schedule = record.get("method", {}).get("schedule", {})
    if "gamma" not in schedule:
        return None
    return float(schedule["alpha"]) * float(record["threat"]["eps"]), float(schedule["gamma"])


def _alphas(held: dict[float, list[tuple[float, float]]]) -> Iterator[Line]:
    for alpha, points in sorted(held.items()):
        points.sort()
        yield Line(f"alpha {level(alpha)}", None, [c for c, _ in points], [e for _, e in points])


def _attack_used(rows: Sequence[ReportRow]) -> str:
    used = {run.record["settings"]["val_attack"] for row in rows for run in row.runs if run.record and run.history}
    return title(used.pop()) if len(used) == 1 else "robust"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _minus(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b
