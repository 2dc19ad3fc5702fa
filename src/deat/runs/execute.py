"""Training that is kept in a folder or is not, and what whoever interrupts it is told."""

import os
from contextlib import ExitStack, suppress
from pathlib import Path

from deat.checkpoint.store import CHECKPOINT_NAME_PATTERN, find_newest_checkpoint
from deat.errors import CheckpointError, Interrupted, UsageError
from deat.training.best_epoch import Snapshot, TrainResult
from deat.training.checkpoints import Checkpoints, MessageHandler, load_checkpoint
from deat.training.messages import describe_resume_position, describe_stop_position
from deat.training.trainer import Trainer
from deat.utils.distributed import Distributed
from deat.utils.locks import LOCK_FILE_NAME, lock_run_folder
from deat.utils.tensor_files import Tensors

RESUME_HINT = "The same call goes on from there."
NOT_SAVED_HINT = (
    "nothing was saved, since fit was given no folder: with checkpoints='some/folder' the same call goes on"
)
"""What is said to those who interrupt training, with a folder for its checkpoints and without."""


def check_checkpoint_folder(folder: str | os.PathLike[str] | None, distributed: Distributed) -> None:
    """Refuse a folder for checkpoints that holds other things and no checkpoint, before any work."""
    if folder is not None and os.fspath(folder) == "":
        raise UsageError("checkpoints='' names no folder: name one, such as checkpoints='kept'.")
    if folder is not None:
        distributed.run_on_main(lambda: _check_folder_content(Path(folder)))


def _check_folder_content(path: Path) -> None:
    others: list[str] = []
    with suppress(OSError):  # what cannot be read, or is no folder, is refused where it is made
        others = sorted(held.name for held in path.iterdir() if held.name != LOCK_FILE_NAME and held.name[0] != ".")
    if others and not any(map(CHECKPOINT_NAME_PATTERN.fullmatch, others)):
        raise UsageError(
            f"{str(path)!r} holds other things than checkpoints, such as {others[0]!r}. Name a folder of their own, "
            f"such as checkpoints={str(path / 'kept')!r}."
        )


def run_training(
    folder: str | os.PathLike[str] | None, trainer: Trainer, *, inexact: bool, notify: MessageHandler
) -> TrainResult:
    """Train with checkpoints in a folder, or without one."""
    return (
        train_without_checkpoints(trainer)
        if folder is None
        else train_with_checkpoints(trainer, Path(folder), inexact=inexact, notify=notify)
    )


def train_without_checkpoints(trainer: Trainer) -> TrainResult:
    """Train without a folder; who interrupts it is told what that costs, and what would have kept it."""
    try:
        return trainer.fit()
    except Interrupted as error:
        raise Interrupted(f"{error}{describe_stop_position(trainer)}; {NOT_SAVED_HINT}") from None
    except KeyboardInterrupt as error:
        error.add_note(f"interrupted{describe_stop_position(trainer)}; {NOT_SAVED_HINT}")
        raise


def train_with_checkpoints(trainer: Trainer, path: Path, *, inexact: bool, notify: MessageHandler) -> TrainResult:
    """Train with checkpoints in a folder, going on from those that are there, inexactly if so; a signal saves first.

    say is told that it goes on, or that there is nothing left to train.
    """
    with ExitStack() as stack, trainer.interruption.catch_signals():
        trainer.distributed.run_on_main(lambda: _lock_folder(path, stack))
        if Checkpoints(path).follow(trainer, inexact=inexact):
            notify(_resume_message(trainer, path))
        try:
            return trainer.fit()
        except Interrupted as error:
            raise Interrupted(
                f"{error}{describe_stop_position(trainer)}; saved in {str(path)!r}. {RESUME_HINT}"
            ) from None


def load_checkpoint_weights(path: Path, epoch: str) -> Tensors:
    """The best epoch's weights in a folder of checkpoints, or the last ones that were kept."""
    found = find_newest_checkpoint(path)
    if found.newest is None:
        raise CheckpointError(f"no checkpoint in {str(path)!r} is whole: {'; '.join(found.problems)}.")
    state = load_checkpoint(found.newest)["state"]
    if not state["history"]:
        raise CheckpointError(
            f"no epoch of the training in {str(path)!r} is finished yet, so it has no weights to give."
        )
    best = state["best"]
    return dict(best.weights if epoch == "best" and isinstance(best, Snapshot) else state["model"])


def _resume_message(trainer: Trainer, path: Path) -> str:
    """What was found in a folder."""
    if trainer.is_finished:
        return f"finished already in {str(path)!r}: nothing is trained"
    return f"going on in {str(path)!r} at {describe_resume_position(trainer)}"


def _lock_folder(path: Path, stack: ExitStack) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot keep checkpoints in {str(path)!r}: {error.strerror}.") from None
    stack.enter_context(lock_run_folder(path))
