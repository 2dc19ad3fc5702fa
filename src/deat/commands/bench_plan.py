"""What a bench would cost, row by row, before anything is created."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from deat.bench.grid import Cell
from deat.numbers import clock
from deat.plain import plain
from deat.training.plan import Plan, plan


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
