"""The data of every figure: panels of lines, which matplotlib draws, CSV files contain and the page embeds."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from deat.report.problems import collect_flags
from deat.report.row_statistics import (
    find_low_outliers,
    find_pareto_front,
    format_attack_name,
    summarize_accuracy,
    summarize_cost,
)
from deat.report.run_results import ReportRow, RunResults
from deat.report.significance import select_rankable_rows
from deat.tasks import build_task
from deat.training.epoch_records import EpochStats, TrainingImages, get_training_images
from deat.utils.text import format_eps

PARETO_FRONT_NAME = "Pareto front"
"""The name of the line that belongs to no row."""
EpochMetric = Callable[[EpochStats], float | None]
PointsByGammaAlpha = dict[float, dict[float, list[tuple[float, float]]]]
"""(cost, error) pairs by gamma and alpha."""


@dataclass(frozen=True)
class PlotLine:
    """One run's values in a panel, or one row's point.

    Attributes:
        row: The row's name.
        seed: The run's seed; None for a whole row.
        x: The positions.
        y: The values; None where there is none.
        intervals: The values' 95 % intervals, if known.
        on_front: Whether the point is on the Pareto front.
        is_low_outlier: Whether the point lies far below the others.
        is_flagged: Whether a sanity flag was raised for the row.
    """

    row: str
    seed: int | None
    x: list[float]
    y: list[float | None]
    intervals: list[tuple[float, float]] = field(default_factory=list)
    on_front: bool = False
    is_low_outlier: bool = False
    is_flagged: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        title: The panel's title.
        x_label: What the x axis shows.
        y_label: What the y axis shows, without a unit.
        lines: The lines or points.
        kind: line, step, bar or point.
        percent: Whether values are shares, to be shown in percent.
        name: The end of the names of the panel's own files.
        x_labels: Every position on the x axis with its label; empty for ticks at round numbers.
    """

    title: str
    x_label: str
    y_label: str
    lines: list[PlotLine]
    kind: str = "line"
    percent: bool = False
    name: str = ""
    x_labels: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True)
class FigureLayout:
    """How a figure's panels are arranged.

    Attributes:
        stacked: Below each other with one x axis, instead of next to each other.
        shared_axes: All panels have the same axes, so that they can be compared.
        label_points: Each point has its row's name next to it.
        has_own_section: The page shows an interactive chart in a section of its own instead of the panels.
    """

    stacked: bool = False
    shared_axes: bool = False
    label_points: bool = False
    has_own_section: bool = False


DEFAULT_LAYOUT = FigureLayout()


@dataclass(frozen=True)
class Figure:
    """One figure of a report.

    Attributes:
        name: The name of its files.
        title: Its title.
        panels: Its panels; none if there is no data.
        missing: What data the figure lacks; empty if there is nothing to say.
        layout: How the panels are arranged.
        title_for_panels: Gives the title where only some panels are shown, if it depends on them.
    """

    name: str
    title: str
    panels: list[Panel] = field(default_factory=list)
    missing: str = ""
    layout: FigureLayout = DEFAULT_LAYOUT
    title_for_panels: Callable[[Sequence[Panel]], str] | None = None


def build_figures(rows: Sequence[ReportRow], attack: str | None) -> list[Figure]:
    """Build every figure that needs only the records of runs.

    Args:
        rows: The rows of a report.
        attack: The attack that rows are ranked by; None if there are no accuracies.

    Returns:
        The figures; those without data have no panels.
    """
    return [
        build_training_process_figure(rows),
        build_validation_figure(rows),
        build_backprops_figure(rows),
        build_trade_off_figure(rows, attack),
        build_alpha_gamma_figure(rows, attack),
    ]


def build_training_process_figure(rows: Sequence[ReportRow]) -> Figure:
    """Build the paper's panels by epoch: training and validation accuracy, robustness gain, l_X, Lipschitz bound.

    Training accuracy on clean images and under attack have a panel each.
    """
    panels = [
        *_build_training_accuracy_panels(rows),
        *_build_validation_accuracy_panels(rows),
        build_gain_panel(
            build_epoch_panel(
                rows,
                "robustness gain",
                "change, points",
                lambda e: e.val_robust,
                percent=True,
                name="robustness-gain",
            )
        ),
        build_epoch_panel(
            rows,
            "gradient magnitude l_X",
            "l_X per example",
            lambda e: e.magnitude / e.examples if e.k else None,
            name="gradient-magnitude",
        ),
        build_epoch_panel(rows, "Lipschitz bound", "log10", lambda e: e.log10_lipschitz, name="lipschitz-bound"),
    ]
    return _build_figure(
        "training-process", "The training process", panels, "runs with a history", FigureLayout(stacked=True)
    )


def build_validation_figure(rows: Sequence[ReportRow]) -> Figure:
    """Build validation accuracy and loss and the training loss by epoch."""
    panels = [
        *_build_validation_accuracy_panels(rows),
        build_epoch_panel(rows, "held-out loss (clean)", "loss", lambda e: e.val_loss, name="held-out-loss"),
        build_epoch_panel(rows, "train loss (as minimised)", "loss", lambda e: e.loss, name="train-loss"),
    ]
    figure = _build_figure("validation", _validation_title(panels), panels, "runs with a history")
    return replace(figure, title_for_panels=_validation_title)


def build_backprops_figure(rows: Sequence[ReportRow]) -> Figure:
    """Build the adversarial steps k and the backprops so far, by epoch."""
    panels = [
        build_epoch_panel(rows, "adversarial steps k", "k", lambda e: e.k, kind="step", name="steps"),
        build_epoch_panel(rows, "backprops so far", "backprops", lambda e: e.backprops, name="backprops"),
    ]
    return _build_figure("backprops", "Backprops by epoch", panels, "runs with a history")


def build_trade_off_figure(rows: Sequence[ReportRow], attack: str | None) -> Figure:
    """Build robustness against cost, in backprops and in minutes.

    Args:
        rows: The rows of a report.
        attack: The attack on the y axis.

    Returns:
        A figure with one point for each row and a line for the Pareto front. Rows with a sanity flag are not on the
        front, and rows that cannot be compared have none.
    """
    panels = []
    for unit in ("backprops", "minutes"):
        points = [
            (row, cost, cell)
            for row in rows
            if attack and (cell := summarize_accuracy(row, attack)) and (cost := _get_cost(row, unit))
        ]
        rankable = {id(row) for row in select_rankable_rows([row for row, _, _ in points])}
        candidates = [(cost, cell.mean) for row, cost, cell in points if id(row) in rankable]
        front = sorted(
            point for point, is_best in zip(candidates, find_pareto_front(candidates), strict=True) if is_best
        )
        outliers = find_low_outliers([cell.mean for _, _, cell in points])
        lines = [
            PlotLine(
                row.name,
                None,
                [cost],
                [cell.mean],
                [(cell.low, cell.high)],
                on_front=id(row) in rankable and (cost, cell.mean) in front,
                is_low_outlier=is_outlier,
                is_flagged=bool(collect_flags(row)),
            )
            for (row, cost, cell), is_outlier in zip(points, outliers, strict=True)
        ]
        if front:
            lines.append(PlotLine(PARETO_FRONT_NAME, None, [cost for cost, _ in front], [mean for _, mean in front]))
        concurrency = _describe_concurrency(rows) if unit == "minutes" else ""
        y_label = f"{format_attack_name(attack or '')} accuracy"
        title = f"{y_label} against {unit}{concurrency}"
        panels.append(Panel(title, unit, y_label, lines, "point", True, name=unit))
    layout = FigureLayout(label_points=True, has_own_section=True)
    return _build_figure("cost", "Robustness against cost", panels, "evaluated runs", layout)


def build_alpha_gamma_figure(rows: Sequence[ReportRow], attack: str | None) -> Figure:
    """Build the error of M+ methods against cost: a panel for each gamma, a line for each alpha, a point for each seed.

    Args:
        rows: The rows of a report.
        attack: The attack of the error on the y axis.

    Returns:
        A figure with the methods that have several values of alpha or gamma.
    """
    points_by_method = {
        method: points
        for method, points in _collect_alpha_gamma_points(rows, attack).items()
        if sum(map(len, points.values())) > 1
    }
    y_label = f"{format_attack_name(attack or '')} error"
    panels = [
        Panel(f"{method}, gamma {gamma:g}", "backprops", y_label, list(_build_alpha_lines(points)), "point", True)
        for method, points_by_gamma in points_by_method.items()
        for gamma, points in sorted(points_by_gamma.items(), reverse=True)
    ]
    panels = [replace(panel, name=str(n)) for n, panel in enumerate(panels, 1)]
    settings = {(row.method, row.model, pair) for row in rows for run in row.runs if (pair := _read_alpha_gamma(run))}
    is_varied = len(settings) > len({(method, model) for method, model, _ in settings})
    missing = "evaluated M+ runs of one method with different alpha or gamma" if is_varied and not panels else ""
    return Figure("alpha-gamma", "Step size alpha and gamma", panels, missing, FigureLayout(shared_axes=True))


def build_epoch_panel(
    rows: Sequence[ReportRow],
    title: str,
    y_label: str,
    metric: EpochMetric,
    *,
    kind: str = "line",
    percent: bool = False,
    name: str = "",
    images: TrainingImages | None = None,
) -> Panel:
    """Build a panel of a value by epoch.

    Args:
        rows: The rows of a report.
        title: The panel's title.
        y_label: What the y axis shows.
        metric: Gives an epoch's value, or None if there is none.
        kind: How the panel is drawn: line, step or bar.
        percent: Whether values are shares.
        name: The end of the names of the panel's own files.
        images: Only epochs that trained on such images have a value; by default all have.

    Returns:
        A panel with a line for each run that has such values.
    """
    lines = [
        PlotLine(
            row.name,
            run.seed,
            [float(epoch.epoch + 1) for epoch in run.history],
            [
                _finite_or_none(metric(epoch)) if images in (None, _training_images(run, epoch)) else None
                for epoch in run.history
            ],
        )
        for row in rows
        for run in row.runs
    ]
    lines = [line for line in lines if any(value is not None for value in line.y)]
    return Panel(title, "epoch", y_label, lines, kind, percent, name)


def build_radius_panel(title: str, lines: list[PlotLine]) -> Panel:
    """Build a panel of accuracy by radius, with the radii of the lines as ticks.

    Args:
        title: The panel's title.
        lines: Lines with radii as positions.

    Returns:
        A panel with radii such as 8/255 on its axis.
    """
    labels = tuple((x, format_eps(x)) for x in sorted({x for line in lines for x in line.x}))
    return Panel(title, "radius eps", "accuracy under attack", lines, percent=True, x_labels=labels)


def build_gain_panel(panel: Panel) -> Panel:
    """Build a panel of bars with a panel's changes from one epoch to the next."""
    lines = []
    for line in panel.lines:
        changes = [None if a is None or b is None else b - a for a, b in pairwise(line.y)]
        lines.append(PlotLine(line.row, line.seed, line.x[1:], changes))
    return replace(panel, lines=[line for line in lines if line.x], kind="bar")


def split_panels(figure: Figure) -> list[Figure]:
    """Split a figure into one figure for each panel; nothing if it has only one.

    Args:
        figure: The figure.

    Returns:
        Figures with one panel each. Their names begin with the figure's.
    """
    if len(figure.panels) < 2:
        return []
    layout = replace(figure.layout, stacked=False, shared_axes=False)
    return [Figure(f"{figure.name}-{panel.name}", panel.title, [panel], layout=layout) for panel in figure.panels]


def get_figure_title(figure: Figure, panels: Sequence[Panel]) -> str:
    """Return a figure's title where only these of its panels are shown."""
    return figure.title_for_panels(panels) if figure.title_for_panels else figure.title


def get_y_label(panel: Panel) -> str:
    """Return the label of a panel's y axis: with its unit, and with a remark if lines are shifted."""
    if panel.kind == "step" and len({line.row for line in panel.lines}) > 1:
        return f"{panel.y_label}; lines are shifted to be visible"
    return f"{panel.y_label}, %" if get_unit(panel) == "%" else panel.y_label


def get_unit(panel: Panel) -> str:
    """Return the unit of a panel's values: points if its label says so, % for other shares, or nothing."""
    return "points" if panel.y_label.endswith(", points") else "%" if panel.percent else ""


def figure_to_csv_rows(figure: Figure) -> list[list[Any]]:
    """Return a figure's data as rows of a CSV file; a missing value is an empty field."""
    has_intervals = any(line.intervals for panel in figure.panels for line in panel.lines)
    ends = ["low", "high"] if has_intervals else []
    return [["panel", "row", "seed", "x", "y", *ends], *(row[: 5 + len(ends)] for row in _iter_csv_rows(figure))]


def _iter_csv_rows(figure: Figure) -> Iterator[list[Any]]:
    for panel in figure.panels:
        for line in panel.lines:
            for n, (x, y) in enumerate(zip(line.x, line.y, strict=True)):
                interval = line.intervals[n] if line.intervals else ("", "")
                seed = "" if line.seed is None else line.seed
                yield [panel.title, line.row, seed, x, "" if y is None else y, *interval]


def _build_figure(
    name: str, title: str, panels: list[Panel], requirement: str, layout: FigureLayout = DEFAULT_LAYOUT
) -> Figure:
    panels = [panel for panel in panels if panel.lines]
    return Figure(name, title, panels, "" if panels else requirement, layout)


def _training_images(run: RunResults, epoch: EpochStats) -> TrainingImages:
    return get_training_images(epoch.k, (run.record or {}).get("method"))


def _build_training_accuracy_panels(rows: Sequence[ReportRow]) -> list[Panel]:
    """Training accuracy in a panel for each kind of training images."""
    metric, is_percent = _describe_metric(rows, training=True)
    y_labels: dict[TrainingImages, str] = {
        "clean": f"clean {metric}",
        "under attack": f"{metric} under attack",
        "random start": f"{metric} on noise",
    }
    return [
        build_epoch_panel(
            rows,
            f"train ({images})",
            y_label,
            lambda e: e.train_accuracy,
            percent=is_percent,
            name=f"train-{images.replace(' ', '-')}",
            images=images,
        )
        for images, y_label in y_labels.items()
    ]


def _build_validation_accuracy_panels(rows: Sequence[ReportRow]) -> list[Panel]:
    """Accuracy on held-out images: clean, and under the attack of validation."""
    attack = _validation_attack_name(rows)
    metric, is_percent = _describe_metric(rows)
    return [
        build_epoch_panel(
            rows,
            "held out (clean)",
            f"clean {metric}",
            lambda e: e.val_natural,
            percent=is_percent,
            name="held-out-clean",
        ),
        build_epoch_panel(
            rows,
            f"held out (under {attack})",
            f"{metric} under {attack}",
            lambda e: e.val_robust,
            percent=is_percent,
            name="held-out-under-attack",
        ),
    ]


def _describe_metric(rows: Sequence[ReportRow], training: bool = False) -> tuple[str, bool]:
    """What the panels of accuracies show, and whether it is in percent; training accuracy is a share for every task."""
    tasks = {
        task.name: task for row in rows for run in row.runs if (task := build_task((run.record or {}).get("task")))
    }
    graded = [task for task in tasks.values() if task.is_graded]
    if training or len(graded) != len(tasks) or not graded:
        return "accuracy", True
    return " or ".join(task.metric_names[0] for task in graded), all("%" in t.format_metric(0.5) for t in graded)


def _validation_title(panels: Sequence[Panel]) -> str:
    """The title of the validation figure where these panels are shown."""
    held_out = {
        "loss" if panel.y_label == "loss" else "accuracy" for panel in panels if panel.lines and "held" in panel.name
    }
    titles = {
        ("accuracy", "loss"): "Validation accuracy and loss",
        ("accuracy",): "Validation accuracy and training loss",
        ("loss",): "Validation and training loss",
    }
    return titles.get(tuple(sorted(held_out)), "Training loss")


def _validation_attack_name(rows: Sequence[ReportRow]) -> str:
    attacks = {run.record["settings"]["val_attack"] for row in rows for run in row.runs if run.record and run.history}
    return format_attack_name(attacks.pop()) if len(attacks) == 1 else "attack"


def _get_cost(row: ReportRow, unit: str) -> float | None:
    cost = summarize_cost(row)
    if cost is None:
        return None
    return cost.backprops if unit == "backprops" else cost.minutes


def _describe_concurrency(rows: Sequence[ReportRow]) -> str:
    """The part of a title that says which minutes were measured while other jobs ran."""
    concurrent = [row.ran_concurrently for row in rows if row.finished_runs]
    return f", {'' if all(concurrent) else 'some '}taken with several jobs at once" if any(concurrent) else ""


def _collect_alpha_gamma_points(rows: Sequence[ReportRow], attack: str | None) -> dict[str, PointsByGammaAlpha]:
    """Cost and error of each M+ run by method (with the network's name if there are several), gamma and alpha."""
    has_several_models = len({row.model for row in rows}) > 1
    points: dict[str, PointsByGammaAlpha] = {}
    for row in rows:
        method = f"{row.method}, {row.model}" if has_several_models else row.method
        for run in row.finished_runs:
            alpha_gamma = _read_alpha_gamma(run)
            if alpha_gamma and attack and attack in run.metrics:
                alpha, gamma = alpha_gamma
                point = (run.metrics["backprops"], 1 - run.metrics[attack])
                points.setdefault(method, {}).setdefault(gamma, {}).setdefault(alpha, []).append(point)
    return points


def _read_alpha_gamma(run: RunResults) -> tuple[float, float] | None:
    record = run.record or {}
    schedule = record.get("method", {}).get("schedule", {})
    if "gamma" not in schedule:
        return None
    return float(schedule["alpha"]) * float(record["threat"]["eps"]), float(schedule["gamma"])


def _build_alpha_lines(points_by_alpha: dict[float, list[tuple[float, float]]]) -> Iterator[PlotLine]:
    for alpha, points in sorted(points_by_alpha.items()):
        points = sorted(points)
        yield PlotLine(f"alpha {format_eps(alpha)}", None, [cost for cost, _ in points], [err for _, err in points])


def _finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
