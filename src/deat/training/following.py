"""Who may follow a training: those who are told of its epochs, and the one who keeps its state."""

from typing import TYPE_CHECKING, Protocol

from deat.training.history import EpochStats, EpochTiming

if TYPE_CHECKING:
    from deat.training.trainer import Trainer


class Callback(Protocol):
    """Somebody who is told between epochs; there are no calls inside the batch loop."""

    def on_epoch(self, trainer: "Trainer", stats: EpochStats, timing: EpochTiming) -> None:
        """An epoch has ended and was recorded."""


class Keeper(Protocol):
    """Somebody who keeps a trainer's state where it survives the process; told when all callbacks have been."""

    def begin(self, trainer: "Trainer") -> None:
        """Training is about to begin or to go on."""

    def keep(self, trainer: "Trainer", *, now: bool = False) -> None:
        """An epoch has ended, or, with now, training stops here."""
