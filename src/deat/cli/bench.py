"""`deat bench`: a recipe's table, run by run, and what it found."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from rich.live import Live
from rich.table import Table
from tyro.conf import Positional, UseAppendAction, arg

from deat.bench.grid import Cell, Grid, cells_of
from deat.bench.status import Progress
from deat.bench.workers import Tick, in_turn, on_ray, side_by_side, stoppable
from deat.cli.console import Screen, is_terminal, say_aside
from deat.cli.evaluate import FLAGGED
from deat.cli.flags import MaybeText, MaybeWhole, Parallel, Whole
from deat.errors import Interrupted, UsageError
from deat.evaluation.sanity import ADVICE
from deat.evaluation.sanity.flags import link
from deat.recipes import Recipe, Row, override, recipe
from deat.recipes.overrides import settings_of
from deat.report.grouping import flags_of, unchecked
from deat.report.load import COST, BenchResults, ReportRow, Spread, collect
from deat.report.stats import coverage, samples
from deat.training.planning import Plan, plan
from deat.utils.numbers import clock
from deat.utils.paths import tidy
from deat.utils.text import plain


@dataclass(frozen=True)
class Planned:
    """A row's cost for one seed, and with how many seeds it is run."""

    label: str
    seeds: int
    epochs: int
    cost: Plan


def show_cost(cells: Sequence[Cell], as_json: bool) -> None:
    """Print what each row would cost, as soon as it is known, and what all would take together."""
    rows = []
    for row in _planned(cells):
        rows.append(row)
        if not as_json:
            print(_line(row), flush=True)
    few, many = (sum(row.seeds * row.cost.seconds[side] for row in rows) for side in (0, 1))
    if as_json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "seconds": (few, many)}))
        return
    print(f"all rows and seeds, one at a time: {_range(clock(few), clock(many))}, validation and evaluation aside")
    print("a dry run: nothing was created")


def _planned(cells: Sequence[Cell]) -> Iterator[Planned]:
    """Each row's cost, from a few batches of its first cell, really played."""
    seeds = Counter(cell.row.label for cell in cells)
    firsts = {cell.row.label: cell for cell in reversed(cells)}
    for cell in reversed(firsts.values()):
        run = cell.row.resolve(cell.seed, cell.budget, cell.threads)
        yield Planned(cell.row.label, seeds[cell.row.label], run.settings.epochs, plan(run.trainer()))


def _line(row: Planned) -> str:
    (few, many), (quick, slow) = row.cost.backprops, row.cost.seconds
    run = f"{row.epochs} epochs:" if row.seeds == 1 else f"{row.seeds} seeds of {row.epochs} epochs: each"
    return (
        f"{plain(row.label)}, {run} {_range(f'{few:,}', f'{many:,}')} backprops at "
        f"{1000 * row.cost.seconds_per_backprop:.3g} ms, {_range(clock(quick), clock(slow))}"
    )


def _range(least: str, most: str) -> str:
    return least if least == most else f"{least} to {most}"


WIDTH = 160
"""Columns of a table that is piped."""


def show(found: BenchResults) -> None:
    """Print the table, and what a reader must know to read it."""
    console = Screen(soft_wrap=True, width=None if is_terminal() else WIDTH)
    if any(row.done for row in found.rows):
        console.print(table(found))
    for line in notes(found):
        console.print(plain(line))
    console.print(f"every run is in {found.path}")


def table(found: BenchResults) -> Table:
    """Mean and standard deviation over seeds, in percent, and the cost."""
    names = [name for name in found.columns if name not in COST and not name.startswith("last ")]
    shown = Table(title=f"{found.recipe}: accuracy in percent", title_justify="left", box=None, pad_edge=False)
    shown.add_column("")
    for name in (*names, "backprops", "time", "seeds"):
        shown.add_column(plain(name), justify="right")
    for row in found.rows:
        cells = [spread.percent if (spread := row.spread(name)) else "" for name in names]
        done = f"{len(row.done)}/{len(row.runs)}"
        shown.add_row(plain(row.name), *cells, _count(row.spread("backprops")), _time(row), done)
    return shown


def notes(found: BenchResults) -> list[str]:
    """What went wrong, what is unfinished, which times say little and which numbers should not be believed."""
    said = [f"{row.name} failed: {row.why}" for row in found.rows if row.why]
    said += [*coverage(found.rows), *samples(found.rows)]
    if any(row.crowded for row in found.rows):
        said.append("* taken while other runs shared the machine")
    open_runs = [run for row in found.rows for run in row.runs if run.status in ("waiting", "running")]
    if open_runs:
        said.append(f"{len(open_runs)} runs are not finished: they wait for another bench, or run in one")
    for row in found.rows:
        said += [f"FLAG {flag.name} of {row.name}, seed {seed}: {flag.seen}" for seed, flag in flags_of(row)]
        said += [f"sanity not checked: {row.name}, seed {seed}" for seed in unchecked(row)]
    return [*said, *_warnings(found)]


def doubtful(found: BenchResults) -> list[ReportRow]:
    """The rows that carry a flag."""
    return [row for row in found.rows if flags_of(row)]


def _warnings(found: BenchResults) -> list[str]:
    """Which rows not to believe, and what to do about each kind of flag that they carry."""
    rows = doubtful(found)
    if not rows:
        return []
    names = dict.fromkeys(flag.name for row in rows for _, flag in flags_of(row))
    whose = "every row" if len(rows) == len(found.rows) else ", ".join(row.name for row in rows)
    advice = [f"{name}: {ADVICE[name]} ({link(name)})" for name in names if name in ADVICE]
    return [f"not to be believed, for the flags above: {whose}", *advice]


def as_json(found: BenchResults) -> dict[str, Any]:
    """The table as one JSON document."""
    return {
        "out": str(found.path),
        "recipe": found.recipe,
        "settings": found.settings,
        "rows": [_row(row) for row in found.rows],
        "notes": notes(found),
    }


def _row(row: ReportRow) -> dict[str, Any]:
    spreads = {name: row.spread(name) for name in row.columns}
    return {
        "name": row.name,
        "method": row.method,
        "model": row.model,
        "runs": [{"seed": run.seed, "status": run.status, "why": run.why} for run in row.runs],
        "crowded": row.crowded,
        "numbers": {n: {"mean": s.mean, "sd": s.sd, "values": list(s.values)} for n, s in spreads.items() if s},
    }


def _count(found: Spread | None) -> str:
    return "" if found is None else f"{found.mean:,.0f}"


def _time(row: ReportRow) -> str:
    found = row.minutes
    return "" if found is None else clock(60 * found) + ("*" if row.crowded else "")


FAILED = 1
"""Exit status of a bench some of whose runs failed."""


@dataclass(frozen=True)
class BenchCommand:
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


def run_bench(order: BenchCommand) -> int:
    """Run a recipe's grid, or what is left of it, and show the table; 1 where a run failed, 6 where one is flagged."""
    chosen = recipe(order.recipe)
    cells, settings = plan_cells(chosen, order)
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


def plan_cells(chosen: Recipe, order: BenchCommand) -> tuple[list[Cell], dict[str, Any]]:
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


def _rows(chosen: Recipe, order: BenchCommand) -> list[Row]:
    methods, models = _given("--methods", order.methods), _given("--model", order.model)
    return chosen.table(methods, models, order.data, data_root=order.data_root, download=order.download)


def _rehearse(cells: list[Cell]) -> None:
    """Read the data and build each model once, so that what cannot be there fails before anything is created."""
    for cell in {cell.row.request.model: cell for cell in reversed(cells)}.values():
        cell.row.resolve(cell.seed, cell.budget).model()


def _play(grid: Grid, cells: list[Cell], order: BenchCommand, tick: Tick) -> None:
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
