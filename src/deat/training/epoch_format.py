"""Format a finished epoch as a line of text."""

import sys
from typing import TextIO

from deat.tasks import CLASSIFICATION, Task
from deat.training.engine_choice import ENGINE_LABELS
from deat.training.epoch_records import EpochStats, EpochTiming, TrainingImages
from deat.training.messages import describe_missing_growth
from deat.training.trainer import Trainer
from deat.utils.text import format_seconds, make_printable


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
