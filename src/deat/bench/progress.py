"""How far a bench is, read from its folder, so that it does not matter who plays the cells."""

import json
from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any

from rich.text import Text

from deat.bench.grid import Cell, Grid
from deat.live import clock
from deat.report.collect import COST, OneRun, collect_run
from deat.training.folder import HISTORY, RUN

TRAINING = 0.9
"""The part of a run that training is taken to be; the rest is judging."""
BAR = 20


class Progress:
    """A bench's state in words: one line for now, and news of the runs that ended."""

    def __init__(self, grid: Grid, cells: Sequence[Cell]) -> None:
        self.grid, self.cells = grid, list(cells)
        self.weights = {cell.folder: cell.row.weight for cell in cells}
        self.started, self.first = perf_counter(), self._done(grid.runs())
        self.told = {folder for folder, run in grid.runs().items() if run["status"] == "done"}

    def line(self) -> Text:
        """The bench as it is now."""
        runs = self.grid.runs()
        share = self._done(runs) / sum(self.weights.values())
        ended = sum(runs[cell.folder]["status"] in ("done", "failed") for cell in self.cells)
        now = [cell.name for cell in self.cells if runs[cell.folder]["status"] == "running"]
        bar = "━" * round(BAR * share) + "╌" * (BAR - round(BAR * share))
        text = f"{bar} {ended}/{len(self.cells)} runs  {self._left(runs)} left  now: {'; '.join(now)}"
        return Text(text, no_wrap=True, overflow="ellipsis")

    def news(self) -> list[str]:
        """A line for each run that ended since the last call."""
        runs = self.grid.runs()
        fresh = [c for c in self.cells if c.folder not in self.told and runs[c.folder]["status"] in ("done", "failed")]
        self.told |= {cell.folder for cell in fresh}
        ended = sum(runs[cell.folder]["status"] in ("done", "failed") for cell in self.cells)
        return [
            f"{self._news(cell, runs[cell.folder])}  {ended}/{len(self.cells)}, {self._left(runs)} left"
            for cell in fresh
        ]

    def _news(self, cell: Cell, run: dict[str, Any]) -> str:
        if run["status"] == "failed":
            return f"{cell.name}: failed: {run['why']}"
        return f"{cell.name}: {_found(collect_run(self.grid.root / cell.folder))}"

    def _left(self, runs: dict[str, dict[str, Any]]) -> str:
        done, total = self._done(runs), sum(self.weights.values())
        if done <= self.first:
            return "-:--"
        return clock((perf_counter() - self.started) * (total - done) / (done - self.first))

    def _done(self, runs: dict[str, dict[str, Any]]) -> float:
        return sum(weight * self._share(runs[folder]) for folder, weight in self.weights.items())

    def _share(self, run: dict[str, Any]) -> float:
        if run["status"] != "running":
            return float(run["status"] in ("done", "failed"))
        path = self.grid.root / run["folder"]
        with suppress(OSError, ValueError, KeyError):  # it may be about to be created
            epochs = json.loads((path / RUN).read_text(encoding="utf-8"))["settings"]["epochs"]
            lines: int = (path / HISTORY).read_bytes().count(b"\n")
            return TRAINING * lines / int(epochs)
        return 0.0


def _found(run: OneRun) -> str:
    told = {n: v for n, v in run.numbers.items() if n not in (*COST, "worst") and not n.startswith("last ")}
    shown = [f"{name} {value:.1%}" for name, value in told.items()]
    return f"{', '.join(shown)}, {run.history[-1].backprops:,} backprops, {run.seconds:.1f} s"
