"""How a running training shows itself on a terminal, and where a command prints."""

import sys
from time import perf_counter
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from deat.training.engine_choice import ENGINE_LABELS
from deat.training.epoch_format import format_epoch_short, format_magnitude
from deat.training.records import EpochStats, EpochTiming
from deat.training.trainer import Trainer
from deat.utils.text import format_duration, format_seconds, make_printable, make_printable_lines

PROGRESS_BAR_CHARS = 20


class PlainConsole(Console):
    """Where a command prints: text as it is, for a folder may be called :dog: or [red].

    That its reader left is an error like any other's, and no exit of rich's own.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(emoji=False, markup=False, highlight=False, **options)

    def on_broken_pipe(self) -> None:
        """Let the command end."""
        raise BrokenPipeError


class TrainingProgress:
    """One line that follows the batches, and a lasting one for each epoch and each change of k and of the engine.

    A callback of the trainer. Rich's own thread redraws it from host numbers alone, so that batches are not disturbed.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.trainer: Trainer | None = None
        self.start_time, self.backprops_before, self.engine = perf_counter(), 0, ""
        self.live = Live(console=console, get_renderable=self.render, refresh_per_second=8, transient=True)

    def __enter__(self) -> "TrainingProgress":
        self.start_time = perf_counter()
        self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.live.stop()

    def follow(self, trainer: Trainer) -> None:
        """Show this trainer; the first one was announced, and another is named."""
        if self.trainer is not None:
            self.console.print(f"{make_printable(trainer.method.name)} training, to compare")
        self.trainer, self.start_time, self.engine = trainer, perf_counter(), trainer.engine.name
        self.backprops_before = trainer.game.cost.backprops  # by an earlier process, in time that is not ours

    def on_epoch(self, trainer: Trainer, stats: EpochStats, timing: EpochTiming) -> None:
        """Leave the epoch's line, with all the seconds that it took, and say so when the schedule moved k."""
        self.console.print(format_epoch_short(stats, trainer.config.epochs, timing.seconds))
        k = trainer.schedule.budget(trainer.state, trainer.epoch).k
        if k != stats.k and trainer.epoch < trainer.config.epochs:
            self.console.print(f"  epoch {trainer.epoch + 1}: k {stats.k} -> {k}{_explain_k_change(stats)}")
        if self.engine != trainer.engine.name:
            self.engine = trainer.engine.name
            self.console.print(f"  moves are {ENGINE_LABELS[self.engine] or 'eager'} from here on")

    def render(self) -> Text:
        """The line as it is now."""
        trainer = self.trainer
        if trainer is None or trainer.epoch >= trainer.config.epochs:
            return Text("")
        epochs, spent = trainer.config.epochs, trainer.game.cost.backprops
        done = (trainer.epoch + trainer.step / len(trainer.train)) / epochs
        now = f"epoch {trainer.epoch + 1}/{epochs}  k {trainer.budget.k}  {spent:,} backprops"
        line = f"{make_printable(trainer.method.name)} {format_progress_bar(done)} {self._left(trainer)}  {now}"
        return Text(line, no_wrap=True, overflow="ellipsis")

    def _left(self, trainer: Trainer) -> str:
        """Time left if k stays as it is."""
        spent, batches = trainer.game.cost.backprops - self.backprops_before, len(trainer.train)
        ahead = batches * (trainer.config.epochs - trainer.epoch) - trainer.step
        if spent < 5:
            return "-:-- left"
        elapsed = perf_counter() - self.start_time
        return f"{format_duration(elapsed * ahead * trainer.method.play.backprops(trainer.budget) / spent)} left"


def format_progress_bar(fraction: float) -> str:
    """How much of something is done, drawn."""
    full = round(PROGRESS_BAR_CHARS * fraction)
    return "━" * full + "╌" * (PROGRESS_BAR_CHARS - full)


def print_stderr(text: str) -> None:
    """A line on standard error, so that what is piped or printed as JSON stays whole."""
    print(f"deat: {make_printable_lines(text)}", file=sys.stderr, flush=True)


def is_stdout_terminal() -> bool:
    """Whether standard output is a person's screen."""
    return sys.stdout.isatty()


def is_all_output_terminal() -> bool:
    """Whether standard output and standard error are read by one person, on a screen."""
    return sys.stdout.isatty() and sys.stderr.isatty()


def _explain_k_change(stats: EpochStats) -> str:
    if stats.threshold is None:
        return ""
    return f"  (l_X {format_magnitude(stats.magnitude)} passed its threshold {format_magnitude(stats.threshold)})"


class PhaseTimer:
    """Seconds by what they went into; together they are all that went by since the first was counted."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self._since = perf_counter()

    def on(self, phase: str, **known: float) -> None:
        """Put down what went by since the last call: parts of it that are known, and the rest to what it was for."""
        now = perf_counter()
        for name, seconds in {**known, phase: now - self._since - sum(known.values())}.items():
            self.parts[name] = self.parts.get(name, 0.0) + seconds
        self._since = now

    def line(self) -> str:
        """All of it, and its parts."""
        parts = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in self.parts.items())
        return f"{format_seconds(sum(self.parts.values()))} s in all: {parts}"
