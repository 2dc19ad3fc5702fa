"""The progress of a training as one line: a bar, the time left, the epoch, the batch, k and backprops."""

from time import perf_counter

from deat.training.trainer import Trainer
from deat.utils.text import format_duration, format_progress_bar, make_printable

MIN_BACKPROPS_FOR_ESTIMATE = 5


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
        bar = format_progress_bar((trainer.epoch + trainer.step / batches) / epochs)
        position = f"epoch {trainer.epoch + 1}/{epochs}  {_format_batch(trainer)}  k {trainer.budget.k}"
        return f"{make_printable(trainer.method.name)} {bar} {self._time_left(trainer)}  {position}  {backprops:,} backprops"

    def _time_left(self, trainer: Trainer) -> str:
        """Estimated time left, assuming that k does not change."""
        backprops = trainer.game.cost.backprops - self.backprops_before
        batches_left = len(trainer.train) * (trainer.config.epochs - trainer.epoch) - trainer.step
        if backprops < MIN_BACKPROPS_FOR_ESTIMATE:
            return f"{format_duration(None)} left"
        elapsed = perf_counter() - self.start_time
        backprops_left = batches_left * trainer.method.play.backprops(trainer.budget)
        return f"{format_duration(elapsed * backprops_left / backprops)} left"


def _format_batch(trainer: Trainer) -> str:
    """The batch that is trained, or what follows the last one."""
    batches = len(trainer.train)
    return f"batch {trainer.step + 1}/{batches}" if trainer.step < batches else "validation"
