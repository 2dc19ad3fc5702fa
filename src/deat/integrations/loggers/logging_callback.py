"""The callback that passes a training's metrics to its loggers; a logger's failure never stops the training."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from deat.core.batch_buffers import Buffers
from deat.errors import Interrupted, UsageError
from deat.integrations.loggers.logger import LoggedRun, Logger, Status, get_loggers
from deat.threat import UNIT_BOX
from deat.training.callbacks import Callback
from deat.training.epoch_records import EpochStats, EpochTiming
from deat.training.run_record import describe_training
from deat.training.train_result import TrainResult
from deat.training.trainer import Trainer
from deat.utils.numbers import is_int_at_least
from deat.utils.safe_write import write_atomic, write_json
from deat.utils.safetensors_files import encode_tensors
from deat.utils.text import MessageHandler, make_printable, show_as_warning, summarize_error
from deat.utils.user_code import is_file_spec

STATE_FILE = "loggers.json"
"""The file in the folder of logs by which a resumed run finds its records again."""
STATS_METRICS = {
    "k": "k",
    "l_X": "magnitude",
    "threshold": "threshold",
    "step_size": "alpha",
    "loss": "loss",
    "val_loss": "val_loss",
    "train_natural": "train_natural",
    "train_robust": "train_robust",
    "val_natural": "val_natural",
    "val_robust": "val_robust",
    "ema_natural": "ema_natural",
    "ema_robust": "ema_robust",
    "lr": "lr",
    "backprops": "backprops",
}
"""The metrics of an epoch, and the fields of EpochStats that they come from."""
TIMING_METRICS = ("train_seconds", "val_seconds", "images_per_second")
NUM_IMAGES = 8


class RunLog(Callback):
    """A callback that writes a training into loggers. Use it as a context manager around training, which ends the records.

    Args:
        loggers: The loggers.
        folder: The folder for their files and for `loggers.json`.
        every: Log the loss of every so many batches; 0 for none. Reading it makes a GPU wait.
        checkpoints: Whether to store every checkpoint as an artefact, where the tool has them.
        name: A name for the run; by default that of the method and the data.
        config: Further settings, as nested JSON values, such as the record of a run's folder. They replace those of the
            trainer under the same keys: it knows a network by its class, and no name of its data.
        notify: Shows which logger failed; by default a RuntimeWarning.

    Example:
        >>> log = RunLog(get_loggers("csv,tensorboard"), Path("logs"))
        >>> trainer = deat.make_trainer(model, digits, callbacks=[log])
        >>> with log:
        ...     trainer.fit()
    """

    def __init__(
        self,
        loggers: Sequence[Logger],
        folder: Path,
        *,
        every: int = 0,
        checkpoints: bool = False,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        notify: MessageHandler | None = None,
    ) -> None:
        self.loggers, self.folder, self.name, self.config = list(loggers), folder, name, dict(config or {})
        self.every, self.checkpoints = every, checkpoints
        self.notify = notify or show_as_warning
        self.trainer: Trainer | None = None
        self._active: list[Logger] | None = None
        self._is_complete = True

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_stopped = isinstance(error, KeyboardInterrupt | Interrupted) or (error is None and not self._is_complete)
        self.finish("interrupted" if is_stopped else "failed" if error else "finished")

    def on_train_begin(self, trainer: Trainer) -> None:
        """Begin or continue the records, if there is anything left to train."""
        self.trainer = trainer
        if trainer.has_epochs_left:
            self._start(trainer)

    def on_batch(self, trainer: Trainer, buffers: Buffers) -> None:
        """Log the loss of the batch, if it is its turn."""
        number = trainer.epoch * len(trainer.train) + trainer.batches_done
        if self._active and self.every and number % self.every == 0:
            loss = float(buffers.loss)
            self._tell(lambda logger: logger.log_metrics({"batch_loss": loss}, number, "batch"))

    def on_epoch(self, trainer: Trainer, stats: EpochStats, timing: EpochTiming) -> None:
        """Log the epoch, and some of its last adversarial examples."""
        self._tell(lambda logger: _log_epoch(logger, stats, timing))
        drawing = [logger for logger in self._active or () if type(logger).log_image is not Logger.log_image]
        if drawing and stats.k:
            with _reported(self.notify, "adversarial examples cannot be drawn for the loggers"):
                image = draw_adversarial_examples(trainer)
                if image is not None:
                    self._tell(lambda logger: logger.log_image("adversarial_examples", image, stats.epoch + 1), drawing)

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """Store the checkpoint, if that is wanted."""
        if self.checkpoints:
            self._tell(lambda logger: logger.log_file(path, "checkpoint"), self._storing())

    def on_train_end(self, trainer: Trainer, result: TrainResult | None) -> None:
        """Log the results, and store the best weights."""
        self._is_complete = result is not None
        if result is None or not self._active:
            return
        best, last = result.best, result.history[-1]
        values = {"best_epoch": best.epoch + 1, "best_natural": best.natural, "best_robust": best.robust}
        values |= {"epochs": len(result.history), "final_k": last.k, "backprops": last.backprops}
        values |= {"seconds": result.seconds}
        summary = {name: float(value) for name, value in values.items() if value is not None}
        self._tell(lambda logger: logger.log_summary(summary))
        if storing := self._storing():
            self._store_best_weights(result, storing)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Log a table, such as the final scores.

        Args:
            name: The table's name.
            columns: The names of its columns.
            rows: Its rows, with a value for each column.
        """
        if self._active is None and self.trainer is not None:
            self._start(self.trainer)
        self._tell(lambda logger: logger.log_table(name, columns, rows))

    def finish(self, status: Status) -> None:
        """End the records that were started.

        Args:
            status: How the training ended.
        """
        self._tell(lambda logger: logger.finish(status))
        self._active = None

    def _start(self, trainer: Trainer) -> None:
        if not trainer.distributed.is_main:
            return
        self._active, states, keys = list(self.loggers), read_states(self.folder), _unique_names(self.loggers)
        run = LoggedRun(
            self.name or f"{trainer.method.name}-{trainer.data_name or type(trainer.model).__name__}",
            self.folder,
            describe_training(trainer) | self.config,
            (*STATS_METRICS, *TIMING_METRICS),
            epochs_done=trainer.epoch,
            batches_done=trainer.epoch * len(trainer.train) + trainer.batches_done,
            backprops_done=trainer.game.cost.backprops,
        )
        for key, logger in zip(keys, self.loggers, strict=True):
            state = states.get(key, {})
            self._tell(partial(_start_logger, run=replace(run, state=state), history=trainer.history), [logger])
        new_states = {
            key: dict(logger.state) for key, logger in zip(keys, self.loggers, strict=True) if logger in self._active
        }
        with _reported(self.notify, "its state cannot be written, so that a resumed run begins a new record"):
            options = {"every": self.every, "checkpoints": self.checkpoints}
            write_json(self.folder / STATE_FILE, {**options, "loggers": {**states, **new_states}})

    def _tell(self, call: Callable[[Logger], None], loggers: Sequence[Logger] | None = None) -> None:
        """Call every active logger; one that fails is reported and left out from then on."""
        for logger in list(self._active or () if loggers is None else loggers):
            if logger not in (self._active or ()):
                continue
            try:
                with redirect_stdout(sys.stderr):  # a command's standard output may be JSON
                    call(logger)
            except (Exception, SystemExit) as error:  # whatever a tool raises
                assert self._active is not None
                self._active.remove(logger)
                self.notify(
                    f"the logger {logger.name or type(logger).__name__!r} failed "
                    f"({summarize_error(error)}); it logs no more, and training continues"
                )

    def _storing(self) -> list[Logger]:
        """The active loggers whose tool has artefacts."""
        return [logger for logger in self._active or () if type(logger).log_file is not Logger.log_file]

    def _store_best_weights(self, result: TrainResult, loggers: Sequence[Logger]) -> None:
        file = self.folder / "best.safetensors"
        with _reported(self.notify, "the best weights cannot be written for the loggers"):
            write_atomic(file, encode_tensors(dict(result.best.weights)))
            self._tell(lambda logger: logger.log_file(file, "best-weights"), loggers)
        file.unlink(missing_ok=True)


def read_states(folder: Path) -> dict[str, Any]:
    """Read by what the loggers in a folder find their records; empty where there is nothing, or it is damaged."""
    states = _read_state_file(folder).get("loggers")
    return {str(k): v for k, v in states.items() if isinstance(v, dict)} if isinstance(states, dict) else {}


def read_log_options(folder: Path) -> tuple[int, bool]:
    """Read what the loggers in a folder log besides epochs: of how many batches one (0 for none), and checkpoints."""
    content = _read_state_file(folder)
    every = content.get("every", 0)
    return (every if is_int_at_least(every, 0) else 0), content.get("checkpoints") is True


def get_recorded_loggers(folder: Path, notify: MessageHandler) -> list[Logger]:
    """Return the registered loggers that a run was started with; those that are not available are named."""
    loggers: list[Logger] = []
    for name in read_states(folder):
        try:
            if not is_file_spec(name):  # a record never names code to be run
                loggers += get_loggers([name])
        except UsageError as error:
            notify(f"the run is not logged to {make_printable(name)!r} any more: {error}")
    return loggers


def _read_state_file(folder: Path) -> dict[str, Any]:
    try:
        content = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def epoch_metrics(stats: EpochStats, timing: EpochTiming | None) -> dict[str, float]:
    """Return the metrics of an epoch that it has."""
    values = {name: getattr(stats, field) for name, field in STATS_METRICS.items()}
    values |= {name: getattr(timing, name, None) for name in TIMING_METRICS}
    return {name: float(value) for name, value in values.items() if value is not None}


def _start_logger(logger: Logger, run: LoggedRun, history: Sequence[EpochStats]) -> None:
    """Start a logger; a new record of a run that is resumed gets the epochs that it already has."""
    logger.start(run)
    for stats in () if run.state else history:
        _log_epoch(logger, stats, None)


def _log_epoch(logger: Logger, stats: EpochStats, timing: EpochTiming | None) -> None:
    logger.log_step_begin("k", float(stats.k), stats.epoch)
    logger.log_metrics(epoch_metrics(stats, timing), stats.epoch + 1)


def draw_adversarial_examples(trainer: Trainer, count: int = NUM_IMAGES) -> Tensor | None:
    """Draw some images of the last batch in three rows: clean, adversarial, and their difference made visible.

    Args:
        trainer: The trainer.
        count: How many images.

    Returns:
        One image, (C, H, W) uint8 with 1 or 3 channels; None where inputs are no images.
    """
    game, buffers = trainer.game, trainer.game.last_batch
    if buffers is None or buffers.x.dim() != 4 or game.threat.box != UNIT_BOX:
        return None
    x = buffers.x[:count].detach().float()
    delta = game.attack.visible_delta(game.threat, x, buffers.delta[:count].detach().float())
    largest = delta.abs().amax().clamp_min(1e-12)
    rows = torch.stack([x, (x + delta).clamp(0, 1), 0.5 + delta / (2 * largest)])
    rows = rows if rows.shape[2] in (1, 3) else rows[:, :, :1]
    kinds, n, channels, height, width = rows.shape
    grid = rows.permute(2, 0, 3, 1, 4).reshape(channels, kinds * height, n * width)
    return (grid * 255).round().to(torch.uint8).cpu()


def _unique_names(loggers: Sequence[Logger]) -> list[str]:
    names = [logger.name or type(logger).__name__ for logger in loggers]
    return [name if name not in names[:i] else f"{name}-{names[:i].count(name)}" for i, name in enumerate(names)]


@contextmanager
def _reported(notify: MessageHandler, what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of the disk, or of a network's state
        notify(f"{what} ({summarize_error(error)})")
