"""A report's figures as PDF, SVG and PNG files, drawn by matplotlib."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import Any

from deat.report.figure_data import PARETO_FRONT_NAME, Figure, FigureLayout, Panel, PlotLine, get_y_label, split_panels
from deat.report.gallery import Gallery, Tile, name_tiles
from deat.utils.text import make_printable, truncate_text

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
"""The rows' colours, in order; page.css has the same."""
LINE_STYLES, MARKERS = ("-", "--", ":"), ("o", "s", "D")
"""They change from row to row, so that rows whose colours look alike to a reader still differ."""
FRONT_COLOR, LANE_COLOR, WRONG_COLOR = "#8a8f98", "#c9cac4", "#b42318"
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
    "pdf.fonttype": 42,  # TrueType: many publishers refuse Type 3 fonts
}
FILE_METADATA: dict[str, dict[str, Any]] = {
    "pdf": {"CreationDate": None},
    "svg": {"Date": None},
    "png": {"Software": None},
}
"""The formats of a figure's files, and what is left out of each so that equal figures are equal files."""
FONT_LAYOUT_TABLES = ("GDEF", "GPOS", "GSUB", "MATH", "kern")
"""Tables of a font by which text is laid out. A PDF has the position of every glyph, and no use for them."""
MAX_PANELS_PER_ROW = 3
"""More panels than this stand in rows of two."""
INTEGER_AXES = ("epoch", "k")
"""Labels of axes whose values are integers."""
MAX_LEGEND_NAME_CHARS, PANEL_TITLE_WIDTH_CHARS, IMAGE_TITLE_WIDTH_CHARS = 32, 40, 24
AXIS_LABEL_WIDTH_CHARS = 20
MAX_LANE_NAME_CHARS = 18
"""Characters of a row's name beside bars and at the end of a line."""
MAX_NAMED_LINES = 16
"""Panels of more lines have no names at their ends."""
END_NAME_POINTS, END_NAME_X = 8.0, 1.03
"""The height of a name at the end of a line, and where it begins relative to the width of the axes."""
MAX_LABELLED_TICKS = 8
"""Labels such as 12/255 for which an axis has room."""
USUAL_NAME_GAP, CROWDED_DISTANCE = 0.05, 0.2
"""Relative to the height of axes: the usual distance of names, and how far from its line a name needs a legend."""
LANE_GAP_FRACTION = 0.08
"""The space between lanes of bars, relative to a lane's height."""
AXIS_MARGIN_FRACTION, OUTLIER_HEIGHT_FRACTION = 0.07, 0.06
"""Of an axis that outliers lie below: its margins, and how high the outliers are drawn above its end."""
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
"""Positions to try for a point's name: x and y offset in points, horizontal and vertical alignment."""
PixelBox = tuple[float, float, float, float]
"""Left, lower, right and upper end."""


def has_matplotlib() -> bool:
    """Return whether figures can be drawn as files; the page draws its own."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def draw_figure(figure: Figure, row_names: Sequence[str], folder: Path) -> None:
    """Draw a figure as NAME.pdf, NAME.svg and NAME.png, and each of several panels as NAME-PANEL.*.

    Args:
        figure: A figure with panels.
        row_names: All rows of the report, in order; a row's place gives its colour.
        folder: Where the files go.
    """
    row_indices = {name: i for i, name in enumerate(row_names)}
    axes = _draw_panels(figure, row_indices, folder)
    limits = (axes[0].get_xlim(), axes[0].get_ylim()) if figure.layout.shared_axes else None
    for single in split_panels(figure):
        _draw_panels(single, row_indices, folder, limits)


def draw_gallery(gallery: Gallery, folder: Path) -> None:
    """Draw a gallery as gallery.pdf, .svg and .png: a row of three pictures for each image, which has its own files too.

    Args:
        gallery: A gallery with tiles.
        folder: Where the files go.
    """
    text = (
        f"{gallery.row}, {gallery.attack}; perturbations are shown at full contrast, and grey is no change; examples are "
        f"{gallery.selection_note}"
    )
    _draw_tiles("gallery", gallery.tiles, folder, text)
    for name, tile in name_tiles(gallery):
        _draw_tiles(name, [tile], folder)


def _draw_tiles(name: str, tiles: Sequence[Tile], folder: Path, text: str = "") -> None:
    """A row of three pictures for each attacked image, below a text."""
    with _saved_picture(name, folder) as plt:
        columns = max(len(tile.images) for tile in tiles)
        size = (4.6 * columns / 3, 1.6 * len(tiles) + 0.2)
        canvas, axes = plt.subplots(len(tiles), columns, figsize=size, layout="constrained", squeeze=False)
        for row, tile in zip(axes, tiles, strict=True):
            before = f"{tile.label}, seen as {tile.natural_prediction}"
            named = (before, "perturbation", f"seen as {tile.adversarial_prediction}")
            titles = named if tile.label else tile.captions
            attacked = "black" if tile.is_robust else WRONG_COLOR
            colors = ("black", "black", attacked, "black", "black", attacked)[: len(tile.images)]
            for ax, image, title, color in zip(row, tile.images, titles, colors, strict=True):
                ax.imshow(image, interpolation="nearest")
                ax.set_axis_off()
                ax.set_title(fill(make_printable(title), IMAGE_TITLE_WIDTH_CHARS), fontsize=8, color=color)
        if text:
            canvas.suptitle(fill(make_printable(text), 2 * PANEL_TITLE_WIDTH_CHARS - 10), fontsize=8)


def draw_point_names(ax: Any, panel: Panel, shorten: Callable[[str], str], get_color: Callable[[str], str]) -> None:
    """Write names next to points where there is room, those on the Pareto front first; the legend has all names.

    Args:
        ax: The panel's axes, with everything else drawn.
        panel: The panel.
        shorten: Gives the text for a row's name.
        get_color: Gives a row's colour.
    """
    points = [line for line in panel.lines if line.row != PARETO_FRONT_NAME]
    heights = {line.row: line.y[0] for line in _clip_to_y_range(panel).lines}
    taken = [_point_box(ax, line.x[0], heights[line.row]) for line in points]
    for line in sorted(points, key=lambda line: (not line.is_low_outlier, not line.on_front, -(line.y[0] or 0))):
        text = f"{shorten(line.row)}{' ⚑' if line.is_flagged else ''}"
        text += f" ↓ {100 * (line.y[0] or 0):.2f} %" if line.is_low_outlier else ""
        point = (line.x[0], 100 * (heights[line.row] or 0))
        weight = "bold" if line.on_front else "normal"
        style = {"color": get_color(line.row), "fontsize": 7.5, "fontweight": weight}
        for name, box in _try_name_positions(ax, text, point, style):
            if _is_free(box, taken, ax.bbox.extents):
                taken.append(box)
                break
            name.remove()


def average_lines(lines: Sequence[PlotLine]) -> PlotLine:
    """Average a row's lines over its seeds; where some seeds have no value, over the others."""
    values_by_x: dict[float, list[float]] = {}
    for line in lines:
        for x, y in zip(line.x, line.y, strict=True):
            values_by_x.setdefault(x, []).extend([] if y is None else [y])
    xs = sorted(values_by_x)
    return PlotLine(lines[0].row, None, xs, [fmean(values_by_x[x]) if values_by_x[x] else None for x in xs])


@contextmanager
def _saved_picture(name: str, folder: Path) -> Iterator[Any]:
    """pyplot for one picture, which is saved at the end."""
    import matplotlib as mpl

    with mpl.rc_context(MATPLOTLIB_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a name in a script that the font lacks
        mpl.use("agg", force=False)
        import matplotlib.pyplot as plt

        try:
            yield plt
            _fix_layout(plt.gcf())
            for kind, metadata in FILE_METADATA.items():
                with _without_font_layout_tables():
                    plt.gcf().savefig(folder / f"{name}.{kind}", metadata=metadata)
        finally:
            plt.close()


@contextmanager
def _without_font_layout_tables() -> Iterator[None]:
    """Embed fonts in a PDF without the tables of FONT_LAYOUT_TABLES: to read them takes two thirds of an embedding."""
    from fontTools.subset import Options

    dropped = getattr(Options, "_drop_tables_default", None)  # matplotlib has no setting for it
    if dropped is None:
        yield
        return
    Options._drop_tables_default = [*dropped, *FONT_LAYOUT_TABLES]
    try:
        yield
    finally:
        Options._drop_tables_default = dropped


def _fix_layout(canvas: Any) -> None:
    """Place everything once, since doing it again for each file takes most of the time."""
    if (engine := canvas.get_layout_engine()) is not None:
        engine.execute(canvas)
        canvas.set_layout_engine(None)  # "none" leaves one for which savefig draws everything once more


def _draw_panels(
    figure: Figure,
    row_indices: dict[str, int],
    folder: Path,
    limits: tuple[tuple[float, float], tuple[float, float]] | None = None,
) -> list[Any]:
    """Draw a figure's panels into its files, with these limits of both axes if they are given; return the axes."""
    with _saved_picture(figure.name, folder) as plt:
        canvas, axes = _create_canvas(plt, figure)
        end_names = []
        for ax, panel in zip(axes, figure.panels, strict=True):
            lines = _draw_panel(ax, panel, row_indices)
            end_names.append(_add_end_names(ax, lines) if has_end_names(figure, panel) else [])
            if limits:
                ax.set(xlim=limits[0], ylim=limits[1])
        if figure.layout.stacked:
            for ax in axes[:-1]:
                ax.set_xlabel("")
        if not all(_has_all_names(figure, panel) for panel in figure.panels):
            _draw_legend(canvas, axes)
        _fix_layout(canvas)
        for ax, panel, names in zip(axes, figure.panels, end_names, strict=True):
            _spread_end_names(ax, names)
            if figure.layout.label_points:
                draw_point_names(
                    ax,
                    panel,
                    lambda name: truncate_text(name, MAX_LEGEND_NAME_CHARS, where="middle"),
                    lambda name: _row_color(row_indices, name),
                )
        return axes


def _create_canvas(plt: Any, figure: Figure) -> tuple[Any, list[Any]]:
    """A canvas, and axes for each of a figure's panels."""
    count, layout = len(figure.panels), figure.layout
    columns = 1 if layout.stacked else count if count <= MAX_PANELS_PER_ROW else 2
    rows = -(-count // columns)
    heights = [_relative_height(figure, panel) for panel in figure.panels] if layout.stacked else [1.0] * rows
    shared = {"sharex": layout.stacked or layout.shared_axes, "sharey": layout.shared_axes}
    canvas, axes = plt.subplots(
        rows,
        columns,
        figsize=_figure_size_inches(layout, columns, heights),
        layout="constrained",
        squeeze=False,
        height_ratios=heights,
        **shared,
    )
    for ax in list(axes.flat)[count:]:
        ax.remove()
    return canvas, list(axes.flat)[:count]


def _figure_size_inches(layout: FigureLayout, columns: int, row_heights: Sequence[float]) -> tuple[float, float]:
    """Width and height."""
    if layout.stacked:
        return 6.8, 1.55 * sum(row_heights) + 0.6
    width, height = (4.2, 3.4) if layout.label_points else (3.4, 2.9)
    return max(4.6, width * columns), height * len(row_heights) + 0.2


def _relative_height(figure: Figure, panel: Panel) -> float:
    """A panel's height relative to a usual one: each lane of bars and each name at the end of a line needs room."""
    count = len({line.row for line in panel.lines})
    return max(1.0, 0.2 * count if panel.kind == "bar" else 0.1 * count if has_end_names(figure, panel) else 0.0)


def _draw_panel(ax: Any, panel: Panel, row_indices: dict[str, int]) -> list[tuple[str, Any]]:
    """Draw a panel; return each row's drawn line, over its seeds, with the row's name."""
    lines_by_row: dict[str, list[PlotLine]] = {}
    for line in _clip_to_y_range(panel).lines:
        lines_by_row.setdefault(line.row, []).append(line)
    ax.set_title(fill(make_printable(panel.title), PANEL_TITLE_WIDTH_CHARS), loc="left")
    ax.set_xlabel(panel.x_label)
    if panel.kind == "bar":
        _draw_bars(ax, panel, [average_lines(lines) for lines in lines_by_row.values()], row_indices)
        return []
    ax.set_ylabel(fill(make_printable(get_y_label(panel)), AXIS_LABEL_WIDTH_CHARS))
    drawn = []
    for n, (name, lines) in enumerate(lines_by_row.items()):
        row_index, shift = row_indices.get(name, n), (n - (len(lines_by_row) - 1) / 2) * min(2.0, 8 / len(lines_by_row))
        if len(lines) > 1:
            for line in lines:
                _draw_line(ax, panel, line, row_index, lw=0.6, alpha=0.35, shift=shift)
            lines = [average_lines(lines)]
        label = truncate_text(name, MAX_LEGEND_NAME_CHARS, where="middle")
        drawn.append((name, _draw_line(ax, panel, lines[0], row_index, label=label, shift=shift)))
    _format_axes(ax, panel)
    return drawn


def _draw_line(ax: Any, panel: Panel, line: PlotLine, row_index: int, shift: float, **style: Any) -> Any:
    y = [float("nan") if v is None else 100 * v if panel.percent else v for v in line.y]
    style = {"color": ROW_COLORS[row_index % len(ROW_COLORS)], "lw": 1.6, **style}
    style_index = row_index % len(LINE_STYLES)
    if line.row == PARETO_FRONT_NAME:
        label = f"{PARETO_FRONT_NAME} (filled)"
        (drawn,) = ax.step(line.x, y, where="post", color=FRONT_COLOR, ls="--", lw=1, label=label, zorder=1)
    elif panel.kind == "point":
        has_front = any(other.row == PARETO_FRONT_NAME for other in panel.lines)
        face_color = style["color"] if line.on_front or not has_front else "white"
        style |= {"marker": MARKERS[style_index], "markerfacecolor": face_color}
        zorder = 2.1 if line.on_front else 2  # no other point hides one on the front
        (drawn,) = ax.plot(line.x, y, ls="none", zorder=zorder, **style)
        for x, (low, high) in zip(line.x, line.intervals, strict=False):
            ax.vlines(x, 100 * low, 100 * high, color=style["color"], lw=1, alpha=0.5, zorder=1)
    else:
        drawstyle = "steps-mid" if panel.kind == "step" else "default"
        zorder = 2 + 0.1 * style_index  # of lines on top of each other, a broken one is above
        if sum(v is not None for v in line.y) == 1:
            style |= {"marker": MARKERS[style_index], "ms": 4}  # a single value is no line
        (drawn,) = ax.plot(line.x, y, ls=LINE_STYLES[style_index], drawstyle=drawstyle, zorder=zorder, **style)
        if panel.kind == "step":
            _shift_line(ax, drawn, shift)
    return drawn


def has_end_names(figure: Figure, panel: Panel) -> bool:
    """Return whether a panel has its rows' names at the ends of their lines.

    Args:
        figure: The panel's figure; where all of it is about one row, a legend says so once.
        panel: One of its panels.
    """
    rows = {line.row for line in panel.lines}
    in_figure = {line.row for other in figure.panels for line in other.lines}
    return panel.kind in ("line", "step") and len(rows) <= MAX_NAMED_LINES and len(in_figure) > 1


def _has_all_names(figure: Figure, panel: Panel) -> bool:
    """Whether a panel names all of its rows in full and near their lines, so that it needs no legend."""
    is_named = panel.kind == "bar" or (has_end_names(figure, panel) and not _has_crowded_ends(panel))
    return is_named and all(len(line.row) <= MAX_LANE_NAME_CHARS for line in panel.lines)


def _has_crowded_ends(panel: Panel) -> bool:
    """Whether so many lines end near each other that some names are far from theirs."""
    values = [y for line in panel.lines for y in line.y if y is not None]
    low, high = min(values), max(values)
    ends = {line.row: next(y for y in reversed(line.y) if y is not None) for line in panel.lines}
    heights = [(y - low) / ((high - low) or 1.0) for y in ends.values()]
    moved = zip(heights, spread_heights(heights, USUAL_NAME_GAP), strict=True)
    return any(abs(a - b) > CROWDED_DISTANCE for a, b in moved)


def _add_end_names(ax: Any, lines: Sequence[tuple[str, Any]]) -> list[tuple[Any, Any]]:
    """Write each row's name right of the axes; return it with the row's line, at whose end it belongs."""
    return [
        (
            ax.text(
                END_NAME_X,
                0.5,
                truncate_text(row, MAX_LANE_NAME_CHARS, where="middle"),
                transform=ax.transAxes,
                va="center",
                fontsize=7.5,
                color=line.get_color(),
            ),
            line,
        )
        for row, line in lines
    ]


def _spread_end_names(ax: Any, named_lines: Sequence[tuple[Any, Any]]) -> None:
    """Move names as near to their lines' ends as the others let them, with a thin line from each end to its name."""
    from matplotlib.lines import Line2D

    ends = []
    for _, line in named_lines:
        last = [point for point in line.get_xydata() if point[1] == point[1]][-1]
        ends.append(ax.transAxes.inverted().transform(line.get_transform().transform(last)))
    furthest = max((x for x, _ in ends), default=0.0)
    gap = END_NAME_POINTS * ax.figure.dpi / 72 / ax.bbox.height
    for (name, line), (x, y), height in zip(named_lines, ends, spread_heights([y for _, y in ends], gap), strict=True):
        name.set_y(height)
        leader = Line2D([x, END_NAME_X - 0.005], [y, height], linewidth=0.5, alpha=0.6, color=line.get_color())
        leader.set(transform=ax.transAxes, clip_on=False)
        if x < furthest - 0.01:
            leader.set(linestyle=":", alpha=0.4)  # the line ended earlier: this one has no values
        ax.add_artist(leader)


def spread_heights(heights: Sequence[float], gap: float) -> list[float]:
    """Move heights apart, each as little as possible, keeping their order.

    Args:
        heights: Heights in [0, 1].
        gap: The least distance of two results.

    Returns:
        One height for each; within [0, 1] as far as there is room.
    """
    groups: list[tuple[list[int], float]] = []  # the members of a stack without gaps, and its centre
    for n in sorted(range(len(heights)), key=lambda n: heights[n]):
        members, centre = [n], heights[n]
        while True:
            half = gap * (len(members) - 1) / 2
            centre = max(half, min(1 - half, centre))
            if not groups or groups[-1][1] + gap * len(groups[-1][0]) / 2 <= centre - half - gap / 2 + 1e-9:
                break
            members = groups.pop()[0] + members
            wanted = [heights[m] - gap * (i - (len(members) - 1) / 2) for i, m in enumerate(members)]
            centre = fmean(wanted)
        groups.append((members, centre))
    placed = {
        m: centre + gap * (i - (len(members) - 1) / 2) for members, centre in groups for i, m in enumerate(members)
    }
    return [placed[n] for n in range(len(heights))]


def _draw_bars(ax: Any, panel: Panel, lines: Sequence[PlotLine], row_indices: dict[str, int]) -> None:
    """Draw each row's mean over seeds in a lane of bars up and down; the title has their scale, the axis the names."""
    changes = [0.0, *(100 * y for line in lines for y in line.y if y is not None)]
    low, high = min(changes), max(changes)
    step = (1 + LANE_GAP_FRACTION) * (high - low or 1.0)
    for n, line in enumerate(lines):
        bars = [(x, 100 * y) for x, y in zip(line.x, line.y, strict=True) if y is not None]
        ax.axhline(-n * step, color=LANE_COLOR, lw=0.6, zorder=1)
        ax.bar([x for x, _ in bars], [y for _, y in bars], 0.75, -n * step, color=_row_color(row_indices, line.row))
    names = [
        fill(truncate_text(line.row, MAX_LEGEND_NAME_CHARS, where="middle"), MAX_LANE_NAME_CHARS) for line in lines
    ]
    ax.set_yticks([-n * step for n in range(len(lines))], names, fontsize=7)
    ax.set_ylim(low - (len(lines) - 1 + LANE_GAP_FRACTION) * step, high + LANE_GAP_FRACTION * step)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False, axis="y")
    means = ", means over seeds" if len(panel.lines) > len(lines) else ""
    ax.set_title(make_printable(f"{panel.title}{means}; a lane is {high - low:.0f} points high"), loc="left")


def _draw_legend(canvas: Any, axes: Any) -> None:
    """One legend for all panels. Rows whose names are cut to the same text differ in how they are drawn."""
    handles: dict[Any, Any] = {}
    for ax in axes:
        for handle, name in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault((name, handle.get_color(), handle.get_linestyle(), handle.get_marker()), handle)
    # A row of a single value in one panel, which is drawn as a point, is a line in another one.
    lines = {key[:3] for key in handles if key[3] == "None"}
    handles = {key: handle for key, handle in handles.items() if key[3] == "None" or key[:3] not in lines}
    if not handles:
        return
    names = [name for name, *_ in handles]
    width, height = canvas.get_size_inches()
    columns = max(1, min(len(handles), int(width / (0.5 + 0.07 * max(map(len, names))))))
    canvas.set_size_inches(width, height + 0.17 * -(-len(handles) // columns))
    canvas.legend(handles.values(), names, loc="outside lower center", ncols=columns, fontsize=8)


def _row_color(row_indices: dict[str, int], name: str) -> str:
    return ROW_COLORS[row_indices.get(name, 0) % len(ROW_COLORS)]


def _format_axes(ax: Any, panel: Panel) -> None:
    """Ticks at whole epochs and steps, and a logarithmic axis for costs that lie far apart."""
    for axis, label in ((ax.xaxis, panel.x_label), (ax.yaxis, panel.y_label)):
        if label in INTEGER_AXES:
            axis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    if y_range := _get_y_range(panel):
        ax.set_ylim(100 * y_range[0], 100 * y_range[1])
    if panel.x_labels:
        ax.set_xticks(*zip(*_thin_out(panel.x_labels), strict=True))
    costs = [x for line in panel.lines for x in line.x]
    if panel.kind == "point" and max(costs) > 6 * min(costs) > 0:
        _use_log_x_axis(ax)
    elif panel.kind == "point":
        ax.locator_params(axis="x", nbins=5)  # large numbers are wide


def _thin_out(labels: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """The labels for which there is room on an axis."""
    least_gap = (labels[-1][0] - labels[0][0]) / MAX_LABELLED_TICKS
    spaced = [labels[0]]
    for label in labels[1:]:
        if label[0] - spaced[-1][0] >= least_gap:
            spaced.append(label)
    return spaced


def _use_log_x_axis(ax: Any) -> None:
    """A logarithmic axis with plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())


def _shift_line(ax: Any, drawn_line: Any, offset_points: float) -> None:
    """Shift a line slightly, so that lines with equal values are all visible."""
    from matplotlib.transforms import offset_copy

    drawn_line.set_transform(offset_copy(ax.transData, fig=ax.figure, y=offset_points, units="points"))


def _get_y_range(panel: Panel) -> tuple[float, float] | None:
    """The range of an axis that leaves out low outliers, or None without outliers."""
    if not any(line.is_low_outlier for line in panel.lines):
        return None
    intervals = [interval for line in panel.lines if not line.is_low_outlier for interval in line.intervals]
    low, high = min(low for low, _ in intervals), max(high for _, high in intervals)
    margin = AXIS_MARGIN_FRACTION * (high - low)
    return max(0.0, low - 2 * margin), min(1.0, high + margin)


def _clip_to_y_range(panel: Panel) -> Panel:
    """The panel with low outliers raised to the lower end of its axis."""
    y_range = _get_y_range(panel)
    if y_range is None:
        return panel
    edge = y_range[0] + OUTLIER_HEIGHT_FRACTION * (y_range[1] - y_range[0])
    return replace(panel, lines=[_raise_to_edge(line, edge) for line in panel.lines])


def _raise_to_edge(line: PlotLine, edge: float) -> PlotLine:
    if line.row == PARETO_FRONT_NAME:
        return replace(line, y=[None if y is None else max(y, edge) for y in line.y])
    return replace(line, y=[edge], intervals=[]) if line.is_low_outlier else line


def _try_name_positions(
    ax: Any, text: str, point: tuple[float, float], text_style: dict[str, Any]
) -> Iterator[tuple[Any, PixelBox]]:
    """A name at each position that it may have, with the pixels that it covers there."""
    from matplotlib.patheffects import withStroke

    for x, y, horizontal, vertical in NAME_OFFSETS:
        position = {"xytext": (x, y), "textcoords": "offset points", "ha": horizontal, "va": vertical}
        outline = [withStroke(linewidth=2, foreground="white")]
        name = ax.annotate(text, point, **position, **text_style, path_effects=outline)
        name.set_in_layout(False)
        yield name, tuple(name.get_window_extent().extents)


def _point_box(ax: Any, x: float, share: float | None) -> PixelBox:
    """The pixels that a point covers."""
    (center_x, center_y), half = ax.transData.transform((x, 100 * (share or 0))), 0.05 * ax.figure.dpi
    return center_x - half, center_y - half, center_x + half, center_y + half


def _is_free(box: PixelBox, taken: Sequence[PixelBox], bounds: Sequence[float]) -> bool:
    fits = box[0] >= bounds[0] and box[1] >= bounds[1] and box[2] <= bounds[2] + 6 and box[3] <= bounds[3] + 6
    return fits and all(box[2] < t[0] or box[0] > t[2] or box[3] < t[1] or box[1] > t[3] for t in taken)
