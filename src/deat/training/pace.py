"""When compiling pays: the engine's choice, made from what an epoch of this very run took.

Recording a network takes a second, compiling it longer. So training begins recorded, or eagerly where that cannot be.
Once an epoch's pace is known, it is compiled if the backprops that are left would earn the wait back, and goes back to
recorded moves if the next epoch shows that they do not.
"""

from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import nn

from deat.kernels import are_built
from deat.training.history import EpochTiming

if TYPE_CHECKING:
    from deat.training.trainer import Trainer


class Deal(NamedTuple):
    """What compiling is expected to save, as a share of a recorded backprop, and to cost, in seconds.

    once is for kernels that no process has built before, again for those that are in the cache.
    """

    gain: float
    once: float
    again: float
    a_layer: float

    def seconds(self, model: nn.Module) -> float:
        """About how long a network takes."""
        layers = sum(any(True for _ in m.parameters(recurse=False)) for m in model.modules())
        return (self.again if are_built() else self.once) + self.a_layer * layers


OURS = Deal(gain=0.3, once=13, again=2, a_layer=0.1)
"""Our own kernels: docs/results/speed.md has what they gain, docs/results/fast.md what they cost, each time."""
TORCHS = Deal(gain=0.15, once=0, again=0, a_layer=1)
"""torch's compiler, which serves float32: what it brought to half precision; its seconds are a guess."""


LONG = 60
"""Seconds of an epoch in which recording hardly matters."""


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
        """Compare seconds a backprop; an engine's first epoch holds its set-up and does not count unless it is long."""
        whole = trainer.method.play.backprops(trainer.budget) * len(trainer.train)
        spent = min(whole, trainer.game.cost.backprops - self._spent)  # less than what was spent before going on
        self._spent = trainer.game.cost.backprops
        self._epochs += 1
        if self._settled or not spent:
            return
        seconds = trainer.ranks.broadcast(timing.train_seconds)  # what one decides, all must do
        if self.recorded is None and (self._epochs > 1 or seconds > LONG):
            self._consider(trainer, seconds / spent)
        elif self.recorded is not None and self._epochs > 1:
            self._settle(trainer, seconds / spent, self.recorded)

    def _consider(self, trainer: "Trainer", pace: float) -> None:
        left = (trainer.settings.epochs - trainer.epoch) * len(trainer.train)
        budget = trainer.schedule.budget(trainer.state, trainer.epoch)
        deal = OURS if trainer.engine.fuses else TORCHS
        wait = trainer.ranks.broadcast(deal.seconds(trainer.model))  # not every machine has the same cache
        if left * trainer.method.play.backprops(budget) * pace * deal.gain > wait:
            self.recorded, self._epochs = pace, 0
            trainer.game.runner.use_compiled(True)

    def _settle(self, trainer: "Trainer", pace: float, recorded: float) -> None:
        self._settled = True
        if trainer.game.runner.compiled is not None and pace > recorded:  # else it could not be compiled
            trainer.game.runner.use_compiled(False)
