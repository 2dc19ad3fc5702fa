"""What `deat.fit` shows while it works: a line for each epoch, and below it a bar with the time left."""

from collections.abc import Iterator
from contextlib import contextmanager

from deat.training.epoch_records import EpochStats, EpochTiming
from deat.training.messages import describe_missing_growth
from deat.training.progress_lines import TrainingLine, format_epoch_line
from deat.training.trainer import Trainer
from deat.utils.live_line import make_live_display

MAX_EPOCH_LINES = 200
"""Longer trainings print a line for every second, third, ... epoch, and for the last one."""


class FitProgress:
    """Shows a training on standard error or in a notebook. A callback of the trainer, which never raises.

    Example:
        >>> progress = FitProgress()
        >>> trainer.callbacks.append(progress)
        >>> with progress.showing(trainer):
        ...     trainer.fit()
    """

    def __init__(self) -> None:
        self._line = TrainingLine()
        self._display = make_live_display(self._line.format)

    @contextmanager
    def showing(self, trainer: Trainer) -> Iterator[None]:
        """Show the bar of a trainer inside a with block."""
        self._line.show_trainer(trainer)
        with self._display:
            yield

    def print(self, text: str) -> None:
        """Print a message."""
        self._display.print(text)

    def on_epoch(self, trainer: Trainer, stats: EpochStats, timing: EpochTiming) -> None:
        """Print the epoch's line."""
        interval, number = -(-trainer.config.epochs // MAX_EPOCH_LINES), stats.epoch + 1
        if number % interval == 0 or number == trainer.config.epochs:
            self.print(format_epoch_line(trainer, stats, timing))
        if message := describe_missing_growth(trainer):
            self.print(message)
