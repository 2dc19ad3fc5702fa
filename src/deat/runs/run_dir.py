"""A run's folder: its records, its checkpoints, and the weights of its best and last epoch."""

import json
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from deat.checkpoint.encoding import check_list_of
from deat.checkpoint.store import CHECKPOINT_NAME_PATTERN, find_newest_checkpoint, list_checkpoints, try_remove
from deat.errors import CheckpointError, UsageError
from deat.integrations.loggers.logging_callback import STATE_FILE
from deat.models.weights import get_state_dict
from deat.runs.record_files import (
    FAILURE_FILE,
    HISTORY_FILE,
    RECORD_FILES,
    RUN_FILE,
    TIMING_FILE,
    WEIGHTS_FILE,
    EpochChoice,
    read_raw_record,
    write_run_record,
)
from deat.training.best_epoch import CHOICE_KEY, Snapshot
from deat.training.checkpoints import Checkpoints, load_checkpoint
from deat.training.epoch_records import (
    EpochStats,
    EpochTiming,
    append_record,
    has_incomplete_last_line,
    is_valid_json_lines,
    write_records,
)
from deat.training.messages import format_command
from deat.training.run_record import BEST_WEIGHTS_KEY, format_weights_note, write_run_json
from deat.training.trainer import Trainer
from deat.utils.file_locks import LOCK_FILE_NAME, lock_run_folder
from deat.utils.safe_read import read_plain_text
from deat.utils.safe_write import check_no_symlinks, is_temporary_file, link_atomic, write_atomic, write_json
from deat.utils.safetensors_files import encode_tensors, read_note, read_tensors, read_weights_hash
from deat.utils.text import MessageHandler, summarize_error

FIGURE_NAMES = ("training-process", "validation", "backprops", "cost", "alpha-gamma", "sweep", "gallery")
PANEL_NAMES = (
    *("train-clean", "train-under-attack", "train-random-start", "held-out-clean", "held-out-under-attack"),
    *("held-out-loss", "train-loss", "robustness-gain", "gradient-magnitude", "lipschitz-bound"),
    *("steps", "backprops", "minutes", r"\d{1,4}"),
)
"""The ends of the names of panels' files; those of one figure for each setting or image are numbers."""
WEIGHT_FOLDERS: tuple[EpochChoice, ...] = ("best", "last", "averaged")
"""The folders of a run's weights: of the best and of the last epoch, and the average after the last one."""
REPORT_FILE_PATTERN = re.compile(
    r"index\.html|table\.(md|tex|csv)|"
    rf"figures/({'|'.join(FIGURE_NAMES)})(-({'|'.join(PANEL_NAMES)}))?\.(pdf|svg|png|csv)"
)
"""What a report may consist of, so that nothing else is ever replaced or removed."""


LOGS_FOLDER = "logs"
"""The folder of the loggers in a run's folder."""


class RunFolder:
    """Writes a run's records during training: a callback of the trainer, and the owner of its checkpoints.

    best/ and last/ have one file each, a hard link to a checkpoint's where it has the same weights, so that neither is
    ever half written. averaged/ has one in training with a moving average.

    Args:
        path: The run's folder.
        extra_config: What else must be the same when training is resumed.
        code_files: The specs of the user's files whose hashes `extra_config` has, by their names there.
        notify: Shows what could not be written; by default a RuntimeWarning.
    """

    def __init__(
        self,
        path: Path,
        *,
        extra_config: dict[str, Any] | None = None,
        code_files: dict[str, str] | None = None,
        notify: MessageHandler | None = None,
    ) -> None:
        self.path = path
        self.checkpoints = Checkpoints(
            path, extra_config=extra_config, code_files=code_files, notify=notify, on_saved=self._publish_weights
        )
        self.notify = self.checkpoints.notify
        self.timings: list[EpochTiming] = []
        self._num_history_lines = 0

    def write_record(self, record: dict[str, Any]) -> None:
        """Write run.json."""
        try:
            write_run_record(self.path, record)
        except OSError as error:
            raise unwritable_error(self.path, error) from None

    def attach(self, trainer: Trainer) -> None:
        """Record this trainer from now on; of several processes the main one writes."""
        if trainer.distributed.is_main:
            trainer.callbacks.append(self)
        trainer.checkpointer = self.checkpoints

    def resume(self, trainer: Trainer, *, inexact: bool = False) -> bool:
        """Load the newest checkpoint into the trainer and cut the records back to it; False where there is none."""
        if not self.checkpoints.resume(trainer, inexact=inexact):
            return False
        if trainer.distributed.is_main:
            self._restore_records(trainer)
        return True

    def _restore_records(self, trainer: Trainer) -> None:
        if has_incomplete_last_line(self.path / HISTORY_FILE):
            self.notify(f"the last line of {HISTORY_FILE} was torn; it is dropped")
        for name in (HISTORY_FILE, TIMING_FILE):
            if not is_valid_json_lines(self.path / name):
                self.notify(f"{name} held lines that deat did not write; it is written again from the checkpoint")
        try:
            write_records(self.path / HISTORY_FILE, trainer.history)
            write_records(self.path / TIMING_FILE, self.timings)
        except OSError as error:
            raise unwritable_error(self.path, error) from None
        self._num_history_lines = len(trainer.history)
        try_remove(self.path / FAILURE_FILE)
        self._publish_weights(None, trainer)

    def on_epoch(self, trainer: Trainer, stats: EpochStats, timing: EpochTiming) -> None:
        """Add the epoch to the records; where that fails, all are written again after the next epoch."""
        self.timings.append(timing)
        try:
            self._write_history(trainer.history)
            append_record(self.path / TIMING_FILE, timing)
        except OSError as error:
            self._num_history_lines = -1
            self.notify(f"cannot write to {str(self.path)!r} ({error.strerror}); the next epoch is tried again")

    def state_dict(self) -> dict[str, Any]:
        """The epochs' timings, which no other state has."""
        return {"timings": list(self.timings)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the timings."""
        self.timings = check_list_of(EpochTiming, state["timings"])

    def write_failure(self, facts: dict[str, Any]) -> None:
        """Write failure.json."""
        with suppress(OSError):
            write_json(self.path / FAILURE_FILE, facts, make_folder=False)

    def _write_history(self, history: list[EpochStats]) -> None:
        """One line for each epoch: added, or all written again after a rollback."""
        if len(history) == self._num_history_lines + 1:
            append_record(self.path / HISTORY_FILE, history[-1])
        else:
            write_records(self.path / HISTORY_FILE, history)
        self._num_history_lines = len(history)

    def _publish_weights(self, checkpoint: Path | None, trainer: Trainer) -> None:
        """Write best/ and last/, and delete the run that this one replaces, now that there is an epoch."""
        if not (self.path / RUN_FILE).is_file():  # as while a folder is being removed: nothing could be resumed from it
            raise CheckpointError(f"{str(self.path / RUN_FILE)!r} is missing: the run cannot resume without it")
        best = trainer.best.snapshot_or_none
        if best is None:
            return
        last = trainer.history[-1].epoch
        source = None if trainer.batches_done else checkpoint  # in the middle of an epoch the weights are no epoch's
        if not trainer.batches_done:
            self._publish_file("last", source, last, lambda: get_state_dict(trainer.model))
            if trainer.average:
                self._publish_file("averaged", None, last, trainer.average.weights)
        is_last = best.epoch == last and not best.averaged
        note = format_weights_note(best.epoch + 1, averaged=best.averaged)
        self._publish_file("best", source if is_last else None, best.epoch, lambda: best.weights, note)
        self._record_choice(trainer, is_new=checkpoint is not None)
        try_remove(backup_path(self.path))

    def _record_choice(self, trainer: Trainer, *, is_new: bool) -> None:
        """Write into run.json which epoch is the best and why.

        A run that resumes is left as it is until its next checkpoint. If it is finished, there is none, and its record
        may be one checkpoint behind; that of an older version has no choice at all.
        """
        choice = trainer.best.choice.as_json()
        try:
            record = json.loads(read_plain_text(self.path / RUN_FILE))
            is_behind = trainer.was_loaded_finished and CHOICE_KEY in record
            if record.get(CHOICE_KEY) != choice and (is_new or is_behind):
                weights = read_weights_hash(self.path / "best" / WEIGHTS_FILE)
                write_run_json(self.path, {**record, CHOICE_KEY: choice, BEST_WEIGHTS_KEY: weights})
        except (OSError, ValueError, AttributeError) as error:
            self.notify(f"cannot write the best epoch to {RUN_FILE} ({summarize_error(error)}); training continues")

    def _publish_file(
        self,
        which: EpochChoice,
        checkpoint: Path | None,
        epoch: int,
        weights: Callable[[], Any],
        note: str | None = None,
    ) -> None:
        target, note = self.path / which / WEIGHTS_FILE, note or format_weights_note(epoch + 1)
        try:
            if checkpoint:
                link_atomic(checkpoint / WEIGHTS_FILE, target)
            elif read_note(target) != note:
                target.parent.mkdir(exist_ok=True)
                write_atomic(target, encode_tensors(weights(), note), make_folder=False)
        except OSError as error:
            self.notify(f"cannot write {which}/{WEIGHTS_FILE} ({error.strerror}); the checkpoint has the weights")


def is_last_epoch_saved(folder: Path, epochs: int) -> bool:
    """Whether a run's training is finished, and best/ and last/ have its weights.

    The newest complete checkpoint is decisive; without one, the weights in last/, which were written from a checkpoint.
    The history is not: its line for an epoch is written before the checkpoint, which may have failed.

    Args:
        folder: The run's folder.
        epochs: The number of epochs that the run asks for.
    """
    try:
        newest = find_newest_checkpoint(folder).newest
        if newest is None:
            return _has_weights_with(folder, "last", format_weights_note(epochs))
        state = load_checkpoint(newest)["state"]
        if not (state["stopping"] or state["epoch"] >= epochs):
            return False
        best, last = state["best"], format_weights_note(state["epoch"])
        note = format_weights_note(best.epoch + 1, averaged=best.averaged) if isinstance(best, Snapshot) else last
        return _has_weights_with(folder, "last", last) and _has_weights_with(folder, "best", note)
    except (OSError, CheckpointError):
        return False


def _has_weights_with(folder: Path, which: EpochChoice, note: str) -> bool:
    """Whether the weights in best/ or last/ are complete and have this note of the epoch."""
    weights = folder / which / WEIGHTS_FILE
    read_tensors(weights)  # raises where the numbers are not those that were written
    return read_note(weights) == note


def check_output_folder(path: Path, overwrite: bool) -> None:
    """Refuse an output folder that exists, or with `overwrite` one that is not a run."""
    if not path.exists():
        return
    if not overwrite:
        raise folder_exists_error(path)
    if not is_run_folder(path):
        raise UsageError(f"{str(path)!r} is not a run of deat's, so it is not overwritten. Choose another --out.")


def check_no_links(path: Path) -> None:
    """Refuse links in a run's folder, through which deat would write elsewhere; the folder itself may be one."""
    published = [f"{which}/{WEIGHTS_FILE}" for which in WEIGHT_FOLDERS]
    check_no_symlinks(
        path / name
        for name in (*sorted(RECORD_FILES), LOCK_FILE_NAME, *WEIGHT_FOLDERS, *published, "report", LOGS_FOLDER)
    )


def is_run_folder(path: Path) -> bool:
    """Whether a folder has a run's record, and nothing but files of a run."""
    if read_raw_record(path) is None:
        return False
    names = [p.name for p in path.iterdir() if not p.name.startswith(".")]
    made = {p.name for p in path.glob("evaluation*.json")} | (
        {"report"} if is_report_folder(path / "report") else set()
    )
    made |= {LOGS_FOLDER} if (path / LOGS_FOLDER / STATE_FILE).is_file() else set()
    known_names = RECORD_FILES | made | {*WEIGHT_FOLDERS, LOCK_FILE_NAME}
    return all(n in known_names or CHECKPOINT_NAME_PATTERN.fullmatch(n) for n in names)


def is_report_folder(path: Path) -> bool:
    """Whether a folder has files of `deat report` alone."""
    figures = path / "figures"
    folders = [path, figures] if figures.is_dir() and not figures.is_symlink() else [path]
    try:  # of these alone: below a home or a disk there may be anything, and much of it
        files = [p for folder in folders for p in folder.iterdir() if p not in folders and not is_temporary_file(p)]
    except OSError:
        return False
    return all(REPORT_FILE_PATTERN.fullmatch(p.relative_to(path).as_posix()) for p in files)


def list_report_files(path: Path) -> list[Path]:
    """List the files in a folder that a report may have written, or that have such names."""
    files = [p for folder in (path, path / "figures") if folder.is_dir() for p in sorted(folder.iterdir())]
    return [p for p in files if REPORT_FILE_PATTERN.fullmatch(p.relative_to(path).as_posix())]


def is_empty_run_folder(path: Path) -> bool:
    """Whether a folder was created for a run that ended before run.json was written."""
    return path.is_dir() and all(p.name == LOCK_FILE_NAME or p.name.startswith(f".{RUN_FILE}.") for p in path.iterdir())


def has_checkpoint(path: Path) -> bool:
    """Whether a folder has a checkpoint to resume from."""
    try:
        return bool(list_checkpoints(path))
    except (OSError, ValueError):
        return False


def backup_path(path: Path) -> Path:
    """The name of a run that is being replaced, until the new one has an epoch."""
    return path.with_name(f".{path.name}.replaced")


def back_up_run(path: Path) -> None:
    """Rename a run that is about to be replaced; a BusyError while another process works on it."""
    check_output_folder(path, overwrite=True)
    if not path.exists():
        return
    with lock_run_folder(path):
        pass
    try:
        if backup_path(path).exists():  # what is here now never had an epoch
            shutil.rmtree(path)
        else:
            path.rename(backup_path(path))
    except OSError as error:
        raise unwritable_error(path, error) from None


def restore_backup(path: Path) -> None:
    """Undo `back_up_run`, where the new run has no epoch."""
    if backup_path(path).exists():
        try_remove(path)
        with suppress(OSError):
            backup_path(path).rename(path)


def ensure_run_folder(path: Path) -> Path:
    """Create a run's folder unless there is one; a folder that holds other things is refused."""
    if path.exists() and not (is_run_folder(path) or is_empty_run_folder(path)):
        raise folder_exists_error(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable_error(path, error) from None
    return path


def empty_run_folder(path: Path) -> None:
    """Remove everything in a run's folder but its lock; the record is removed last, since it marks the rest as a run's."""
    try:
        for child in sorted(path.iterdir(), key=lambda child: child.name == RUN_FILE):
            if child.is_dir() and not child.is_symlink():
                shutil.rmtree(child)
            elif child.name != LOCK_FILE_NAME:
                child.unlink()
    except OSError as error:
        raise unwritable_error(path, error) from None


def create_folder(path: Path) -> None:
    """Create a folder; one that exists is refused."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        raise folder_exists_error(path) from None
    except OSError as error:
        raise unwritable_error(path, error) from None


def create_unique_folder(parent: Path, name: str) -> Path:
    """Create the folder parent/name, or the first of parent/name-2, -3 … that does not exist, without a race."""
    clean = "".join(c if c.isalnum() or c in "+%._-" else "-" for c in name)[:80].lstrip(".")
    number = 1
    while True:
        path = parent / (clean if number == 1 else f"{clean}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
        except OSError as error:
            raise unwritable_error(path, error) from None
        else:
            return path


def folder_exists_error(path: Path) -> UsageError:
    """The error for a folder that exists, with what can be done about the run in it."""
    record = read_raw_record(path)
    if record is None:
        hint = ", or add --resume auto to start in it" if is_empty_run_folder(path) else ""
        return UsageError(f"{str(path)!r} exists already, and is no run of deat's. Choose another --out{hint}.")
    replaced = ", add --overwrite to replace that run" if is_run_folder(path) else ""
    resume = format_command("resume", path, record["request"])
    return UsageError(f"{str(path)!r} exists already. Choose another --out{replaced}, or resume it: {resume}")


def unwritable_error(path: Path, error: OSError) -> CheckpointError:
    """The error for a folder that cannot be written to."""
    return CheckpointError(
        f"cannot write to {str(path)!r}: {error.strerror}. Make it writable, or give a new run another --out."
    )
