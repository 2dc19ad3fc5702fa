"""What an evaluation of a run needs beside its network: the test images, and a place for rulings."""

from pathlib import Path

from deat.data.corpus import Part
from deat.errors import DataError
from deat.training.run import Run


def test_part(run: Run) -> Part:
    """The run's test images."""
    if run.corpus.test is None:
        raise DataError(f"{run.corpus.name} has no test part to judge on: put one beside train/, as test/ or val/.")
    return run.corpus.test


def ledger_of(out: Path) -> Path:
    """Where the rulings of an unfinished evaluation are."""
    return out.with_name(f".{out.stem}-rulings.jsonl")
