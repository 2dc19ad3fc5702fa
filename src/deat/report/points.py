"""Robustness against cost as a picture: names beside points, and points far below the others at the lower edge."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from deat.report.series import FRONT, Line, Panel

SPOTS = (
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
ROOM, EDGE = 0.07, 0.06
"""Of an axis that leaves points out: the room above and below, and how high those stand that lie below it."""
Box = tuple[float, float, float, float]
"""Left, lower, right and upper end."""


def range_of(panel: Panel) -> tuple[float, float] | None:
    """The accuracies that an axis shows where some points lie far below the others; None where none does."""
    spans = [span for line in panel.lines if not line.low for span in line.spans]
    if not any(line.low for line in panel.lines):
        return None
    low, high = min(a for a, _ in spans), max(b for _, b in spans)
    room = ROOM * (high - low)
    return max(0.0, low - 2 * room), min(1.0, high + room)


def within(panel: Panel) -> Panel:
    """The same panel with what lies below its axis at the lower edge."""
    shown = range_of(panel)
    if shown is None:
        return panel
    edge = shown[0] + EDGE * (shown[1] - shown[0])
    return replace(panel, lines=[_raised(line, edge) for line in panel.lines])


def name_points(ax: Any, panel: Panel, short: Callable[[str], str], hue: Callable[[str], str]) -> None:
    """Write names beside points where there is room for them, those on the front first; the legend has them all."""
    points = [line for line in panel.lines if line.row != FRONT]
    heights = {line.row: line.y[0] for line in within(panel).lines}
    taken = [_around(ax, line.x[0], heights[line.row]) for line in points]
    for line in sorted(points, key=lambda line: (not line.low, not line.good, -(line.y[0] or 0))):
        text = f"{short(line.row)}{' ⚑' if line.flagged else ''}"
        text += f" ↓ {100 * (line.y[0] or 0):.2f} %" if line.low else ""
        at = (line.x[0], 100 * (heights[line.row] or 0))
        look = {"color": hue(line.row), "fontsize": 7.5, "fontweight": "bold" if line.good else "normal"}
        for name, box in _tries(ax, text, at, look):
            if _is_free(box, taken, ax.bbox.extents):
                taken.append(box)
                break
            name.remove()


def _raised(line: Line, edge: float) -> Line:
    if line.row == FRONT:
        return replace(line, y=[None if y is None else max(y, edge) for y in line.y])
    return replace(line, y=[edge], spans=[]) if line.low else line


def _tries(ax: Any, text: str, at: tuple[float, float], look: dict[str, Any]) -> Iterator[tuple[Any, Box]]:
    """A name at each of its spots, and the pixels that it takes there."""
    from matplotlib.patheffects import withStroke

    for x, y, side, height in SPOTS:
        place = {"xytext": (x, y), "textcoords": "offset points", "ha": side, "va": height}
        name = ax.annotate(text, at, **place, **look, path_effects=[withStroke(linewidth=2, foreground="white")])
        name.set_in_layout(False)
        yield name, tuple(name.get_window_extent().extents)


def _around(ax: Any, x: float, share: float | None) -> Box:
    """The pixels of a point."""
    (right, up), half = ax.transData.transform((x, 100 * (share or 0))), 0.05 * ax.figure.dpi
    return right - half, up - half, right + half, up + half


def _is_free(box: Box, taken: Sequence[Box], inside: Sequence[float]) -> bool:
    fits = box[0] >= inside[0] and box[1] >= inside[1] and box[2] <= inside[2] + 6 and box[3] <= inside[3] + 6
    return fits and all(box[2] < t[0] or box[0] > t[2] or box[3] < t[1] or box[1] > t[3] for t in taken)
