"""When compiling pays: the engine's choice, made from what an epoch of this very run took.

Recording a network takes seconds, compiling it far longer; what compiling brings is about a sixth of each backprop
(docs/results/speed.md). So training begins recorded, or eagerly where that cannot be. Once an epoch's pace is known,
it is compiled if the backprops that are left would earn the wait back, and goes back to recorded moves if the next
epoch shows that they do not.
"""

from typing import TYPE_CHECKING, Protocol

from torch import nn

from deat.training.history import EpochTiming

if TYPE_CHECKING:
    from deat.training.trainer import Trainer

GAIN = 0.15
"""The share of a recorded backprop that compiling is expected to save."""
SECONDS_A_LAYER = 1.0
"""How long compiling is taken to last, for each layer with parameters: a guess that nobody measured."""


class Paced(Protocol):
    """What decides after an epoch how the next one runs."""

    def look(self, trainer: "Trainer", timing: EpochTiming) -> None:
        """An epoch has ended."""


class Steady:
    """Keeps to the engine that was asked for."""

    def look(self, trainer: "Trainer", timing: EpochTiming) -> None:
        """Nothing changes."""


class Pace:
    """Compiles a run that is long enough, and takes it back where that was no faster."""

    def __init__(self) -> None:
        self.recorded: float | None = None
        self._epochs, self._settled, self._spent = 0, False, 0

    def look(self, trainer: "Trainer", timing: EpochTiming) -> None:
        """Compare seconds a backprop; an engine's first epoch holds its set-up and does not count."""
        spent, self._spent = trainer.game.cost.backprops - self._spent, trainer.game.cost.backprops
        self._epochs += 1
        if self._settled or self._epochs < 2 or not spent:
            return
        pace = trainer.ranks.broadcast(timing.train_seconds / spent)  # what one decides, all must do
        if self.recorded is None:
            self._consider(trainer, pace)
        else:
            self._settle(trainer, pace, self.recorded)

    def _consider(self, trainer: "Trainer", pace: float) -> None:
        left = (trainer.settings.epochs - trainer.epoch) * len(trainer.train)
        budget = trainer.schedule.budget(trainer.state, trainer.epoch)
        saved = left * trainer.method.play.backprops(budget) * pace * GAIN
        if saved > warm_up(trainer.model):
            self.recorded, self._epochs = pace, 0
            trainer.game.runner.use_compiled(True)

    def _settle(self, trainer: "Trainer", pace: float, recorded: float) -> None:
        self._settled = True
        if trainer.game.runner.compiled is not None and pace > recorded:  # else it could not be compiled
            trainer.game.runner.use_compiled(False)


def warm_up(model: nn.Module) -> float:
    """About how many seconds compiling a network takes."""
    return SECONDS_A_LAYER * sum(any(True for _ in m.parameters(recurse=False)) for m in model.modules())
