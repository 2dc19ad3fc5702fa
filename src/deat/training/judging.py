"""What an evaluation of a run needs: its network, test images, a place for rulings, and to be alone with it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from deat.checkpoint.lock import owned
from deat.data.stream import Part
from deat.errors import CheckpointError, DataError
from deat.models import load_weights
from deat.training.run import Run
from deat.training.settings import find_device
from deat.writing import refuse_links


def load_model(run: Run, weights: Path) -> nn.Module:
    """The run's network with these weights, on its device."""
    model = run.model()
    load_weights(model, weights)
    return model.to(find_device(run.settings.device))


def test_part(run: Run) -> Part:
    """The run's test images."""
    if run.corpus.test is None:
        raise DataError(f"{run.corpus.name} has no test part to judge on: put one beside train/, as test/ or val/.")
    return run.corpus.test


def ledger_of(out: Path) -> Path:
    """Where the rulings of an unfinished evaluation are."""
    return out.with_name(f".{out.stem}-rulings.jsonl")


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Be the only process that writes an evaluation and its rulings; a second one is refused."""
    lock = out.with_name(f".{out.stem}-lock")
    refuse_links([lock])
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot write {str(out)!r}: {error.strerror}. Choose another --out.") from None
    with owned(out, lock=lock):
        yield
