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

from deat.bench.grid import Grid, GridCell, make_cells
from deat.bench.status import BenchProgress
from deat.bench.workers import (
    TickCallback,
    run_in_processes,
    run_on_ray,
    run_sequentially,
    sigterm_as_keyboard_interrupt,
)
from deat.cli.evaluate import EXIT_FLAGGED
from deat.cli.flags import IntFlag, OptionalInt, OptionalStr, ParallelChoice
from deat.errors import Interrupted, UsageError
from deat.evaluation.sanity import FLAG_ADVICE
from deat.evaluation.sanity.flags import docs_link
from deat.recipes import Recipe, RecipeRow, apply_overrides, get_recipe
from deat.recipes.overrides import parse_overrides
from deat.report.load import COST_COLUMNS, BenchResults, ReportRow, SeedStatistics, load_bench
from deat.report.problems import collect_flags, list_unchecked_seeds
from deat.report.stats import describe_coverage, describe_samples
from deat.training.config import to_recorded_names
from deat.training.cost_estimate import CostEstimate, estimate_cost
from deat.utils.paths import anonymize_paths
from deat.utils.terminal import PlainConsole, is_stdout_terminal, print_stderr
from deat.utils.text import format_duration, make_printable


@dataclass(frozen=True)
class PlannedRow:
    """A row's cost for one seed, and with how many seeds it is run."""

    label: str
    seeds: int
    epochs: int
    cost: CostEstimate


def print_cost_estimate(cells: Sequence[GridCell], as_json: bool) -> None:
    """Print what each row would cost, as soon as it is known, and what all would take together."""
    rows = []
    for row in _estimate_rows(cells):
        rows.append(row)
        if not as_json:
            print(_format_planned_row(row), flush=True)
    few, many = (sum(row.seeds * row.cost.seconds[side] for row in rows) for side in (0, 1))
    if as_json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "seconds": (few, many)}))
        return
    print(
        f"all rows and seeds, one at a time: {_format_range(format_duration(few), format_duration(many))}, validation and evaluation aside"
    )
    print("a dry run: nothing was created")


def _estimate_rows(cells: Sequence[GridCell]) -> Iterator[PlannedRow]:
    """Each row's cost, from a few batches of its first cell, really played."""
    seeds = Counter(cell.row.label for cell in cells)
    firsts = {cell.row.label: cell for cell in reversed(cells)}
    for cell in reversed(firsts.values()):
        run = cell.row.resolve(cell.seed, cell.budget, cell.threads)
        yield PlannedRow(cell.row.label, seeds[cell.row.label], run.config.epochs, estimate_cost(run.trainer()))


def _format_planned_row(row: PlannedRow) -> str:
    (few, many), (quick, slow) = row.cost.backprops, row.cost.seconds
    run = f"{row.epochs} epochs:" if row.seeds == 1 else f"{row.seeds} seeds of {row.epochs} epochs: each"
    return (
        f"{make_printable(row.label)}, {run} {_format_range(f'{few:,}', f'{many:,}')} backprops at "
        f"{1000 * row.cost.seconds_per_backprop:.3g} ms, {_format_range(format_duration(quick), format_duration(slow))}"
    )


def _format_range(least: str, most: str) -> str:
    return least if least == most else f"{least} to {most}"


PIPED_TABLE_COLUMNS = 160
"""Columns of a table that is piped."""


def print_results(results: BenchResults) -> None:
    """Print the table, and what a reader must know to read it."""
    console = PlainConsole(soft_wrap=True, width=None if is_stdout_terminal() else PIPED_TABLE_COLUMNS)
    if any(row.finished_runs for row in results.rows):
        console.print(build_results_table(results))
    for line in collect_notes(results):
        console.print(make_printable(line))
    console.print(f"every run is in {results.path}")


def build_results_table(results: BenchResults) -> Table:
    """Mean and standard deviation over seeds, in percent, and the cost."""
    names = [name for name in results.columns if name not in COST_COLUMNS and not name.startswith("last ")]
    shown = Table(title=f"{results.recipe}: accuracy in percent", title_justify="left", box=None, pad_edge=False)
    shown.add_column("")
    for name in (*names, "backprops", "time", "seeds"):
        shown.add_column(make_printable(name), justify="right")
    for row in results.rows:
        cells = [spread.percent_text if (spread := row.seed_statistics(name)) else "" for name in names]
        done = f"{len(row.finished_runs)}/{len(row.runs)}"
        shown.add_row(
            make_printable(row.name), *cells, _format_mean(row.seed_statistics("backprops")), _format_time(row), done
        )
    return shown


def collect_notes(results: BenchResults) -> list[str]:
    """What went wrong, what is unfinished, which times say little and which numbers should not be believed."""
    said = [f"{row.name} failed: {row.failure_summary}" for row in results.rows if row.failure_summary]
    said += [*describe_coverage(results.rows), *describe_samples(results.rows)]
    if any(row.ran_concurrently for row in results.rows):
        said.append("* taken while other runs shared the machine")
    open_runs = [run for row in results.rows for run in row.runs if run.status in ("waiting", "running")]
    if open_runs:
        said.append(f"{len(open_runs)} runs are not finished: they wait for another bench, or run in one")
    for row in results.rows:
        said += [f"FLAG {flag.name} of {row.name}, seed {seed}: {flag.seen}" for seed, flag in collect_flags(row)]
        said += [f"sanity not checked: {row.name}, seed {seed}" for seed in list_unchecked_seeds(row)]
    return [*said, *_describe_flagged_rows(results)]


def find_flagged_rows(results: BenchResults) -> list[ReportRow]:
    """The rows that carry a flag."""
    return [row for row in results.rows if collect_flags(row)]


def _describe_flagged_rows(results: BenchResults) -> list[str]:
    """Which rows not to believe, and what to do about each kind of flag that they carry."""
    rows = find_flagged_rows(results)
    if not rows:
        return []
    names = dict.fromkeys(flag.name for row in rows for _, flag in collect_flags(row))
    whose = "every row" if len(rows) == len(results.rows) else ", ".join(row.name for row in rows)
    advice = [f"{name}: {FLAG_ADVICE[name]} ({docs_link(name)})" for name in names if name in FLAG_ADVICE]
    return [f"not to be believed, for the flags above: {whose}", *advice]


def bench_to_json(results: BenchResults) -> dict[str, Any]:
    """The table as one JSON document."""
    return {
        "out": str(results.path),
        "recipe": results.recipe,
        "settings": results.settings,
        "rows": [_row_to_json(row) for row in results.rows],
        "notes": collect_notes(results),
    }


def _row_to_json(row: ReportRow) -> dict[str, Any]:
    spreads = {name: row.seed_statistics(name) for name in row.columns}
    return {
        "name": row.name,
        "method": row.method,
        "model": row.model,
        "runs": [{"seed": run.seed, "status": run.status, "why": run.why} for run in row.runs],
        "crowded": row.ran_concurrently,
        "numbers": {n: {"mean": s.mean, "sd": s.sd, "values": list(s.values)} for n, s in spreads.items() if s},
    }


def _format_mean(spread: SeedStatistics | None) -> str:
    return "" if spread is None else f"{spread.mean:,.0f}"


def _format_time(row: ReportRow) -> str:
    found = row.minutes
    return "" if found is None else format_duration(60 * found) + ("*" if row.ran_concurrently else "")


EXIT_RUN_FAILED = 1
"""Exit status of a bench some of whose runs failed."""


@dataclass(frozen=True)
class BenchCommand:
    """Run a recipe's whole table: every method and seed, trained and judged. The same command goes on where it was."""

    is_resumable: ClassVar[bool] = True

    recipe: Annotated[Positional[str], arg(metavar="RECIPE")]
    """A name from `deat list recipes`."""
    methods: OptionalStr = None
    """Other methods than the recipe's, with commas: names, or my_file.py:NAME."""
    seeds: OptionalStr = None
    """Seeds, with commas: 0,1,2; each recipe has its own."""
    data: OptionalStr = None
    """Another data set, as for train."""
    model: OptionalStr = None
    """Other networks than the recipe's, with commas."""
    set: UseAppendAction[tuple[str, ...]] = ()
    """Any setting of the recipe, as key=value, such as epochs=5; may be given again and again."""
    budget_bp: OptionalInt = None
    """Train each method for as many epochs as cannot spend more backprops than this."""
    jobs: IntFlag = 1
    """Runs at once, each with one thread; times are then marked."""
    parallel: ParallelChoice = None
    """ray: spread the runs over a Ray cluster ($RAY_ADDRESS, or this machine's cores and GPUs)."""
    out: OptionalStr = None
    """The bench's folder (runs/bench-RECIPE)."""
    data_root: OptionalStr = None
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


def run_bench(args: BenchCommand) -> int:
    """Run a recipe's grid, or what is left of it, and show the table; 1 where a run failed, 6 where one is flagged."""
    chosen = get_recipe(args.recipe)
    cells, settings = plan_cells(chosen, args)
    if args.dry_run:
        print_cost_estimate(cells, args.json)
        return 0
    grid = Grid(Path(args.out or f"runs/bench-{chosen.name}").expanduser())
    if not args.parallel and not grid.exists:
        _check_data_and_models(cells)
    grid.open(chosen, cells, settings)
    try:
        with sigterm_as_keyboard_interrupt(), _show_progress(BenchProgress(grid, cells), args.json) as tick:
            _run_cells(grid, cells, args, tick)
    except (KeyboardInterrupt, Interrupted):
        print_stderr(f"interrupted; what is done is in {grid.root}, and the same command goes on where it was.")
        return Interrupted.exit_code
    found = load_bench(grid.root)
    print(json.dumps(bench_to_json(found))) if args.json else print_results(found)
    if any(row.failure_summary for row in found.rows):
        return EXIT_RUN_FAILED
    return EXIT_FLAGGED if find_flagged_rows(found) else 0


def plan_cells(selected_recipe: Recipe, args: BenchCommand) -> tuple[list[GridCell], dict[str, Any]]:
    """Every cell, checked as far as can be without data, and the settings that make two benches the same."""
    for flag, value in (("--jobs", args.jobs), ("--budget-bp", args.budget_bp)):
        if value is not None and value < 1:
            raise UsageError(f"{flag} must be a whole number >= 1, not {value}.")
    if args.parallel and args.jobs > 1:
        raise UsageError("--jobs is for this machine; with --parallel ray the cluster says how many run at once.")
    given = parse_overrides(args.set)
    rows = apply_overrides(_recipe_rows(selected_recipe, args), given) if given else _recipe_rows(selected_recipe, args)
    rows = [row.check() for row in rows]
    if args.seeds is None:
        seeds = selected_recipe.seeds
    else:
        rows, seeds = [replace(row, seeds=None) for row in rows], _parse_seeds(args.seeds)
    told = {name: anonymize_paths(value) for name, value in to_recorded_names(given).items()}
    settings = {"data": anonymize_paths(rows[0].request.data), "rules": rows[0].request.rules, "set": told}
    threads = 1 if args.jobs > 1 or args.parallel else None
    return make_cells(rows, seeds, args.budget_bp, threads), {**settings, "budget_bp": args.budget_bp}


def _recipe_rows(selected_recipe: Recipe, args: BenchCommand) -> list[RecipeRow]:
    methods, models = _parse_names("--methods", args.methods), _parse_names("--model", args.model)
    return selected_recipe.make_rows(methods, models, args.data, data_root=args.data_root, download=args.download)


def _check_data_and_models(cells: list[GridCell]) -> None:
    """Read the data and build each model once, so that what cannot be there fails before anything is created."""
    for cell in {cell.row.request.model: cell for cell in reversed(cells)}.values():
        cell.row.resolve(cell.seed, cell.budget).model()


def _run_cells(grid: Grid, cells: list[GridCell], args: BenchCommand, tick: TickCallback) -> None:
    if args.parallel:
        run_on_ray(grid, cells, tick)
    elif args.jobs > 1:
        run_in_processes(grid, cells, args.jobs, tick)
    else:
        run_sequentially(grid, cells, tick)


@contextmanager
def _show_progress(progress: BenchProgress, quiet: bool) -> Iterator[TickCallback]:
    """Whoever shows the bench: nobody, a live line, or one line for each run that ends."""
    console = PlainConsole(quiet=quiet, soft_wrap=not is_stdout_terminal())

    def tell() -> None:
        """Print a line for each run that has ended."""
        for text in progress.news():
            console.print(make_printable(text))

    if quiet or not is_stdout_terminal():
        yield tell
        return
    with Live(console=console, get_renderable=progress.line, refresh_per_second=2, transient=True):
        yield tell


def _split_names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _parse_names(flag: str, text: str | None) -> list[str]:
    """The names after a flag; a flag that names nothing is no wish for the recipe's whole table."""
    found = _split_names(text or "")
    if text is not None and not found:
        raise UsageError(
            f"{flag} {text!r} names nothing; give names with commas, or leave it away for the recipe's own."
        )
    return found


def _parse_seeds(text: str) -> tuple[int, ...]:
    found = _split_names(text)
    if not found or not all(name.isdecimal() for name in found):
        raise UsageError(f"--seeds {text!r} must be whole numbers >= 0 with commas, such as 0,1,2.")
    return tuple(dict.fromkeys(int(name) for name in found))
