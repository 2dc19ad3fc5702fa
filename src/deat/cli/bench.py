"""`deat bench`: train and evaluate every method and seed of a recipe, and print the table."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, ClassVar

from rich.live import Live
from rich.table import Table
from tyro.conf import Positional, UseAppendAction, arg

from deat.bench.run_claims import BenchFolder, GridCell, make_cells
from deat.bench.status import BenchProgress
from deat.bench.workers import (
    TickCallback,
    run_in_processes,
    run_on_ray,
    run_sequentially,
)
from deat.cli.evaluate import EXIT_FLAGGED
from deat.cli.flag_types import IntFlag, OptionalInt, OptionalStr, ParallelChoice
from deat.errors import Interrupted, UsageError
from deat.evaluation.sanity import FLAG_ADVICE
from deat.evaluation.sanity.flag_advice import docs_link
from deat.recipes import Recipe, RecipeRow, apply_overrides, get_recipe
from deat.recipes.overrides import parse_overrides
from deat.report.problems import collect_flags, list_unchecked_seeds
from deat.report.row_statistics import describe_coverage, describe_samples
from deat.report.run_results import COST_COLUMNS, BenchResults, ReportRow, SeedStatistics, load_bench
from deat.runs.record_files import FAILURE_FILE
from deat.runs.run_cost import estimate_evaluation_seconds, estimate_run_cost
from deat.training.config import to_recorded_names
from deat.training.training_cost import CostEstimate
from deat.utils.anonymize_paths import anonymize_paths
from deat.utils.console import PlainConsole, is_stdout_terminal, print_stderr
from deat.utils.text import format_duration, format_duration_range, make_printable
from deat.utils.user_paths import expand_path


@dataclass(frozen=True)
class PlannedRow:
    """The estimated cost of a row of the table.

    Attributes:
        label: The row's name.
        seeds: The number of seeds.
        epochs: The number of epochs of each run.
        cost: The cost of one run.
    """

    label: str
    seeds: int
    epochs: int
    cost: CostEstimate


def print_cost_estimate(cells: Sequence[GridCell], folder: Path, as_json: bool) -> None:
    """Print the estimated cost of each row, and of all rows.

    Args:
        cells: The runs of the bench.
        folder: The bench's folder.
        as_json: Print one JSON document at the end instead of lines.
    """
    rows = []
    for row in _estimate_rows(cells, folder):
        rows.append(row)
        if not as_json:
            print(_format_planned_row(row), flush=True)
    total = tuple(sum(row.seeds * row.cost.seconds[side] for row in rows) for side in (0, 1))
    if as_json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "seconds": total}))
        return
    print(f"all rows and seeds, one at a time: {format_duration_range((total[0], total[1]))}")
    print("dry run: nothing was created")


def _estimate_rows(cells: Sequence[GridCell], folder: Path) -> Iterator[PlannedRow]:
    """Estimate each row's cost by training a few batches of its first cell."""
    num_seeds = Counter(cell.row.label for cell in cells)
    first_cells = {cell.row.label: cell for cell in reversed(cells)}
    for cell in reversed(first_cells.values()):
        run = cell.row.resolve(cell.seed, cell.budget, cell.threads)
        trainer = run.trainer()
        rounds = [(part.attacks, part.n) for part in cell.row.evaluation.rounds(cell.seed).values()]
        cost = estimate_run_cost(run, trainer, folder)
        cost = cost.with_parts({"evaluation": estimate_evaluation_seconds(run, trainer, rounds)})
        yield PlannedRow(cell.row.label, num_seeds[cell.row.label], run.config.epochs, cost)


def _format_planned_row(row: PlannedRow) -> str:
    few, many = row.cost.backprops
    parts = ", ".join(f"{name} {format_duration_range(seconds)}" for name, seconds in row.cost.parts.items())
    run = f"{row.epochs} epochs:" if row.seeds == 1 else f"{row.seeds} seeds of {row.epochs} epochs: each"
    return (
        f"{make_printable(row.label)}, {run} {_format_range(f'{few:,}', f'{many:,}')} backprops at "
        f"{1000 * row.cost.seconds_per_backprop:.3g} ms, {format_duration_range(row.cost.seconds)} ({parts})"
    )


def _format_range(least: str, most: str) -> str:
    return least if least == most else f"{least} to {most}"


PIPED_TABLE_COLUMNS = 160
"""The width of a table that is piped."""


def print_results(results: BenchResults) -> None:
    """Print the table, notes about it, and the bench's folder."""
    console = PlainConsole(soft_wrap=True, width=None if is_stdout_terminal() else PIPED_TABLE_COLUMNS)
    if any(row.finished_runs for row in results.rows):
        console.print(make_bench_table(results))
    for line in collect_notes(results):
        console.print(make_printable(line))
    console.print(f"all runs are in {results.path}")


def make_bench_table(results: BenchResults) -> Table:
    """Make the table: mean and standard deviation over seeds, in percent, and the cost.

    Args:
        results: The results of the bench.

    Returns:
        The table, for rich.
    """
    names = [name for name in results.columns if name not in COST_COLUMNS and not name.startswith("last ")]
    table = Table(title=f"{results.recipe}: accuracy in percent", title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for name in (*names, "backprops", "time", "seeds"):
        table.add_column(make_printable(name), justify="right")
    for row in results.rows:
        cells = [spread.percent_text if (spread := row.seed_statistics(name)) else "" for name in names]
        done = f"{len(row.finished_runs)}/{len(row.runs)}"
        table.add_row(
            make_printable(row.name), *cells, _format_mean(row.seed_statistics("backprops")), _format_time(row), done
        )
    return table


def collect_notes(results: BenchResults) -> list[str]:
    """Collect notes on the results: failures, unfinished runs, shared machines and sanity flags.

    Args:
        results: The results of the bench.

    Returns:
        One line for each note.
    """
    notes = [f"{row.name} failed: {row.failure_summary}" for row in results.rows if row.failure_summary]
    failed = [run.path / FAILURE_FILE for row in results.rows for run in row.runs if run.status == "failed"]
    notes += [f"the whole traceback: {file}" for file in failed if file.is_file()]
    notes += [*describe_coverage(results.rows), *describe_samples(results.rows)]
    if any(row.ran_concurrently for row in results.rows):
        notes.append("* measured while other runs shared the machine")
    unfinished = [run for row in results.rows for run in row.runs if run.status in ("waiting", "running")]
    if unfinished:
        notes.append(f"{len(unfinished)} runs are not finished: they are waiting or running in another bench")
    for row in results.rows:
        notes += [f"FLAG {flag.name} of {row.name}, seed {seed}: {flag.seen}" for seed, flag in collect_flags(row)]
        notes += [f"sanity not checked: {row.name}, seed {seed}" for seed in list_unchecked_seeds(row)]
    return [*notes, *_describe_flagged_rows(results)]


def find_flagged_rows(results: BenchResults) -> list[ReportRow]:
    """Return the rows with a sanity flag."""
    return [row for row in results.rows if collect_flags(row)]


def _describe_flagged_rows(results: BenchResults) -> list[str]:
    """List the rows with flags, and what to do about each kind of flag."""
    rows = find_flagged_rows(results)
    if not rows:
        return []
    names = dict.fromkeys(flag.name for row in rows for _, flag in collect_flags(row))
    flagged = "every row" if len(rows) == len(results.rows) else ", ".join(row.name for row in rows)
    advice = [f"{name}: {FLAG_ADVICE[name]} ({docs_link(name)})" for name in names if name in FLAG_ADVICE]
    return [f"not reliable, because of the flags above: {flagged}", *advice]


def bench_to_json(results: BenchResults) -> dict[str, Any]:
    """Return the results as one JSON document."""
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
        "ran_concurrently": row.ran_concurrently,
        "numbers": {n: {"mean": s.mean, "sd": s.sd, "values": list(s.values)} for n, s in spreads.items() if s},
    }


def _format_mean(spread: SeedStatistics | None) -> str:
    return "" if spread is None else f"{spread.mean:,.0f}"


def _format_time(row: ReportRow) -> str:
    minutes = row.minutes
    return "" if minutes is None else format_duration(60 * minutes) + ("*" if row.ran_concurrently else "")


EXIT_RUN_FAILED = 1
"""The exit status of a bench with a failed run."""


@dataclass(frozen=True)
class BenchCommand:
    """Train and evaluate every method and seed of a recipe. The same command resumes an interrupted bench."""

    is_resumable: ClassVar[bool] = True

    recipe: Annotated[Positional[str], arg(metavar="RECIPE")]
    """A name from `deat list recipes`."""
    methods: OptionalStr = None
    """Methods in place of the recipe's, separated by commas: names, or my_file.py:NAME."""
    rows: OptionalStr = None
    """Only these rows of the table, by label, separated by commas; * stands for any text: "*at 16"."""
    seeds: OptionalStr = None
    """Seeds in place of the recipe's, separated by commas: 0,1,2."""
    data: OptionalStr = None
    """The data set in place of the recipe's, as for train."""
    model: OptionalStr = None
    """Networks in place of the recipe's, separated by commas."""
    set: UseAppendAction[tuple[str, ...]] = ()
    """A setting of the recipe, as key=value, such as epochs=5; may be repeated."""
    budget_bp: OptionalInt = None
    """Limit the epochs of each method so that it spends at most this many backprops."""
    jobs: IntFlag = 1
    """The number of runs at once, each with one thread; times are then marked."""
    parallel: ParallelChoice = None
    """ray: distribute the runs over a Ray cluster ($RAY_ADDRESS, or this machine's cores and GPUs)."""
    out: OptionalStr = None
    """The bench's folder (runs/bench-RECIPE)."""
    data_root: OptionalStr = None
    """The folder of data sets ($DEAT_DATA, or ~/.cache/deat)."""
    download: bool = False
    """Download the data set by its name if it is not on disk."""
    dry_run: bool = False
    """Print each row's cost in backprops and time, and create nothing."""
    json: bool = False
    """Print one JSON document instead of lines."""

    def run(self) -> int:
        """Run the command and return its exit status."""
        return run_bench(self)


def run_bench(args: BenchCommand) -> int:
    """Run the unfinished cells of a recipe's table, and print the table.

    Args:
        args: The command's flags.

    Returns:
        The exit status: 1 if a run failed, 6 if one has a sanity flag, that of Interrupted, else 0.

    Raises:
        UsageError: A flag has no valid value.
    """
    recipe = get_recipe(args.recipe)
    cells, settings = plan_cells(recipe, args)
    folder = expand_path(args.out or f"runs/bench-{recipe.name}")
    if args.dry_run:
        print_cost_estimate(cells, folder, args.json)
        return 0
    bench_folder = BenchFolder(folder)
    if not args.parallel and not bench_folder.exists:
        _check_data_and_models(cells)
    bench_folder.open(recipe, cells, settings)
    try:
        with _show_progress(BenchProgress(bench_folder, cells), args.json) as tick:
            _run_cells(bench_folder, cells, args, tick)
    except (KeyboardInterrupt, Interrupted):
        print_stderr(f"interrupted; finished runs are in {bench_folder.root}, and the same command resumes.")
        return Interrupted.exit_code
    results = load_bench(bench_folder.root)
    print(json.dumps(bench_to_json(results))) if args.json else print_results(results)
    if any(row.failure_summary for row in results.rows):
        return EXIT_RUN_FAILED
    return EXIT_FLAGGED if find_flagged_rows(results) else 0


def plan_cells(selected_recipe: Recipe, args: BenchCommand) -> tuple[list[GridCell], dict[str, Any]]:
    """Make the cells of a bench, checked as far as possible without data.

    Args:
        selected_recipe: The recipe.
        args: The command's flags.

    Returns:
        The cells, and the settings that must be the same to resume the bench.

    Raises:
        UsageError: A flag has no valid value.
    """
    for flag, value in (("--jobs", args.jobs), ("--budget-bp", args.budget_bp)):
        if value is not None and value < 1:
            raise UsageError(f"{flag} must be a whole number >= 1, not {value}.")
    if args.parallel and args.jobs > 1:
        raise UsageError("--jobs is for this machine; with --parallel ray the cluster says how many run at once.")
    overrides = parse_overrides(args.set)
    rows = (
        apply_overrides(_recipe_rows(selected_recipe, args), overrides)
        if overrides
        else _recipe_rows(selected_recipe, args)
    )
    rows = [row.check() for row in _select_rows(rows, args.rows)]
    if args.seeds is None:
        seeds = selected_recipe.seeds
    else:
        rows, seeds = [replace(row, seeds=None) for row in rows], _parse_seeds(args.seeds)
    recorded_overrides = {name: anonymize_paths(value) for name, value in to_recorded_names(overrides).items()}
    settings = {
        "data": anonymize_paths(rows[0].request.data),
        "rules": rows[0].request.rules,
        "set": recorded_overrides,
    }
    threads = 1 if args.jobs > 1 or args.parallel else None
    return make_cells(rows, seeds, args.budget_bp, threads), {**settings, "budget_bp": args.budget_bp}


def _recipe_rows(selected_recipe: Recipe, args: BenchCommand) -> list[RecipeRow]:
    methods, models = _parse_names("--methods", args.methods), _parse_names("--model", args.model)
    return selected_recipe.make_rows(methods, models, args.data, data_root=args.data_root, download=args.download)


def _select_rows(rows: list[RecipeRow], patterns: str | None) -> list[RecipeRow]:
    """Keep the rows whose label matches a pattern; every pattern must match one."""
    if patterns is None:
        return rows
    names = _parse_names("--rows", patterns)
    for name in names:
        if not any(fnmatchcase(row.label, name) for row in rows):
            labels = ", ".join(row.label for row in rows)
            raise UsageError(f"--rows {name!r} matches no row of the recipe. Its rows: {labels}.")
    return [row for row in rows if any(fnmatchcase(row.label, name) for name in names)]


def _check_data_and_models(cells: list[GridCell]) -> None:
    """Read the data and build each model once, so that errors are raised before anything is created."""
    for cell in {cell.row.request.model: cell for cell in reversed(cells)}.values():
        cell.row.resolve(cell.seed, cell.budget).model()


def _run_cells(bench_folder: BenchFolder, cells: list[GridCell], args: BenchCommand, tick: TickCallback) -> None:
    if args.parallel:
        run_on_ray(bench_folder, cells, tick)
    elif args.jobs > 1:
        run_in_processes(bench_folder, cells, args.jobs, tick)
    else:
        run_sequentially(bench_folder, cells, tick)


@contextmanager
def _show_progress(progress: BenchProgress, quiet: bool) -> Iterator[TickCallback]:
    """Show the progress: a live line on a terminal, and one line for each run that ends."""
    console = PlainConsole(quiet=quiet, soft_wrap=not is_stdout_terminal())

    def print_finished_runs() -> None:
        """Print a line for each run that has ended."""
        for text in progress.news():
            console.print(make_printable(text))

    if quiet or not is_stdout_terminal():
        yield print_finished_runs
        return
    with Live(console=console, get_renderable=progress.line, refresh_per_second=2, transient=True):
        yield print_finished_runs


def _split_names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _parse_names(flag: str, text: str | None) -> list[str]:
    """Split the value of a flag into names."""
    names = _split_names(text or "")
    if text is not None and not names:
        raise UsageError(
            f"{flag} {text!r} has no name; give names separated by commas, or omit {flag} for the recipe's own."
        )
    return names


def _parse_seeds(text: str) -> tuple[int, ...]:
    seeds = _split_names(text)
    if not seeds or not all(seed.isdecimal() for seed in seeds):
        raise UsageError(f"--seeds {text!r} must be whole numbers >= 0 separated by commas, such as 0,1,2.")
    return tuple(dict.fromkeys(int(seed) for seed in seeds))
