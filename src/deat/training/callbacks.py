"""The interfaces of callbacks and checkpointers of a trainer."""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from deat.errors import UsageError
from deat.training.epoch_records import EpochStats, EpochTiming

if TYPE_CHECKING:
    from deat.training.trainer import Trainer


class Callback(Protocol):
    """Called after each epoch."""

    def on_epoch(self, trainer: "Trainer", stats: EpochStats, timing: EpochTiming) -> None:
        """Handle the end of an epoch.

        Args:
            trainer: The trainer, whose `stop`, `rewind` and `scale_step_size` may be called here.
            stats: The epoch's statistics.
            timing: The epoch's duration.
        """


class Checkpointer(Protocol):
    """Saves the state of a trainer."""

    def on_train_begin(self, trainer: "Trainer") -> None:
        """Handle the start of training, also of one that resumes."""

    def save_if_due(self, trainer: "Trainer", *, force: bool = False) -> None:
        """Save the state if it is due; called after each epoch, after all callbacks.

        Args:
            trainer: The trainer.
            force: Save in any case: training ends here.
        """


def check_callbacks(callbacks: Any) -> list[Callback]:
    """Check that callbacks can be called after an epoch.

    Args:
        callbacks: A list of objects with a method on_epoch(trainer, stats, timing).

    Returns:
        The callbacks, as a new list.

    Raises:
        UsageError: It is not a list, or an entry has no such method.
    """
    expected = "callbacks is a list of objects with a method on_epoch(trainer, stats, timing)"
    if not isinstance(callbacks, list | tuple):
        raise UsageError(f"callbacks is of type {type(callbacks).__name__}; {expected}.")
    for callback in callbacks:
        on_epoch = getattr(callback, "on_epoch", None)
        if isinstance(callback, type) or not callable(on_epoch):
            kind = f"the class {callback.__name__}" if isinstance(callback, type) else f"a {type(callback).__name__}"
            raise UsageError(f"a callback is {kind}, which has no on_epoch to call; {expected}.")
        if not _accepts_three_arguments(on_epoch):
            raise UsageError(f"on_epoch of a {type(callback).__name__} does not take three arguments; {expected}.")
    return list(callbacks)


def _accepts_three_arguments(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None, None, None)
    except TypeError:
        return False
    except ValueError:  # Python knows no signature of some built-in functions
        return True
    return True
