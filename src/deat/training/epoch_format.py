"""A finished epoch in a line of text."""

import sys
from typing import TextIO

from deat.training.engine_choice import ENGINE_LABELS
from deat.training.records import EpochStats, EpochTiming
from deat.training.trainer import Trainer
from deat.utils.text import format_seconds, make_printable


class EpochPrinter:
    """One line an epoch, for pipes, log files and scripts; a callback of the trainer. It prints to standard output."""

    def __init__(self, file: TextIO | None = None) -> None:
        self.file = file

    def on_epoch(self, trainer: Trainer, stats: EpochStats, timing: EpochTiming) -> None:
        """Print the epoch, its training's seconds out of all that it took, and what played it on a GPU."""
        line = f"{make_printable(trainer.method.name)}  {format_epoch(stats, trainer.config.epochs)}"
        spent = f"{format_seconds(timing.train_seconds)}s of {format_seconds(timing.seconds)}s"
        how = ENGINE_LABELS.get(timing.engine, "")
        print(f"{line}  {spent}{how and f' {how}'}", file=self.file or sys.stdout, flush=True)


def format_epoch(stats: EpochStats, num_epochs: int) -> str:
    """A finished epoch in one line, with l_X and its threshold."""
    against = "" if stats.threshold is None else f"/{format_magnitude(stats.threshold)}"
    found = f"l_X {format_magnitude(stats.magnitude)}{against}  {_format_scores(stats)}"
    return f"epoch {stats.epoch + 1}/{num_epochs}  k {stats.k}  {found}  {stats.backprops:,} backprops"


def format_epoch_short(stats: EpochStats, num_epochs: int, seconds: float) -> str:
    """A finished epoch in one line of at most 80 columns."""
    return f"epoch {stats.epoch + 1}/{num_epochs}  k {stats.k}  {_format_scores(stats)}  {format_seconds(seconds)}s"


def format_magnitude(value: float) -> str:
    """A magnitude for people."""
    return f"{value:,.0f}" if 1000 <= value < 1e7 else f"{value:.4g}"


def _format_scores(stats: EpochStats) -> str:
    parts = [f"loss {stats.loss:.3f}", f"train {stats.train_accuracy:.1%}"]
    if stats.val_robust is not None and stats.val_natural is not None:
        parts.append(f"val {stats.val_natural:.1%} robust {stats.val_robust:.1%}")
    return "  ".join(parts)
