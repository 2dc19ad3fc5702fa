"""Drawing a figure's files: what is drawn, and that nothing is drawn twice."""

from pathlib import Path
from typing import Any

import pytest
from fontTools.subset import Options
from matplotlib.figure import Figure as Canvas

from deat.report.draw_figures import FONT_LAYOUT_TABLES, draw_figure
from deat.report.figure_data import Figure, Panel, PlotLine


def figure_of(panel_count: int) -> Figure:
    line = PlotLine("m+deat", 0, [1.0, 2.0, 3.0], [0.2, 0.4, 0.3])
    panels = [Panel(f"panel {n}", "epoch", "accuracy", [line], name=f"panel {n}") for n in range(panel_count)]
    return Figure("curves", "Curves", panels)


def test_a_figure_is_drawn_once_for_each_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    draw = Canvas.draw

    def counting(self: Canvas, renderer: Any) -> None:
        drawn.append(self)
        draw(self, renderer)

    monkeypatch.setattr(Canvas, "draw", counting)
    draw_figure(figure_of(2), ["m+deat"], tmp_path)
    assert len(drawn) == len(list(tmp_path.iterdir())) == 3 * 3  # the figure and its two panels, as PDF, SVG and PNG


def test_pdfs_embed_the_font_without_its_layout_tables(tmp_path: Path) -> None:
    before = Options._drop_tables_default
    draw_figure(figure_of(1), ["m+deat"], tmp_path)
    data = (tmp_path / "curves.pdf").read_bytes()
    assert b"/FontFile2" in data  # TrueType
    assert Options._drop_tables_default is before
    assert not {"glyf", "hmtx", "cmap"} & set(FONT_LAYOUT_TABLES)
