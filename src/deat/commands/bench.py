"""`deat bench`: a recipe's table, run by run, and what it found."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from rich.live import Live
from tyro.conf import Positional, UseAppendAction, arg

from deat.bench.grid import Cell, Grid, cells_of
from deat.bench.progress import Progress
from deat.bench.workers import Tick, in_turn, on_ray, side_by_side, stoppable
from deat.commands.bench_plan import show_cost
from deat.commands.bench_table import as_json, doubtful, show
from deat.commands.evaluate import FLAGGED
from deat.commands.flags import MaybeText, MaybeWhole, Parallel, Whole
from deat.errors import Interrupted, UsageError
from deat.live import Screen, is_terminal, say_aside
from deat.paths import tidy
from deat.plain import plain
from deat.recipes import Recipe, Row, override, recipe
from deat.recipes.overrides import settings_of
from deat.report.collect import collect

FAILED = 1
"""Exit status of a bench some of whose runs failed."""


@dataclass(frozen=True)
class Bench:
    """Run a recipe's whole table: every method and seed, trained and judged. The same command goes on where it was."""

    goes_on: ClassVar[bool] = True

    recipe: Annotated[Positional[str], arg(metavar="RECIPE")]
    """A name from `deat list recipes`."""
    methods: MaybeText = None
    """Other methods than the recipe's, with commas: names, or my_file.py:NAME."""
    seeds: MaybeText = None
    """Seeds, with commas: 0,1,2; each recipe has its own."""
    data: MaybeText = None
    """Another data set, as for train."""
    model: MaybeText = None
    """Other networks than the recipe's, with commas."""
    set: UseAppendAction[tuple[str, ...]] = ()
    """Any setting of the recipe, as key=value, such as epochs=5; may be given again and again."""
    budget_bp: MaybeWhole = None
    """Train each method for as many epochs as cannot spend more backprops than this."""
    jobs: Whole = 1
    """Runs at once, each with one thread; times are then marked."""
    parallel: Parallel = None
    """ray: spread the runs over a Ray cluster ($RAY_ADDRESS, or this machine's cores and GPUs)."""
    out: MaybeText = None
    """The bench's folder (runs/bench-RECIPE)."""
    data_root: MaybeText = None
    """Where data sets lie ($DEAT_DATA, or .cache/deat at home)."""
    download: bool = False
    """Fetch the data set by name if it is not on disk."""
    dry_run: bool = False
    """Say what each row would cost in backprops and time, and create nothing."""
    json: bool = False
    """Print one JSON document instead of lines."""

    def run(self) -> int:
        """Run the table."""
        return run_bench(self)


def run_bench(order: Bench) -> int:
    """Run a recipe's grid, or what is left of it, and show the table; 1 where a run failed, 6 where one is flagged."""
    chosen = recipe(order.recipe)
    cells, settings = plan(chosen, order)
    if order.dry_run:
        show_cost(cells, order.json)
        return 0
    grid = Grid(Path(order.out or f"runs/bench-{chosen.name}").expanduser())
    if not order.parallel and not grid.exists:
        _rehearse(cells)
    grid.open(chosen, cells, settings)
    try:
        with stoppable(), _display(Progress(grid, cells), order.json) as tick:
            _play(grid, cells, order, tick)
    except (KeyboardInterrupt, Interrupted):
        say_aside(f"interrupted; what is done is in {grid.root}, and the same command goes on where it was.")
        return Interrupted.exit_code
    found = collect(grid.root)
    print(json.dumps(as_json(found))) if order.json else show(found)
    if any(row.why for row in found.rows):
        return FAILED
    return FLAGGED if doubtful(found) else 0


def plan(chosen: Recipe, order: Bench) -> tuple[list[Cell], dict[str, Any]]:
    """Every cell, checked as far as can be without data, and the settings that make two benches the same."""
    for flag, value in (("--jobs", order.jobs), ("--budget-bp", order.budget_bp)):
        if value is not None and value < 1:
            raise UsageError(f"{flag} must be a whole number >= 1, not {value}.")
    if order.parallel and order.jobs > 1:
        raise UsageError("--jobs is for this machine; with --parallel ray the cluster says how many run at once.")
    given = settings_of(order.set)
    rows = override(_rows(chosen, order), given) if given else _rows(chosen, order)
    rows = [row.check() for row in rows]
    if order.seeds is None:
        seeds = chosen.seeds
    else:
        rows, seeds = [replace(row, seeds=None) for row in rows], _seeds(order.seeds)
    told = {name: tidy(value) for name, value in given.items()}
    settings = {"data": tidy(rows[0].request.data), "rules": rows[0].request.rules, "set": told}
    threads = 1 if order.jobs > 1 or order.parallel else None
    return cells_of(rows, seeds, order.budget_bp, threads), {**settings, "budget_bp": order.budget_bp}


def _rows(chosen: Recipe, order: Bench) -> list[Row]:
    methods, models = _given("--methods", order.methods), _given("--model", order.model)
    return chosen.table(methods, models, order.data, data_root=order.data_root, download=order.download)


def _rehearse(cells: list[Cell]) -> None:
    """Read the data and build each model once, so that what cannot be there fails before anything is created."""
    for cell in {cell.row.request.model: cell for cell in reversed(cells)}.values():
        cell.row.resolve(cell.seed, cell.budget).model()


def _play(grid: Grid, cells: list[Cell], order: Bench, tick: Tick) -> None:
    if order.parallel:
        on_ray(grid, cells, tick)
    elif order.jobs > 1:
        side_by_side(grid, cells, order.jobs, tick)
    else:
        in_turn(grid, cells, tick)


@contextmanager
def _display(progress: Progress, quiet: bool) -> Iterator[Tick]:
    """Whoever shows the bench: nobody, a live line, or one line for each run that ends."""
    console = Screen(quiet=quiet, soft_wrap=not is_terminal())

    def tell() -> None:
        """Print a line for each run that has ended."""
        for text in progress.news():
            console.print(plain(text))

    if quiet or not is_terminal():
        yield tell
        return
    with Live(console=console, get_renderable=progress.line, refresh_per_second=2, transient=True):
        yield tell


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _given(flag: str, text: str | None) -> list[str]:
    """The names after a flag; a flag that names nothing is no wish for the recipe's whole table."""
    found = _names(text or "")
    if text is not None and not found:
        raise UsageError(
            f"{flag} {text!r} names nothing; give names with commas, or leave it away for the recipe's own."
        )
    return found


def _seeds(text: str) -> tuple[int, ...]:
    found = _names(text)
    if not found or not all(name.isdecimal() for name in found):
        raise UsageError(f"--seeds {text!r} must be whole numbers >= 0 with commas, such as 0,1,2.")
    return tuple(dict.fromkeys(int(name) for name in found))
