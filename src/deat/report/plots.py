"""A report's figures as pictures, by matplotlib."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import Any

from deat.errors import UsageError
from deat.report.figures import PARETO_FRONT_NAME, Figure, FigureLayout, Panel, PlotLine
from deat.report.gallery import Gallery
from deat.utils.text import make_printable, truncate_text

MAX_LANE_NAME_CHARS = 12
"""Characters of a name beside its lane."""
LANE_GAP_FRACTION = 0.08
"""Between lanes, as a share of a lane."""


def draw_bar_lanes(ax: Any, lines: Sequence[PlotLine], get_color: Callable[[str], str]) -> float:
    """Draw every row's mean over seeds as bars up and down from a line of its own; a lane's height, in points."""
    low, high = _change_range(lines)
    step = (1 + LANE_GAP_FRACTION) * (high - low or 1.0)
    for n, line in enumerate(lines):
        held = [(x, 100 * y) for x, y in zip(line.x, line.y, strict=True) if y is not None]
        ax.axhline(-n * step, color="#c9cac4", lw=0.6, zorder=1)
        ax.bar([x for x, _ in held], [y for _, y in held], 0.75, -n * step, color=get_color(line.row))
    ax.set_yticks(
        [-n * step for n in range(len(lines))],
        [truncate_text(line.row, MAX_LANE_NAME_CHARS, where="middle") for line in lines],
        fontsize=7,
    )
    ax.set_ylim(low - (len(lines) - 1 + LANE_GAP_FRACTION) * step, high + LANE_GAP_FRACTION * step)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False, axis="y")
    return high - low


def _change_range(lines: Sequence[PlotLine]) -> tuple[float, float]:
    """The least and the greatest change in points; none is among them."""
    found = [0.0, *(100 * y for line in lines for y in line.y if y is not None)]
    return min(found), max(found)


NAME_OFFSETS = (
    (5, 3, "left", "bottom"),
    (-5, 3, "right", "bottom"),
    (7, 0, "left", "center"),
    (-7, 0, "right", "center"),
    (5, -3, "left", "top"),
    (-5, -3, "right", "top"),
    (0, 6, "center", "bottom"),
    (0, -6, "center", "top"),
)
"""Where a name may stand beside its point: by how much, in points, and what of the name stands there."""
AXIS_MARGIN_FRACTION, OUTLIER_HEIGHT_FRACTION = 0.07, 0.06
"""Of an axis that leaves points out: the room above and below, and how high those stand that lie below it."""
PixelBox = tuple[float, float, float, float]
"""Left, lower, right and upper end."""


def get_y_range(panel: Panel) -> tuple[float, float] | None:
    """The accuracies that an axis shows where some points lie far below the others; None where none does."""
    spans = [span for line in panel.lines if not line.low for span in line.intervals]
    if not any(line.low for line in panel.lines):
        return None
    low, high = min(a for a, _ in spans), max(b for _, b in spans)
    room = AXIS_MARGIN_FRACTION * (high - low)
    return max(0.0, low - 2 * room), min(1.0, high + room)


def clip_to_y_range(panel: Panel) -> Panel:
    """The same panel with what lies below its axis at the lower edge."""
    shown = get_y_range(panel)
    if shown is None:
        return panel
    edge = shown[0] + OUTLIER_HEIGHT_FRACTION * (shown[1] - shown[0])
    return replace(panel, lines=[_raise_to_edge(line, edge) for line in panel.lines])


def draw_point_names(ax: Any, panel: Panel, shorten: Callable[[str], str], get_color: Callable[[str], str]) -> None:
    """Write names beside points where there is room for them, those on the front first; the legend has them all."""
    points = [line for line in panel.lines if line.row != PARETO_FRONT_NAME]
    heights = {line.row: line.y[0] for line in clip_to_y_range(panel).lines}
    taken = [_point_box(ax, line.x[0], heights[line.row]) for line in points]
    for line in sorted(points, key=lambda line: (not line.low, not line.on_front, -(line.y[0] or 0))):
        text = f"{shorten(line.row)}{' ⚑' if line.is_flagged else ''}"
        text += f" ↓ {100 * (line.y[0] or 0):.2f} %" if line.low else ""
        at = (line.x[0], 100 * (heights[line.row] or 0))
        look = {"color": get_color(line.row), "fontsize": 7.5, "fontweight": "bold" if line.on_front else "normal"}
        for name, box in _try_name_positions(ax, text, at, look):
            if _is_free(box, taken, ax.bbox.extents):
                taken.append(box)
                break
            name.remove()


def _raise_to_edge(line: PlotLine, edge: float) -> PlotLine:
    if line.row == PARETO_FRONT_NAME:
        return replace(line, y=[None if y is None else max(y, edge) for y in line.y])
    return replace(line, y=[edge], intervals=[]) if line.low else line


def _try_name_positions(
    ax: Any, text: str, point: tuple[float, float], text_style: dict[str, Any]
) -> Iterator[tuple[Any, PixelBox]]:
    """A name at each of its spots, and the pixels that it takes there."""
    from matplotlib.patheffects import withStroke

    for x, y, side, height in NAME_OFFSETS:
        place = {"xytext": (x, y), "textcoords": "offset points", "ha": side, "va": height}
        name = ax.annotate(
            text, point, **place, **text_style, path_effects=[withStroke(linewidth=2, foreground="white")]
        )
        name.set_in_layout(False)
        yield name, tuple(name.get_window_extent().extents)


def _point_box(ax: Any, x: float, share: float | None) -> PixelBox:
    """The pixels of a point."""
    (right, up), half = ax.transData.transform((x, 100 * (share or 0))), 0.05 * ax.figure.dpi
    return right - half, up - half, right + half, up + half


def _is_free(box: PixelBox, taken: Sequence[PixelBox], bounds: Sequence[float]) -> bool:
    fits = box[0] >= bounds[0] and box[1] >= bounds[1] and box[2] <= bounds[2] + 6 and box[3] <= bounds[3] + 6
    return fits and all(box[2] < t[0] or box[0] > t[2] or box[3] < t[1] or box[1] > t[3] for t in taken)


ROW_COLORS = (
    "#2563eb",
    "#be123c",
    "#4d7c0f",
    "#c2410c",
    "#a21caf",
    "#0e7490",
    "#0b7a53",
    "#a16207",
    "#6d28d9",
    "#475569",
)
LINE_STYLES, MARKERS = ("-", "--", ":"), ("o", "s", "D")
"""They change from row to row, so that colours which some eyes take for each other differ in them."""
MATPLOTLIB_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "deat",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e2",
    "legend.frameon": False,
    "figure.dpi": 110,
    "text.parse_math": False,  # a name with dollars in it is a name
}
WRONG_COLOR = "#b42318"
MAX_PANELS_PER_ROW = 3
"""Panels that stand in one row; more of them stand in rows of two."""
INTEGER_AXES = ("epoch", "k")
"""What is counted in whole numbers."""
MAX_LEGEND_NAME_CHARS, PANEL_TITLE_WIDTH_CHARS, IMAGE_TITLE_WIDTH_CHARS = 32, 40, 24
"""Characters of a name in a legend, of a line of a panel's title, and of one above a picture."""


def check_matplotlib() -> None:
    """Refuse to begin where pictures cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError(
            "figures need matplotlib, which is not installed: pip install matplotlib, or add --no-figures."
        ) from None


def draw_figure(figure: Figure, row_names: Sequence[str], folder: Path) -> None:
    """Write a figure as NAME.svg and NAME.png; `order` gives every row its colour."""
    places = {name: i for i, name in enumerate(row_names)}
    with _saved_picture(figure.name, folder) as plt:
        canvas, axes = _create_canvas(plt, figure)
        for ax, panel in zip(axes, figure.panels, strict=True):
            _draw_panel(ax, panel, places)
        if figure.layout.stacked:
            for ax in axes[:-1]:
                ax.set_xlabel("")
        _draw_legend(canvas, axes)
        if figure.layout.label_points:
            canvas.draw_without_rendering()  # which settles where everything is
            for ax, panel in zip(axes, figure.panels, strict=True):
                draw_point_names(
                    ax,
                    panel,
                    lambda name: truncate_text(name, MAX_LEGEND_NAME_CHARS, where="middle"),
                    lambda name: _row_color(places, name),
                )


def _create_canvas(plt: Any, figure: Figure) -> tuple[Any, list[Any]]:
    """A canvas, and a pair of axes for each of a figure's panels."""
    count, layout = len(figure.panels), figure.layout
    wide = 1 if layout.stacked else count if count <= MAX_PANELS_PER_ROW else 2
    high = -(-count // wide)
    rises = [_relative_height(panel) for panel in figure.panels] if layout.stacked else [1.0] * high
    share = {"sharex": layout.stacked or layout.shared_axes, "sharey": layout.shared_axes, "height_ratios": rises}
    size = _figure_size_inches(layout, wide, rises)
    canvas, axes = plt.subplots(high, wide, figsize=size, layout="constrained", squeeze=False, **share)
    for ax in list(axes.flat)[count:]:
        ax.remove()
    return canvas, list(axes.flat)[:count]


def _figure_size_inches(layout: FigureLayout, columns: int, row_heights: Sequence[float]) -> tuple[float, float]:
    """A canvas's width and height in inches."""
    if layout.stacked:
        return 6.4, 1.55 * sum(row_heights) + 0.6
    each = (4.2, 3.4) if layout.label_points else (3.4, 2.9)
    return max(4.6, each[0] * columns), each[1] * len(row_heights) + 0.2


def draw_gallery(gallery: Gallery, folder: Path) -> None:
    """Write the gallery as gallery.svg and gallery.png: one row of three pictures an image."""
    with _saved_picture("gallery", folder) as plt:
        count = len(gallery.tiles)
        canvas, axes = plt.subplots(count, 3, figsize=(4.6, 1.6 * count), layout="constrained", squeeze=False)
        for row, tile in zip(axes, gallery.tiles, strict=True):
            heads = (f"{tile.label}, seen as {tile.before}", "perturbation", f"seen as {tile.after}")
            inks = ("black", "black", "black" if tile.is_robust else WRONG_COLOR)
            for ax, image, head, ink in zip(row, tile.images, heads, inks, strict=True):
                ax.imshow(image, interpolation="nearest")
                ax.set_axis_off()
                ax.set_title(fill(make_printable(head), IMAGE_TITLE_WIDTH_CHARS), fontsize=8, color=ink)
        about = f"{gallery.row}, {gallery.attack}; a perturbation's grey is none; images are {gallery.choice}"
        canvas.suptitle(fill(make_printable(about), 2 * PANEL_TITLE_WIDTH_CHARS - 10), fontsize=8)


@contextmanager
def _saved_picture(name: str, folder: Path) -> Iterator[Any]:
    """pyplot for one picture, written when it is done, with nothing left behind."""
    import matplotlib as mpl

    with mpl.rc_context(MATPLOTLIB_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a name in a script that the font lacks
        mpl.use("agg", force=False)
        import matplotlib.pyplot as plt

        try:
            yield plt
            plt.savefig(folder / f"{name}.svg", metadata={"Date": None})
            plt.savefig(folder / f"{name}.png", metadata={"Software": None})
        finally:
            plt.close()


def _draw_panel(ax: Any, panel: Panel, row_indices: dict[str, int]) -> None:
    rows: dict[str, list[PlotLine]] = {}
    for line in clip_to_y_range(panel).lines:
        rows.setdefault(line.row, []).append(line)
    ax.set_title(fill(make_printable(panel.title), PANEL_TITLE_WIDTH_CHARS), loc="left")
    ax.set_xlabel(panel.x)
    if panel.kind == "bar":
        _draw_bars(ax, panel, [average_lines(lines) for lines in rows.values()], row_indices)
        return
    ax.set_ylabel(get_y_label(panel))
    for n, (name, lines) in enumerate(rows.items()):
        place, shift = row_indices.get(name, n), (n - (len(rows) - 1) / 2) * min(2.0, 8 / len(rows))
        if len(lines) > 1:
            for line in lines:
                _draw_line(ax, panel, line, place, lw=0.6, alpha=0.35, shift=shift)
            lines = [average_lines(lines)]
        _draw_line(
            ax, panel, lines[0], place, label=truncate_text(name, MAX_LEGEND_NAME_CHARS, where="middle"), shift=shift
        )
    _format_axes(ax, panel)


def _draw_bars(ax: Any, panel: Panel, lines: Sequence[PlotLine], row_indices: dict[str, int]) -> None:
    """Lanes of bars, with their scale in the title; names beside them stand for values on the axis."""
    high = draw_bar_lanes(ax, lines, lambda name: _row_color(row_indices, name))
    several = ", means over seeds" if len(panel.lines) > len(lines) else ""
    ax.set_title(make_printable(f"{panel.title}{several}; a lane is {high:.0f} points high"), loc="left")


def _row_color(row_indices: dict[str, int], name: str) -> str:
    return ROW_COLORS[row_indices.get(name, 0) % len(ROW_COLORS)]


def _relative_height(panel: Panel) -> float:
    """How tall a panel is beside others: lanes need room each."""
    return max(1.0, 0.2 * len({line.row for line in panel.lines})) if panel.kind == "bar" else 1.0


def _format_axes(ax: Any, panel: Panel) -> None:
    """Ticks at whole epochs and steps, and costs that lie far apart on a logarithmic axis."""
    for axis, name in ((ax.xaxis, panel.x), (ax.yaxis, panel.y)):
        if name in INTEGER_AXES:
            axis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    if shown := get_y_range(panel):
        ax.set_ylim(100 * shown[0], 100 * shown[1])
    costs = [x for line in panel.lines for x in line.x]
    if panel.kind == "point" and max(costs) > 6 * min(costs) > 0:
        _use_log_x_axis(ax)
    elif panel.kind == "point":
        ax.locator_params(axis="x", nbins=5)  # large numbers are wide


def _shift_line(ax: Any, drawn_line: Any, offset_points: float) -> None:
    """Move a drawn line by a hair: where values are few, equal ones then lie beside each other."""
    from matplotlib.transforms import offset_copy

    drawn_line.set_transform(offset_copy(ax.transData, fig=ax.figure, y=offset_points, units="points"))


def get_y_label(panel: Panel) -> str:
    """What stands beside a panel's y axis: with its unit, and with why lines do not lie at their whole numbers."""
    if panel.kind == "step" and len({line.row for line in panel.lines}) > 1:
        return f"{panel.y}; lines moved a little, so that all show"
    return f"{panel.y}, %" if get_unit(panel) == "%" else panel.y


def get_unit(panel: Panel) -> str:
    """The unit of a panel's values: points where y says so, as a difference of shares does, else percent for shares."""
    return "points" if panel.y.endswith(", points") else "%" if panel.percent else ""


def _use_log_x_axis(ax: Any) -> None:
    """A logarithmic axis with plain numbers on it."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())


def average_lines(lines: Sequence[PlotLine]) -> PlotLine:
    """The mean over a row's seeds, of those that got as far."""
    held: dict[float, list[float]] = {}
    for line in lines:
        for x, y in zip(line.x, line.y, strict=True):
            held.setdefault(x, []).extend([] if y is None else [y])
    return PlotLine(lines[0].row, None, sorted(held), [fmean(held[x]) if held[x] else None for x in sorted(held)])


def _draw_line(ax: Any, panel: Panel, line: PlotLine, row_index: int, shift: float, **look: Any) -> None:
    y = [float("nan") if v is None else 100 * v if panel.percent else v for v in line.y]
    look = {"color": ROW_COLORS[row_index % len(ROW_COLORS)], "lw": 1.6, **look}
    if line.row == PARETO_FRONT_NAME:
        ax.step(
            line.x, y, where="post", color="#8a8f98", ls="--", lw=1, label=f"{PARETO_FRONT_NAME} (filled)", zorder=1
        )
    elif panel.kind == "point":
        inside = look["color"] if line.on_front or not panel.has_front else "white"
        over = 2.1 if line.on_front else 2  # no other point hides one on the front
        ax.plot(line.x, y, ls="none", marker=MARKERS[row_index % 3], markerfacecolor=inside, zorder=over, **look)
        for x, (low, high) in zip(line.x, line.intervals, strict=False):
            ax.vlines(x, 100 * low, 100 * high, color=look["color"], lw=1, alpha=0.5, zorder=1)
    else:
        style = "steps-mid" if panel.kind == "step" else "default"
        over = 2 + 0.1 * (row_index % 3)  # of lines that lie on each other the broken one is above
        (drawn,) = ax.plot(line.x, y, ls=LINE_STYLES[row_index % 3], drawstyle=style, zorder=over, **look)
        if panel.kind == "step":
            _shift_line(ax, drawn, shift)


def _draw_legend(canvas: Any, axes: Any) -> None:
    """One legend for all panels; rows whose names are cut to the same differ in how they are drawn."""
    found: dict[Any, Any] = {}
    for ax in axes:
        for handle, name in zip(*ax.get_legend_handles_labels(), strict=True):
            found.setdefault((name, handle.get_color(), handle.get_linestyle(), handle.get_marker()), handle)
    names = [name for name, *_ in found]
    width, height = canvas.get_size_inches()
    columns = max(1, min(len(found), int(width / (0.5 + 0.07 * max(map(len, names))))))
    canvas.set_size_inches(width, height + 0.17 * -(-len(found) // columns))
    canvas.legend(found.values(), names, loc="outside lower center", ncols=columns, fontsize=8)
