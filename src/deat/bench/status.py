"""How far a bench is, read from its folder, so that any process may run the cells."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from rich.text import Text

from deat.bench.run_claims import BenchFolder, GridCell
from deat.evaluation.progress import MAX_RUNNING_SHARE
from deat.evaluation.resume_log import read_logged_stages, resume_log_path
from deat.recipes.recipe import TEST_FRACTION, AttackRound
from deat.report.run_results import COST_COLUMNS, RunResults, load_run_results
from deat.runs.record_files import EVALUATION_FILES, HISTORY_FILE, BenchRunEntry, read_run_json
from deat.utils.text import format_duration, format_progress_bar


class BenchProgress:
    """A bench's state in words: one line for now, and news of the runs that ended."""

    def __init__(self, bench_folder: BenchFolder, cells: Sequence[GridCell]) -> None:
        self.bench_folder, self.cells = bench_folder, list(cells)
        self.weights = {cell.folder: _estimate_cell_work(cell) for cell in cells}
        self.start_time, self.first = perf_counter(), self._done(bench_folder.runs())
        self.reported = {folder for folder, run in bench_folder.runs().items() if run["status"] == "done"}

    def line(self) -> Text:
        """Return the line of progress."""
        runs = self.bench_folder.runs()
        share = self._done(runs) / sum(self.weights.values())
        ended = sum(runs[cell.folder]["status"] in ("done", "failed") for cell in self.cells)
        now = [cell.name for cell in self.cells if runs[cell.folder]["status"] == "running"]
        text = f"{format_progress_bar(share)} {ended}/{len(self.cells)} runs  {self._left(runs)} left  now: {'; '.join(now)}"
        return Text(text, no_wrap=True, overflow="ellipsis")

    def news(self) -> list[str]:
        """A line for each run that ended since the last call."""
        runs = self.bench_folder.runs()
        fresh = [
            c for c in self.cells if c.folder not in self.reported and runs[c.folder]["status"] in ("done", "failed")
        ]
        self.reported |= {cell.folder for cell in fresh}
        ended = sum(runs[cell.folder]["status"] in ("done", "failed") for cell in self.cells)
        return [
            f"{self._ended_run_line(cell, runs[cell.folder])}  {ended}/{len(self.cells)}, {self._left(runs)} left"
            for cell in fresh
        ]

    def _ended_run_line(self, cell: GridCell, run: BenchRunEntry) -> str:
        if run["status"] == "failed":
            return f"{cell.name}: failed: {run['why']}"
        return f"{cell.name}: {_format_run_results(load_run_results(self.bench_folder.root / cell.folder))}"

    def _left(self, runs: dict[str, BenchRunEntry]) -> str:
        done, total = self._done(runs), sum(self.weights.values())
        if done <= self.first:
            return format_duration(None)
        return format_duration((perf_counter() - self.start_time) * (total - done) / (done - self.first))

    def _done(self, runs: dict[str, BenchRunEntry]) -> float:
        return sum(self._made(cell, runs[cell.folder]) for cell in self.cells)

    def _made(self, cell: GridCell, run: BenchRunEntry) -> float:
        """The finished part of a cell's estimated work."""
        if run["status"] != "running":
            return self.weights[cell.folder] if run["status"] in ("done", "failed") else 0.0
        path = self.bench_folder.root / cell.folder
        with suppress(OSError, ValueError, KeyError):  # it may be about to be created
            record = read_run_json(path)
            trained = (path / HISTORY_FILE).read_bytes().count(b"\n") / int(record["settings"]["epochs"])
            images = TEST_FRACTION * record["data"]["train"]
            rounds = cell.row.evaluation.rounds(cell.seed)
            evaluation_costs = [
                _round_work_done(cell, plan, path / EVALUATION_FILES[name], images) for name, plan in rounds.items()
            ]
            return float(cell.row.training_cost * trained + sum(evaluation_costs))
        return 0.0


def _estimate_cell_work(cell: GridCell) -> float:
    rounds = cell.row.evaluation.rounds(cell.seed).values()
    return cell.row.training_cost + sum(attack_round.relative_cost for attack_round in rounds)


def _round_work_done(cell: GridCell, attack_round: AttackRound, out: Path, num_images: float) -> float:
    """The finished part of an evaluation's estimated work: all, or by the results in its resume log."""
    if out.is_file():
        return attack_round.relative_cost
    blocks = max(1.0, (attack_round.n or num_images) / cell.row.evaluation.block)
    stages = [stage for attack, stage in read_logged_stages(resume_log_path(out)) if attack in attack_round.attacks]
    return min(
        MAX_RUNNING_SHARE * attack_round.relative_cost,
        sum(replace(attack_round, attacks=(stage,)).relative_cost for stage in stages) / blocks,
    )


def _format_run_results(run: RunResults) -> str:
    hidden = (*COST_COLUMNS, "worst")
    shown = [f"{n} {v:.1%}" for n, v in run.metrics.items() if n not in hidden and not n.startswith("last ")]
    return f"{', '.join(shown)}, {run.history[-1].backprops:,} backprops, {run.train_seconds:.1f} s"
