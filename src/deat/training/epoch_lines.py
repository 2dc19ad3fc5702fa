"""A finished epoch in a line of text."""

import sys
from typing import TextIO

from deat.training.engine_choice import IN_WORDS
from deat.training.records import EpochStats, EpochTiming
from deat.training.trainer import Trainer
from deat.utils.numbers import short_seconds
from deat.utils.text import plain


class EpochLines:
    """One line an epoch, for pipes, log files and scripts; a callback of the trainer. It prints to standard output."""

    def __init__(self, file: TextIO | None = None) -> None:
        self.file = file

    def on_epoch(self, trainer: Trainer, stats: EpochStats, timing: EpochTiming) -> None:
        """Print the epoch, its training's seconds out of all that it took, and what played it on a GPU."""
        line = f"{plain(trainer.method.name)}  {describe(stats, trainer.settings.epochs)}"
        spent = f"{short_seconds(timing.train_seconds)}s of {short_seconds(timing.seconds)}s"
        how = IN_WORDS.get(timing.engine, "")
        print(f"{line}  {spent}{how and f' {how}'}", file=self.file or sys.stdout, flush=True)


def describe(stats: EpochStats, epochs: int) -> str:
    """A finished epoch in one line, with l_X and its threshold."""
    against = "" if stats.threshold is None else f"/{short(stats.threshold)}"
    found = f"l_X {short(stats.magnitude)}{against}  {_scores(stats)}"
    return f"epoch {stats.epoch + 1}/{epochs}  k {stats.k}  {found}  {stats.backprops:,} backprops"


def brief(stats: EpochStats, epochs: int, seconds: float) -> str:
    """A finished epoch in one line of at most 80 columns."""
    return f"epoch {stats.epoch + 1}/{epochs}  k {stats.k}  {_scores(stats)}  {short_seconds(seconds)}s"


def short(value: float) -> str:
    """A magnitude for people."""
    return f"{value:,.0f}" if 1000 <= value < 1e7 else f"{value:.4g}"


def _scores(stats: EpochStats) -> str:
    parts = [f"loss {stats.loss:.3f}", f"train {stats.train_accuracy:.1%}"]
    if stats.val_robust is not None and stats.val_natural is not None:
        parts.append(f"val {stats.val_natural:.1%} robust {stats.val_robust:.1%}")
    return "  ".join(parts)
