"""The folder a run leaves: its records, its checkpoints, and the weights of its best and last epoch."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import nn

from deat.checkpoint.state import check_all
from deat.checkpoint.store import NAME, listed, remove
from deat.data.streaming import Part
from deat.errors import CheckpointError, DataError, UsageError
from deat.models import load_weights
from deat.models.weights import tensors_of
from deat.runs.request import Run
from deat.training.checkpoints import Checkpoints
from deat.training.config import find_device
from deat.training.messages import command
from deat.training.records import EpochStats, EpochTiming, append, is_readable, is_torn, rewrite
from deat.training.trainer import Trainer
from deat.utils.files import is_leftover, link_whole, refuse_links, write_json, write_whole
from deat.utils.locks import LOCK, owned
from deat.utils.tensor_files import dump, note_of
from deat.version import versions

RUN, HISTORY, TIMING, WATCH, FAILURE = "run.json", "history.jsonl", "timing.jsonl", "watch.jsonl", "failure.json"
SCORES, REPORT = "scores.json", "report.md"
RECORDS = {RUN, HISTORY, TIMING, WATCH, FAILURE, SCORES, REPORT}
WEIGHTS = "model.safetensors"
FIGURES = ("training-process", "validation", "backprops", "cost", "alpha-gamma", "sweep", "gallery")
REPORT_FILES = {"index.html", "table.md", "table.tex", "table.csv"} | {
    f"figures/{name}.{kind}" for name in FIGURES for kind in ("svg", "png", "csv")
}
"""What a report may consist of, so that nothing else is ever replaced or removed."""

Say = Callable[[str], None]


class RunFolder:
    """Writes a run down while it goes on; a callback of the trainer, and the owner of its checkpoints.

    best/ and last/ hold one file each, a second name of a checkpoint's, so that neither is ever half written.
    """

    def __init__(
        self,
        path: Path,
        *,
        extra: dict[str, Any] | None = None,
        files: dict[str, str] | None = None,
        say: Say | None = None,
    ) -> None:
        self.path = path
        self.checkpoints = Checkpoints(path, extra=extra, files=files, say=say, published=self._publish)
        self.say = self.checkpoints.say
        self.timings: list[EpochTiming] = []
        self._lines = 0

    def write_record(self, record: dict[str, Any]) -> None:
        """Write run.json."""
        try:
            write_json(self.path / RUN, {**record, "versions": versions()}, make_folder=False)
        except OSError as error:
            raise unwritable(self.path, error) from None

    def attach(self, trainer: Trainer) -> None:
        """Follow a trainer; of several processes the first one writes."""
        if trainer.ranks.main:
            trainer.callbacks.append(self)
        trainer.keeper = self.checkpoints

    def resume(self, trainer: Trainer, *, inexact: bool = False) -> bool:
        """Put the newest checkpoint into the trainer and the records back to where it was; False without one."""
        if not self.checkpoints.resume(trainer, inexact=inexact):
            return False
        if trainer.ranks.main:
            self._restore(trainer)
        return True

    def _restore(self, trainer: Trainer) -> None:
        if is_torn(self.path / HISTORY):
            self.say(f"the last line of {HISTORY} was torn; it is dropped")
        for name in (HISTORY, TIMING):
            if not is_readable(self.path / name):
                self.say(f"{name} held lines that deat did not write; it is written anew from the checkpoint")
        try:
            rewrite(self.path / HISTORY, trainer.history)
            rewrite(self.path / TIMING, self.timings)
        except OSError as error:
            raise unwritable(self.path, error) from None
        self._lines = len(trainer.history)
        remove(self.path / FAILURE)
        self._publish(None, trainer)

    def on_epoch(self, trainer: Trainer, stats: EpochStats, timing: EpochTiming) -> None:
        """Add to the records; where that fails they are written anew after the next epoch."""
        self.timings.append(timing)
        try:
            self._keep_history(trainer.history)
            append(self.path / TIMING, timing)
        except OSError as error:
            self._lines = -1
            self.say(f"cannot write to {str(self.path)!r} ({error.strerror}); the next epoch is tried again")

    def state_dict(self) -> dict[str, Any]:
        """The clock's records, which no other state has."""
        return {"timings": list(self.timings)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.timings = check_all(EpochTiming, state["timings"])

    def failed(self, facts: dict[str, Any]) -> None:
        """Leave a note of what went wrong."""
        with suppress(OSError):
            write_json(self.path / FAILURE, facts, make_folder=False)

    def _keep_history(self, history: list[EpochStats]) -> None:
        """One line for each epoch that stands: added, or all written anew where epochs were put back."""
        if len(history) == self._lines + 1:
            append(self.path / HISTORY, history[-1])
        else:
            rewrite(self.path / HISTORY, history)
        self._lines = len(history)

    def _publish(self, checkpoint: Path | None, trainer: Trainer) -> None:
        """Give the last and the best epoch's weights their names; the run that this one replaces is now in the way."""
        if not (self.path / RUN).is_file():  # as when a folder is being removed: nothing could go on from it
            raise CheckpointError(f"{str(self.path / RUN)!r} is gone, without which the run cannot go on")
        held = trainer.best.held
        if held is None:
            return
        last = trainer.history[-1].epoch
        whole = None if trainer.step else checkpoint  # in the middle of an epoch the weights are no epoch's
        if not trainer.step:
            self._name("last", whole, last, lambda: tensors_of(trainer.model))
        self._name("best", whole if held.epoch == last else None, held.epoch, lambda: held.weights)
        remove(aside(self.path))

    def _name(self, which: str, checkpoint: Path | None, epoch: int, weights: Callable[[], Any]) -> None:
        target, note = self.path / which / WEIGHTS, json.dumps({"epoch": epoch + 1, "step": 0})
        try:
            if checkpoint:
                link_whole(checkpoint / WEIGHTS, target)
            elif note_of(target) != note:
                target.parent.mkdir(exist_ok=True)
                write_whole(target, dump(weights(), note), make_folder=False)
        except OSError as error:
            self.say(f"cannot write {which}/{WEIGHTS} ({error.strerror}); the checkpoint has the weights")


def check_free(path: Path, overwrite: bool) -> None:
    """Refuse an output folder that is taken, or that is no run and must not be deleted."""
    if not path.exists():
        return
    if not overwrite:
        raise taken(path)
    if not is_run(path):
        raise UsageError(f"{str(path)!r} is not a run of deat's, so it is not overwritten. Choose another --out.")


def check_links(path: Path) -> None:
    """Refuse a run's folder in which a link would have its writer write elsewhere; it may be a link itself."""
    published = [f"{which}/{WEIGHTS}" for which in ("best", "last")]
    refuse_links(path / name for name in (*sorted(RECORDS), LOCK, "best", "last", *published, "report"))


def is_run(path: Path) -> bool:
    """Whether a folder holds a run's record and nothing that no run writes."""
    if held_record(path) is None:
        return False
    names = [p.name for p in path.iterdir() if not p.name.startswith(".")]
    made = {p.name for p in path.glob("evaluation*.json")} | ({"report"} if is_report(path / "report") else set())
    ours = RECORDS | made | {"best", "last", LOCK}
    return all(n in ours or NAME.fullmatch(n) for n in names)


def held_record(path: Path) -> dict[str, Any] | None:
    """What a folder's run.json holds, if it has a record's form."""
    try:
        record = json.loads((path / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    whole = isinstance(record, dict) and {"request", "method", "versions"} <= record.keys()
    return record if whole and isinstance(record["request"], dict) else None


def is_report(path: Path) -> bool:
    """Whether a folder holds what `deat report` writes and nothing else."""
    figures = path / "figures"
    folders = [path, figures] if figures.is_dir() and not figures.is_symlink() else [path]
    try:  # of these alone: below a home or a disk there may be anything, and much of it
        held = [p for folder in folders for p in folder.iterdir() if p not in folders and not is_leftover(p)]
    except OSError:
        return False
    return {p.relative_to(path).as_posix() for p in held} <= REPORT_FILES


def is_unborn(path: Path) -> bool:
    """Whether a folder has been made for a run that came to nothing before it was written down."""
    return path.is_dir() and all(p.name == LOCK or p.name.startswith(f".{RUN}.") for p in path.iterdir())


def has_checkpoint(path: Path) -> bool:
    """Whether a folder holds a checkpoint to go on from."""
    try:
        return bool(listed(path))
    except (OSError, ValueError):
        return False


def aside(path: Path) -> Path:
    """Where a run that is being replaced waits until the new one has an epoch."""
    return path.with_name(f".{path.name}.replaced")


def put_aside(path: Path) -> None:
    """Make room for a run that replaces this one, which nobody may be working on."""
    check_free(path, overwrite=True)
    if not path.exists():
        return
    with owned(path):
        pass
    try:
        if aside(path).exists():  # what is here now never had an epoch
            shutil.rmtree(path)
        else:
            path.rename(aside(path))
    except OSError as error:
        raise unwritable(path, error) from None


def put_back(path: Path) -> None:
    """Undo put_aside, where the new run came to nothing."""
    if aside(path).exists():
        remove(path)
        with suppress(OSError):
            aside(path).rename(path)


def make_folder(path: Path) -> None:
    """A new folder, which nobody else made just now."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        raise taken(path) from None
    except OSError as error:
        raise unwritable(path, error) from None


def claim(parent: Path, name: str) -> Path:
    """A new folder parent/name, or the first parent/name-2, -3 … that is not taken, even by one started just now."""
    clean = "".join(c if c.isalnum() or c in "+%._-" else "-" for c in name)[:80].lstrip(".")
    number = 1
    while True:
        path = parent / (clean if number == 1 else f"{clean}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
        except OSError as error:
            raise unwritable(path, error) from None
        else:
            return path


def taken(path: Path) -> UsageError:
    """The refusal of a folder that exists, with what can be done about the run that is in it."""
    record = held_record(path)
    if record is None:
        begun = ", or add --resume auto to begin in it" if is_unborn(path) else ""
        return UsageError(f"{str(path)!r} exists already, and is no run of deat's. Choose another --out{begun}.")
    replaced = ", add --overwrite to replace that run" if is_run(path) else ""
    going_on = command("resume", path, record["request"])
    return UsageError(f"{str(path)!r} exists already. Choose another --out{replaced}, or go on with it: {going_on}")


def unwritable(path: Path, error: OSError) -> CheckpointError:
    """The refusal of a folder that cannot be written to."""
    return CheckpointError(
        f"cannot write to {str(path)!r}: {error.strerror}. Make it writable, or give a new run another --out."
    )


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
