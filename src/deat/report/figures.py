"""The data of every figure: panels of lines, which are drawn, written as CSV and embedded into the page alike."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from deat.report.grouping import collect_flags
from deat.report.load import ReportRow, RunResults
from deat.report.significance import select_rankable_rows
from deat.report.stats import (
    find_low_outliers,
    find_pareto_front,
    format_attack_name,
    summarize_accuracy,
    summarize_cost,
)
from deat.training.records import EpochStats
from deat.utils.text import format_eps


@dataclass(frozen=True)
class PlotLine:
    """One run's values in a panel; a value that is not there is None. spans are the values' 95 % intervals, if told.

    Of a row's point, good says that it is on the Pareto front, low that it lies far below the others, and flagged that
    a sanity flag speaks against it.
    """

    row: str
    seed: int | None
    x: list[float]
    y: list[float | None]
    intervals: list[tuple[float, float]] = field(default_factory=list)
    on_front: bool = False
    low: bool = False
    is_flagged: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes. kind is line, step, bar or point; percent says that y is a share."""

    title: str
    x: str
    y: str
    lines: list[PlotLine]
    kind: str = "line"
    percent: bool = False

    @property
    def has_front(self) -> bool:
        """Whether its points are compared with each other."""
        return any(line.row == PARETO_FRONT_NAME for line in self.lines)


@dataclass(frozen=True)
class FigureLayout:
    """How a figure's panels stand: side by side, unless tall says one over the other, above one x axis.

    alike panels have the same axes, to be compared; named ones have each point's name beside it. A figure that is
    apart has a section of the page's own, with a chart that answers, in place of its panels.
    """

    stacked: bool = False
    shared_axes: bool = False
    label_points: bool = False
    apart: bool = False


DEFAULT_LAYOUT = FigureLayout()


@dataclass(frozen=True)
class Figure:
    """One figure; without panels, `missing` says what they would need, if anybody looks for them.

    titled says what it is called where only some of its panels are shown, if that is not its title.
    """

    name: str
    title: str
    panels: list[Panel] = field(default_factory=list)
    missing: str = ""
    layout: FigureLayout = DEFAULT_LAYOUT
    title_for_panels: Callable[[Sequence[Panel]], str] | None = None


PARETO_FRONT_NAME = "Pareto front"
"""What the line is called that stands for no row."""
EpochMetric = Callable[[EpochStats], float | None]
PointsByGammaAlpha = dict[float, dict[float, list[tuple[float, float]]]]
"""Costs and errors by gamma and alpha."""


def build_figures(rows: Sequence[ReportRow], attack: str | None) -> list[Figure]:
    """Every figure that can be drawn from records alone."""
    return [
        build_training_process_figure(rows),
        build_validation_figure(rows),
        build_backprops_figure(rows),
        build_trade_off_figure(rows, attack),
        build_alpha_gamma_figure(rows, attack),
    ]


def build_training_process_figure(rows: Sequence[ReportRow]) -> Figure:
    """The paper's six rows: how training accuracy, robustness, its gain, l_X and the Lipschitz bound go by epoch."""
    how = _validation_attack_name(rows)
    panels = [
        build_epoch_panel(rows, "training accuracy", "accuracy", lambda h: h.train_accuracy, percent=True),
        build_epoch_panel(rows, "natural accuracy, held out", "accuracy", lambda h: h.val_natural, percent=True),
        build_epoch_panel(rows, f"{how} accuracy, held out", "accuracy", lambda h: h.val_robust, percent=True),
        build_gain_panel(
            build_epoch_panel(rows, "robustness gain", "change, points", lambda h: h.val_robust, percent=True)
        ),
        build_epoch_panel(
            rows, "gradient magnitude l_X", "l_X per image", lambda h: h.magnitude / h.examples if h.k else None
        ),
        build_epoch_panel(rows, "Lipschitz bound", "log10", lambda h: h.log10_lipschitz),
    ]
    return _build_figure(
        "training-process", "The training process", panels, "runs with a history", FigureLayout(stacked=True)
    )


def build_validation_figure(rows: Sequence[ReportRow]) -> Figure:
    """Accuracy and loss on held-out images, and the training loss."""
    how = _validation_attack_name(rows)
    panels = [
        build_epoch_panel(rows, "natural accuracy, held out", "accuracy", lambda h: h.val_natural, percent=True),
        build_epoch_panel(rows, f"{how} accuracy, held out", "accuracy", lambda h: h.val_robust, percent=True),
        build_epoch_panel(rows, "natural loss, held out", "loss", lambda h: h.val_loss),
        build_epoch_panel(rows, "training loss", "loss", lambda h: h.loss),
    ]
    return replace(
        _build_figure("validation", _validation_title(panels), panels, "runs with a history"),
        title_for_panels=_validation_title,
    )


def get_figure_title(figure: Figure, panels: Sequence[Panel]) -> str:
    """What a figure is called where these of its panels are shown."""
    return figure.title_for_panels(panels) if figure.title_for_panels else figure.title


def _validation_title(panels: Sequence[Panel]) -> str:
    """What the figure on validation is called: what its panels show."""
    held = {panel.y for panel in panels if panel.lines and panel.title.endswith(", held out")}
    names = {
        ("accuracy", "loss"): "Validation accuracy and loss",
        ("accuracy",): "Validation accuracy and training loss",
        ("loss",): "Validation and training loss",
    }
    return names.get(tuple(sorted(held)), "Training loss")


def build_backprops_figure(rows: Sequence[ReportRow]) -> Figure:
    """k's staircase, and what it adds up to."""
    panels = [
        build_epoch_panel(rows, "adversarial steps k", "k", lambda h: h.k, kind="step"),
        build_epoch_panel(rows, "backprops so far", "backprops", lambda h: h.backprops),
    ]
    return _build_figure("backprops", "Backprops by epoch", panels, "runs with a history")


def build_trade_off_figure(rows: Sequence[ReportRow], attack: str | None) -> Figure:
    """Robustness against cost; a line's points are one row, and "Pareto front" are the believed ones none beats.

    Rows that were not judged alike have no front.
    """
    panels = []
    for name in ("backprops", "minutes"):
        points = [
            (row, spent, found)
            for row in rows
            if attack and (found := summarize_accuracy(row, attack)) and (spent := _get_cost(row, name))
        ]
        sound = {id(row) for row in select_rankable_rows([row for row, _, _ in points])}
        costs = [(c, found.mean) for row, c, found in points if id(row) in sound]
        best = sorted(point for point, is_good in zip(costs, find_pareto_front(costs), strict=True) if is_good)
        below = find_low_outliers([found.mean for _, _, found in points])
        lines = []
        for (row, c, a), low in zip(points, below, strict=True):
            good = id(row) in sound and (c, a.mean) in best
            lines.append(
                PlotLine(row.name, None, [c], [a.mean], [(a.low, a.high)], good, low, bool(collect_flags(row)))
            )
        if best:
            lines.append(PlotLine(PARETO_FRONT_NAME, None, [c for c, _ in best], [a for _, a in best]))
        about = f"{format_attack_name(attack or '')} accuracy against {name}{_describe_crowding(rows) if name == 'minutes' else ''}"
        panels.append(Panel(about, name, "accuracy", lines, "point", True))
    return _build_figure(
        "cost", "Robustness against cost", panels, "evaluated runs", FigureLayout(label_points=True, apart=True)
    )


def build_alpha_gamma_figure(rows: Sequence[ReportRow], attack: str | None) -> Figure:
    """M+'s error against its cost, a panel for each gamma, a line for each alpha, a point for each seed."""
    several = {
        m: found for m, found in _collect_alpha_gamma_points(rows, attack).items() if sum(map(len, found.values())) > 1
    }
    y = f"{format_attack_name(attack or '')} error"
    panels = [
        Panel(f"{method}, gamma {gamma:g}", "backprops", y, list(_build_alpha_lines(held)), "point", True)
        for method, found in several.items()
        for gamma, held in sorted(found.items(), reverse=True)
    ]
    chosen = {(row.method, row.model, found) for row in rows for run in row.runs if (found := _read_alpha_gamma(run))}
    wanted = len(chosen) > len({about[:2] for about in chosen})  # else nobody varied them
    what = "evaluated M+ runs of one method with different alpha or gamma" if wanted and not panels else ""
    return Figure("alpha-gamma", "Step size alpha and gamma", panels, what, FigureLayout(shared_axes=True))


def build_epoch_panel(
    rows: Sequence[ReportRow],
    title: str,
    y_label: str,
    metric: EpochMetric,
    *,
    kind: str = "line",
    percent: bool = False,
) -> Panel:
    """A panel of something that every epoch's record tells."""
    lines = [_build_epoch_line(row.name, run, metric) for row in rows for run in row.runs if run.history]
    return Panel(title, "epoch", y_label, [line for line in lines if any(v is not None for v in line.y)], kind, percent)


def build_gain_panel(panel: Panel) -> Panel:
    """The same panel's changes from one epoch to the next."""
    lines = [PlotLine(m.row, m.seed, m.x[1:], [_subtract(b, a) for a, b in pairwise(m.y)]) for m in panel.lines]
    return Panel(panel.title, panel.x, panel.y, [line for line in lines if line.x], "bar", panel.percent)


def figure_to_csv_rows(figure: Figure) -> list[list[Any]]:
    """A figure's data as rows of a CSV file; an empty field is a value that is not there."""
    ends = ["low", "high"] if any(line.intervals for panel in figure.panels for line in panel.lines) else []
    return [["panel", "row", "seed", "x", "y", *ends], *(row[: 5 + len(ends)] for row in _iter_csv_rows(figure))]


def _iter_csv_rows(figure: Figure) -> Iterator[list[Any]]:
    for panel in figure.panels:
        for line in panel.lines:
            for n, (x, y) in enumerate(zip(line.x, line.y, strict=True)):
                span = line.intervals[n] if line.intervals else ("", "")
                yield [panel.title, line.row, "" if line.seed is None else line.seed, x, "" if y is None else y, *span]


def _build_epoch_line(row_name: str, run: RunResults, metric: EpochMetric) -> PlotLine:
    return PlotLine(
        row_name, run.seed, [float(h.epoch + 1) for h in run.history], [_finite_or_none(metric(h)) for h in run.history]
    )


def _build_figure(
    name: str, title: str, panels: list[Panel], requirement: str, layout: FigureLayout = DEFAULT_LAYOUT
) -> Figure:
    kept = [panel for panel in panels if panel.lines]
    return Figure(name, title, kept, "" if kept else requirement, layout)


def _get_cost(row: ReportRow, unit: str) -> float | None:
    spent = summarize_cost(row)
    if spent is None:
        return None
    return spent.backprops if unit == "backprops" else spent.minutes


def _describe_crowding(rows: Sequence[ReportRow]) -> str:
    """What a title says of minutes that were taken while other jobs ran."""
    crowded = [row.crowded for row in rows if row.done]
    return "" if not any(crowded) else f", {'' if all(crowded) else 'some '}taken with several jobs at once"


def _collect_alpha_gamma_points(rows: Sequence[ReportRow], attack: str | None) -> dict[str, PointsByGammaAlpha]:
    """Every M+ run's cost and error, by its method on its network, gamma and alpha."""
    several = len({row.model for row in rows}) > 1
    found: dict[str, PointsByGammaAlpha] = {}
    for row in rows:
        for run in row.done:
            chosen = _read_alpha_gamma(run)
            if chosen and attack and attack in run.numbers:
                points = found.setdefault(f"{row.method}, {row.model}" if several else row.method, {})
                point = (run.numbers["backprops"], 1 - run.numbers[attack])
                points.setdefault(chosen[1], {}).setdefault(chosen[0], []).append(point)
    return found


def _read_alpha_gamma(run: RunResults) -> tuple[float, float] | None:
    record = run.record or {}
    schedule = record.get("method", {}).get("schedule", {})
    if "gamma" not in schedule:
        return None
    return float(schedule["alpha"]) * float(record["threat"]["eps"]), float(schedule["gamma"])


def _build_alpha_lines(points_by_alpha: dict[float, list[tuple[float, float]]]) -> Iterator[PlotLine]:
    for alpha, points in sorted(points_by_alpha.items()):
        points.sort()
        yield PlotLine(f"alpha {format_eps(alpha)}", None, [c for c, _ in points], [e for _, e in points])


def _validation_attack_name(rows: Sequence[ReportRow]) -> str:
    used = {run.record["settings"]["val_attack"] for row in rows for run in row.runs if run.record and run.history}
    return format_attack_name(used.pop()) if len(used) == 1 else "robust"


def _finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _subtract(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b
