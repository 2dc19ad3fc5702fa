"""Changes from epoch to epoch as a picture: a lane of bars for each row, all of one scale."""

from collections.abc import Callable, Sequence
from typing import Any

from deat.plain import clipped
from deat.report.series import Line

LONGEST = 12
"""Characters of a name beside its lane."""
GAP = 0.08
"""Between lanes, as a share of a lane."""


def draw_lanes(ax: Any, lines: Sequence[Line], hue: Callable[[str], str]) -> float:
    """Draw every row's mean over seeds as bars up and down from a line of its own; a lane's height, in points."""
    low, high = _span(lines)
    step = (1 + GAP) * (high - low or 1.0)
    for n, line in enumerate(lines):
        held = [(x, 100 * y) for x, y in zip(line.x, line.y, strict=True) if y is not None]
        ax.axhline(-n * step, color="#c9cac4", lw=0.6, zorder=1)
        ax.bar([x for x, _ in held], [y for _, y in held], 0.75, -n * step, color=hue(line.row))
    ax.set_yticks([-n * step for n in range(len(lines))], [clipped(line.row, LONGEST) for line in lines], fontsize=7)
    ax.set_ylim(low - (len(lines) - 1 + GAP) * step, high + GAP * step)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False, axis="y")
    return high - low


def _span(lines: Sequence[Line]) -> tuple[float, float]:
    """The least and the greatest change in points; none is among them."""
    found = [0.0, *(100 * y for line in lines for y in line.y if y is not None)]
    return min(found), max(found)
