"""What a bench would cost, row by row, before anything is created."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from deat.bench.grid import Cell
from deat.live import Screen
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


def planned(cells: Sequence[Cell]) -> Iterator[Planned]:
    """Each row's cost, from a few batches of its first cell, really played."""
    seeds = Counter(cell.row.label for cell in cells)
    firsts = {cell.row.label: cell for cell in reversed(cells)}
    for cell in reversed(firsts.values()):
        run = cell.row.resolve(cell.seed, cell.budget, cell.threads)
        yield Planned(cell.row.label, seeds[cell.row.label], run.settings.epochs, plan(run.trainer()))


def show_plans(rows: Sequence[Planned]) -> None:
    """Print what each row would cost, and all of them together."""
    shown = Table("", title="what a seed would cost", title_justify="left", box=None, pad_edge=False)
    for name in ("seeds", "epochs", "backprops", "ms a backprop", "time"):
        shown.add_column(name, justify="right")
    for row in rows:
        ms = f"{1000 * row.cost.seconds_per_backprop:.3g}"
        shown.add_row(plain(row.label), str(row.seeds), str(row.epochs), _count(row.cost), ms, _time(row.cost.seconds))
    console = Screen(soft_wrap=True)
    console.print(shown)
    console.print(f"all rows and seeds, one at a time: {_time(in_all(rows))}, validation and evaluation aside")
    console.print("a dry run: nothing was created")


def in_all(rows: Sequence[Planned]) -> tuple[float, float]:
    """Seconds of training, at least and at most, of all rows and seeds one after the other."""
    few, many = (sum(row.seeds * row.cost.seconds[side] for row in rows) for side in (0, 1))
    return few, many


def as_json(rows: Sequence[Planned]) -> dict[str, Any]:
    """The plan as one JSON document."""
    return {"rows": [asdict(row) for row in rows], "seconds": in_all(rows)}


def _count(cost: Plan) -> str:
    few, many = cost.backprops
    return f"{few:,}" if few == many else f"{few:,} to {many:,}"


def _time(seconds: tuple[float, float]) -> str:
    few, many = map(clock, seconds)
    return few if few == many else f"{few} to {many}"
