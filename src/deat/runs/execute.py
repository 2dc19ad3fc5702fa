"""Training that is kept in a folder or is not, and what whoever interrupts it is told."""

import os
from contextlib import ExitStack, suppress
from pathlib import Path

from deat.checkpoint.store import NAME, search
from deat.errors import CheckpointError, Interrupted, UsageError
from deat.training.best_epoch import Result, Snapshot
from deat.training.checkpoints import Checkpoints, Say, load
from deat.training.messages import goes_on_at, stopped_at
from deat.training.trainer import Trainer
from deat.utils.distributed import Ranks
from deat.utils.locks import LOCK, owned
from deat.utils.tensor_files import Tensors

AGAIN = "The same call goes on from there."
UNKEPT = "nothing was saved, since fit was given no folder: with checkpoints='some/folder' the same call goes on"
"""What is said to those who interrupt training, with a folder for its checkpoints and without."""


def check_place(given: str | os.PathLike[str] | None, ranks: Ranks) -> None:
    """Refuse a folder for checkpoints that holds other things and no checkpoint, before any work."""
    if given is not None and os.fspath(given) == "":
        raise UsageError("checkpoints='' names no folder: name one, such as checkpoints='kept'.")
    if given is not None:
        ranks.by_main(lambda: _check_content(Path(given)))


def _check_content(path: Path) -> None:
    others: list[str] = []
    with suppress(OSError):  # what cannot be read, or is no folder, is refused where it is made
        others = sorted(held.name for held in path.iterdir() if held.name != LOCK and held.name[0] != ".")
    if others and not any(map(NAME.fullmatch, others)):
        raise UsageError(
            f"{str(path)!r} holds other things than checkpoints, such as {others[0]!r}. Name a folder of their own, "
            f"such as checkpoints={str(path / 'kept')!r}."
        )


def fit_in(place: str | os.PathLike[str] | None, trainer: Trainer, *, inexact: bool, say: Say) -> Result:
    """Train with checkpoints in a folder, or without one."""
    return fit_unkept(trainer) if place is None else fit_kept(trainer, Path(place), inexact=inexact, say=say)


def fit_unkept(trainer: Trainer) -> Result:
    """Train without a folder; who interrupts it is told what that costs, and what would have kept it."""
    try:
        return trainer.fit()
    except Interrupted as error:
        raise Interrupted(f"{error}{stopped_at(trainer)}; {UNKEPT}") from None
    except KeyboardInterrupt as error:
        error.add_note(f"interrupted{stopped_at(trainer)}; {UNKEPT}")
        raise


def fit_kept(trainer: Trainer, path: Path, *, inexact: bool, say: Say) -> Result:
    """Train with checkpoints in a folder, going on from those that are there, inexactly if so; a signal saves first.

    say is told that it goes on, or that there is nothing left to train.
    """
    with ExitStack() as stack, trainer.interruption.listening():
        trainer.ranks.by_main(lambda: _own(path, stack))
        if Checkpoints(path).follow(trainer, inexact=inexact):
            say(_taken_up(trainer, path))
        try:
            return trainer.fit()
        except Interrupted as error:
            raise Interrupted(f"{error}{stopped_at(trainer)}; saved in {str(path)!r}. {AGAIN}") from None


def kept_weights(path: Path, epoch: str) -> Tensors:
    """The best epoch's weights in a folder of checkpoints, or the last ones that were kept."""
    found = search(path)
    if found.newest is None:
        raise CheckpointError(f"no checkpoint in {str(path)!r} is whole: {'; '.join(found.problems)}.")
    state = load(found.newest)["state"]
    if not state["history"]:
        raise CheckpointError(
            f"no epoch of the training in {str(path)!r} is finished yet, so it has no weights to give."
        )
    best = state["best"]
    return dict(best.weights if epoch == "best" and isinstance(best, Snapshot) else state["model"])


def _taken_up(trainer: Trainer, path: Path) -> str:
    """What was found in a folder."""
    if trainer.ended:
        return f"finished already in {str(path)!r}: nothing is trained"
    return f"going on in {str(path)!r} at {goes_on_at(trainer)}"


def _own(path: Path, stack: ExitStack) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot keep checkpoints in {str(path)!r}: {error.strerror}.") from None
    stack.enter_context(owned(path))
