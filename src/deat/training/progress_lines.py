"""Lines of text about a training: one for each finished epoch, and one that shows how far it is."""

import sys
from time import perf_counter
from typing import TextIO

from deat.tasks import CLASSIFICATION, Task
from deat.training.engine_choice import ENGINE_LABELS
from deat.training.epoch_records import EpochStats, EpochTiming, TrainingImages
from deat.training.messages import describe_missing_growth
from deat.training.trainer import Trainer
from deat.utils.text import format_duration, format_progress_bar, format_seconds, make_printable

MIN_BACKPROPS_FOR_ESTIMATE = 5


class EpochPrinter:
    """Prints one line for each epoch, for pipes and log files. A callback of the trainer.

    Args:
        file: Where to print; standard output by default.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self.file = file

    def on_epoch(self, trainer: Trainer, stats: EpochStats, timing: EpochTiming) -> None:
        """Print the epoch's scores, its seconds of training and in total, and the engine on a GPU."""
        for line in filter(None, (format_epoch_line(trainer, stats, timing), describe_missing_growth(trainer))):
            print(line, file=self.file or sys.stdout, flush=True)


def format_epoch_line(trainer: Trainer, stats: EpochStats, timing: EpochTiming) -> str:
    """Format an epoch as one line for pipes and log files: its scores, its seconds of training and in total, the engine."""
    line = f"{make_printable(trainer.method.name)}  {format_epoch(stats, trainer.config.epochs, trainer.task)}"
    duration = f"{format_seconds(timing.train_seconds)}s of {format_seconds(timing.seconds)}s"
    engine = ENGINE_LABELS.get(timing.engine, "")
    return f"{line}  {duration}{engine and f' {engine}'}"


def format_epoch(stats: EpochStats, num_epochs: int, task: Task = CLASSIFICATION) -> str:
    """Format an epoch as one line, with l_X and its threshold."""
    threshold = "" if stats.threshold is None else f"/{format_magnitude(stats.threshold)}"
    scores = f"l_X {format_magnitude(stats.magnitude)}{threshold}  loss {stats.loss:.3f}  {_format_scores(stats, task)}"
    return f"epoch {stats.epoch + 1}/{num_epochs}  k {stats.k}  {scores}  {stats.backprops:,} backprops"


def format_epoch_short(stats: EpochStats, num_epochs: int, seconds: float, task: Task = CLASSIFICATION) -> str:
    """Format an epoch as one line that fits 80 columns."""
    return (
        f"epoch {stats.epoch + 1}/{num_epochs}  k {stats.k}  {_format_scores(stats, task)}  {format_seconds(seconds)}s"
    )


def format_magnitude(value: float) -> str:
    """Format a magnitude with at most four significant digits, or thousands separators."""
    return f"{value:,.0f}" if 1000 <= value < 1e7 else f"{value:.4g}"


def format_training_images(stats: EpochStats) -> TrainingImages:
    """Return what an epoch trained on, as labels name it: its training accuracy is about these images."""
    if stats.k:
        return "under attack"
    return "random start" if stats.train_natural is None else "clean"


def _format_scores(stats: EpochStats, task: Task) -> str:
    parts = [f"train ({format_training_images(stats)}) {stats.train_accuracy:.1%}"]
    if stats.val_robust is not None and stats.val_natural is not None:
        name = "" if task == CLASSIFICATION else f"{task.metric_names[0]} "
        natural, robust = map(task.format_metric, (stats.val_natural, stats.val_robust))
        parts.append(f"val {name}{natural} robust {robust}")
    if stats.ema_robust is not None and stats.ema_natural is not None:
        natural, robust = map(task.format_metric, (stats.ema_natural, stats.ema_robust))
        parts.append(f"averaged {natural} robust {robust}")
    return "  ".join(parts)


class TrainingLine:
    """Formats how far a trainer is. It reads host numbers only, so that any thread may call it and nothing waits.

    Args:
        trainer: The trainer; None for one that is shown later.
    """

    def __init__(self, trainer: Trainer | None = None) -> None:
        self.trainer: Trainer | None = None
        self.start_time, self.backprops_before = perf_counter(), 0
        if trainer is not None:
            self.show_trainer(trainer)

    def show_trainer(self, trainer: Trainer) -> None:
        """Start the clock for a trainer; what was trained before is not part of its pace."""
        self.trainer, self.start_time = trainer, perf_counter()
        self.backprops_before = trainer.game.cost.backprops

    def format(self) -> str:
        """Return the line; empty before the first and after the last epoch."""
        trainer = self.trainer
        if trainer is None or trainer.epoch >= trainer.config.epochs:
            return ""
        epochs, batches, backprops = trainer.config.epochs, len(trainer.train), trainer.game.cost.backprops
        bar = format_progress_bar((trainer.epoch + trainer.batches_done / batches) / epochs)
        position = f"epoch {trainer.epoch + 1}/{epochs}  {_format_batch(trainer)}  k {trainer.budget.k}"
        return f"{make_printable(trainer.method.name)} {bar} {self._time_left(trainer)}  {position}  {backprops:,} backprops"

    def _time_left(self, trainer: Trainer) -> str:
        """Estimated time left, assuming that k does not change."""
        backprops = trainer.game.cost.backprops - self.backprops_before
        batches_left = len(trainer.train) * (trainer.config.epochs - trainer.epoch) - trainer.batches_done
        if backprops < MIN_BACKPROPS_FOR_ESTIMATE:
            return f"{format_duration(None)} left"
        elapsed = perf_counter() - self.start_time
        backprops_left = batches_left * trainer.method.play.backprops(trainer.budget)
        return f"{format_duration(elapsed * backprops_left / backprops)} left"


def _format_batch(trainer: Trainer) -> str:
    """The batch that is trained, or what follows the last one."""
    batches = len(trainer.train)
    return f"batch {trainer.batches_done + 1}/{batches}" if trainer.batches_done < batches else "validation"
