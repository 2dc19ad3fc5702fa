"""Train into a folder: lock it, resume or start, save on a signal, and explain what ended training early.

`deat train`, `deat resume`, the cells of `deat bench` and `deat.fit(checkpoints=...)` all train by `FolderTraining`.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Any

from deat.errors import CheckpointError, Interrupted, NumericalError, UsageError
from deat.runs.record_files import HISTORY_FILE, WATCH_FILE, make_run_record, recorded_init_hash
from deat.runs.resolve_request import Run
from deat.runs.run_dir import RunFolder, empty_run_folder, restore_backup
from deat.training.checkpoints import Checkpoints
from deat.training.messages import describe_stop_position
from deat.training.trainer import Trainer
from deat.utils.file_locks import lock_run_folder
from deat.utils.text import MessageHandler, ignore_message


class ResumePolicy(Enum):
    """What to do about a training that is in the folder."""

    NEVER = auto()
    """Start: the folder is new."""
    IF_STARTED = auto()
    """Resume from the newest checkpoint; start where there was no time for one."""
    REQUIRED = auto()
    """Resume from the newest checkpoint; refuse a folder without one."""
    OR_RESTART = auto()
    """Resume from the newest checkpoint; where that is not possible exactly, remove the run and start."""


@dataclass(frozen=True, kw_only=True)
class FolderOptions:
    """How a training is kept in a folder.

    Args:
        create_folder: Creates the folder, or names the one that is there; called by the main process alone.
        resume: What to do about a training that is in the folder.
        inexact: Resume also where the numbers will differ from those of an uninterrupted training.
        recorded_options: The flags of a command that run.json keeps for resuming.
        resume_hint: What a message about an interruption says of a folder and of how to resume; None raises it as is.
        notify: Shows warnings, such as of a failed write; by default checkpoints give a RuntimeWarning.
    """

    create_folder: Callable[[], Path]
    resume: ResumePolicy
    inexact: bool = False
    recorded_options: dict[str, Any] | None = None
    resume_hint: Callable[[Path], str] | None = None
    notify: MessageHandler | None = None


class FolderTraining:
    """A training and the folder that keeps it: checkpoints, and for a run its records too.

    Args:
        make_trainer: Makes the trainer; called again where a run is restarted.
        options: How it is kept.
        run: The run whose records are written; None keeps checkpoints alone.

    Attributes:
        trainer: The trainer; a restart replaces it when `session` begins.
        path: The folder.
        resumed: Whether the trainer has the state of a checkpoint.
        store: What writes into the folder: a RunFolder for a run, or Checkpoints alone.
        record: What run.json says of the run.
        watch: The run's overfit watch, if it has one.

    Example:
        training = FolderTraining(run.trainer, options, run)
        with training.session():
            result = training.trainer.fit()
    """

    def __init__(self, make_trainer: Callable[[], Trainer], options: FolderOptions, run: Run | None = None) -> None:
        self.make_trainer, self.options, self.run = make_trainer, options, run
        self.path, self.resumed, self.record = Path(), False, dict[str, Any]()
        self.store: RunFolder | Checkpoints
        self._set_trainer(make_trainer())

    @contextmanager
    def session(self) -> Iterator[None]:
        """Hold the folder's lock and handle signals inside; training is resumed or started first.

        SIGTERM and SIGINT end training and scoring after the batch that is running, once it is saved.

        Raises:
            BusyError: Another process trains into the folder.
            CheckpointError: The folder cannot be written, or there is nothing to resume.
            UsageError: The training that is in the folder is another one.
            Interrupted: A signal came, and training is saved.
        """
        with ExitStack() as stack, self.trainer.interruption.catch_signals():
            if self.run:
                self.record = self._make_record(self.run)
            self.path = Path(self.trainer.distributed.run_on_main(lambda: str(self._lock_folder(stack))))
            self._attach()
            try:
                self.resumed = self._resume()
                if not self.resumed:
                    self._write_record(self.record)
                yield
            except Interrupted as error:
                if self.options.resume_hint is None:
                    raise
                position, hint = describe_stop_position(self.trainer), self.options.resume_hint(self.path)
                raise Interrupted(f"{error}{position}; {hint}") from None
            except Exception as error:
                self._clean_up(error)
                raise

    def _set_trainer(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.watch = self.run.watch(trainer, notify=self.options.notify) if self.run else None

    def _make_record(self, run: Run) -> dict[str, Any]:
        options = self.options.recorded_options
        return make_run_record(run, self.trainer) | ({} if options is None else {"options": options})

    def _lock_folder(self, stack: ExitStack) -> Path:
        path = self.options.create_folder()
        stack.enter_context(lock_run_folder(path, self.options.notify or ignore_message))
        return path

    def _attach(self) -> None:
        """Let the trainer save into the folder; the watch is called first, since it may take epochs back."""
        trainer, notify = self.trainer, self.options.notify
        if self.run is None:
            self.store = trainer.checkpointer = Checkpoints(self.path, notify=notify)
            return
        if self.watch:
            self.watch.log_path = self.path / WATCH_FILE if trainer.distributed.is_main else None
            trainer.callbacks.append(self.watch)
        identity = self.run.identity(trainer)
        self.store = RunFolder(self.path, extra_config=identity, code_files=self.run.code, notify=notify)
        self.store.attach(trainer)

    def _resume(self) -> bool:
        """Put the newest checkpoint into the trainer, as the policy says; False where training starts."""
        policy = self.options.resume
        if policy is ResumePolicy.OR_RESTART:
            return self._resume_or_empty_folder()
        if policy is ResumePolicy.NEVER:
            return False
        if not self.store.resume(self.trainer, inexact=self.options.inexact):
            if policy is ResumePolicy.REQUIRED or (self.path / HISTORY_FILE).exists():
                raise CheckpointError(
                    f"there is no checkpoint in {str(self.path)!r} to resume from; nothing was changed."
                )
            return False
        if self.options.inexact and not self.trainer.was_loaded_finished:
            reasons = {"exact": False, "not_exact_because": ["resumed with --inexact"]}
            self._write_record({**self.record, "digest_of_init": recorded_init_hash(self.path), **reasons})
        return True

    def _resume_or_empty_folder(self) -> bool:
        try:
            if self.store.resume(self.trainer):
                return True
        except (UsageError, CheckpointError) as error:
            (self.options.notify or ignore_message)(f"started again: {error}")
            interruption = self.trainer.interruption
            self._set_trainer(self.make_trainer())  # the checkpoint may have changed the first one
            self.trainer.set_interruption(interruption)
            self._attach()
        self.trainer.distributed.run_on_main(partial(empty_run_folder, self.path))
        return False

    def _write_record(self, record: dict[str, Any]) -> None:
        if isinstance(self.store, RunFolder):
            self.trainer.distributed.run_on_main(partial(self.store.write_record, record))

    def _clean_up(self, error: Exception) -> None:
        """Note a numerical failure, and put back the run that this one was to replace if it has no epoch."""
        if not isinstance(self.store, RunFolder) or not self.trainer.distributed.is_main:
            return
        if isinstance(error, NumericalError):
            self.store.write_failure({"error": str(error), **error.details})
        if not self.trainer.history:
            restore_backup(self.path)
