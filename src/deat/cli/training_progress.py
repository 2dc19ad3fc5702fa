"""Shows a training on a terminal: a live progress line, a line per epoch, and where the time went."""

from time import perf_counter
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from deat.training.engine_choice import ENGINE_LABELS
from deat.training.epoch_records import EpochStats, EpochTiming
from deat.training.messages import describe_missing_growth
from deat.training.progress_lines import TrainingLine, format_epoch_short, format_magnitude
from deat.training.trainer import Trainer
from deat.utils.text import format_seconds, make_printable


class TrainingProgress:
    """Trainer callback that shows a live progress line, and prints a line for each epoch and each change of k or engine.

    Use it as a context manager: the live line is shown inside the `with` block. Rich redraws it in a thread of its own
    and reads only host numbers, so that training is not slowed down.

    Args:
        console: Console to print to.

    Example:
        >>> with TrainingProgress(console) as progress:
        ...     progress.show_trainer(trainer)
        ...     trainer.callbacks.append(progress)
        ...     trainer.fit()
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.line, self.engine_name = TrainingLine(), ""
        self.live = Live(console=console, get_renderable=self.render, refresh_per_second=8, transient=True)

    def __enter__(self) -> "TrainingProgress":
        self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.live.stop()

    def show_trainer(self, trainer: Trainer) -> None:
        """Show the progress of a trainer. A second trainer is announced, as a baseline.

        Args:
            trainer: The trainer to show from now on.
        """
        if self.line.trainer is not None:
            self.console.print(f"{make_printable(trainer.method.name)} training, to compare")
        self.line.show_trainer(trainer)
        self.engine_name = trainer.engine.name

    def on_epoch(self, trainer: Trainer, stats: EpochStats, timing: EpochTiming) -> None:
        """Print the epoch's line, and a line each if k or the engine changed.

        Args:
            trainer: The trainer.
            stats: Statistics of the epoch that ended.
            timing: Seconds that the epoch took.
        """
        self.console.print(format_epoch_short(stats, trainer.config.epochs, timing.seconds, trainer.task))
        k = trainer.schedule.budget(trainer.schedule_state, trainer.epoch).k
        if k != stats.k and trainer.epoch < trainer.config.epochs:
            self.console.print(f"  epoch {trainer.epoch + 1}: k {stats.k} -> {k}{_explain_k_change(stats)}")
        if message := describe_missing_growth(trainer):
            self.console.print(f"  {message}", soft_wrap=True)
        if self.engine_name != trainer.engine.name:
            self.engine_name = trainer.engine.name
            self.console.print(f"  moves are {ENGINE_LABELS[self.engine_name] or 'eager'} from now on")

    def render(self) -> Text:
        """Return the progress line: method, bar, time left, epoch, batch, k and backprops."""
        return Text(self.line.format(), no_wrap=True, overflow="ellipsis")


def _explain_k_change(stats: EpochStats) -> str:
    if stats.threshold is None:
        return ""
    return f"  (l_X {format_magnitude(stats.magnitude)} passed its threshold {format_magnitude(stats.threshold)})"


class PhaseTimer:
    """Assigns all elapsed time to named phases, such as training, saving and scores.

    Example:
        >>> timer = PhaseTimer()
        >>> trainer.fit()
        >>> timer.add_phase("saving", training=24.0, validation=20.0)
        >>> timer.summary()
        '70.0 s in all: training 24.0, validation 20.0, saving 26.0'
    """

    def __init__(self) -> None:
        self.seconds_by_phase: dict[str, float] = {}
        self._last_mark = perf_counter()

    def add_phase(self, phase: str, **measured: float) -> None:
        """Assign the time since the last call, or since the timer was created.

        Args:
            phase: Phase that gets the time that is not in `measured`.
            **measured: Seconds of this time that belong to other phases.
        """
        now = perf_counter()
        rest = now - self._last_mark - sum(measured.values())
        for name, seconds in {**measured, phase: rest}.items():
            self.seconds_by_phase[name] = self.seconds_by_phase.get(name, 0.0) + seconds
        self._last_mark = now

    def summary(self) -> str:
        """Return the total and the seconds of each phase, as one line."""
        phases = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in self.seconds_by_phase.items())
        return f"{format_seconds(sum(self.seconds_by_phase.values()))} s in all: {phases}"
