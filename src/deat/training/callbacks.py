"""The interfaces of callbacks and checkpointers of a trainer."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from deat.errors import UsageError
from deat.training.epoch_records import EpochStats, EpochTiming

if TYPE_CHECKING:
    from deat.core.batch_buffers import Buffers
    from deat.training.train_result import TrainResult
    from deat.training.trainer import Trainer
    from deat.training.validation import ValScores


class Callback:
    """A base class of callbacks: override what you need. An object with some of these methods is a callback, too.

    With `state_dict()` and `load_state_dict(state)`, whose values JSON can hold, a callback's state is saved in
    checkpoints.

    Example:
        >>> class StopWhenGood(deat.Callback):
        ...     def on_epoch(self, trainer, stats, timing):
        ...         if (stats.val_robust or 0) > 0.5:
        ...             trainer.stop()
        >>> deat.fit(model, data, val=0.1, callbacks=[StopWhenGood()])
    """

    def on_train_begin(self, trainer: "Trainer") -> None:
        """Handle the start of training, also of one that resumes: `trainer.epoch` epochs are finished.

        Args:
            trainer: The trainer.
        """

    def on_batch(self, trainer: "Trainer", buffers: "Buffers") -> None:
        """Handle the end of a batch.

        Args:
            trainer: The trainer; `trainer.batches_done` batches of epoch `trainer.epoch` are done.
            buffers: The batch on the device: `x`, `delta`, `y`, `loss`. The next batch overwrites them, and reading one
                (`float(buffers.loss)`) makes a GPU wait, so read few of them.
        """

    def on_validation(self, trainer: "Trainer", scores: "ValScores") -> None:
        """Handle the scores on held-out images, before `on_epoch`.

        Args:
            trainer: The trainer.
            scores: Loss and accuracy, natural and under attack.
        """

    def on_epoch(self, trainer: "Trainer", stats: EpochStats, timing: EpochTiming) -> None:
        """Handle the end of an epoch.

        Args:
            trainer: The trainer, whose `stop`, `rewind` and `scale_step_size` may be called here.
            stats: The epoch's statistics.
            timing: The epoch's duration.
        """

    def on_checkpoint(self, trainer: "Trainer", path: Path) -> None:
        """Handle a checkpoint that was written to the folder `path`; it is deleted after a few more.

        Args:
            trainer: The trainer.
            path: The checkpoint's folder.
        """

    def on_train_end(self, trainer: "Trainer", result: "TrainResult | None") -> None:
        """Handle the end of training: its result, or None after an interruption or an error.

        Args:
            trainer: The trainer.
            result: The result, or None.
        """


class LambdaCallback:
    """A callback of plain functions, one for each event that you name.

    Args:
        on_train_begin: Called as `on_train_begin(trainer)`.
        on_batch: Called as `on_batch(trainer, buffers)`.
        on_validation: Called as `on_validation(trainer, scores)`.
        on_epoch: Called as `on_epoch(trainer, stats, timing)`.
        on_checkpoint: Called as `on_checkpoint(trainer, path)`.
        on_train_end: Called as `on_train_end(trainer, result)`.

    Raises:
        UsageError: What is given is no function.

    Example:
        >>> losses = []
        >>> keep = deat.LambdaCallback(on_batch=lambda trainer, buffers: losses.append(buffers.loss.clone()))
        >>> deat.fit(model, data, callbacks=[keep])
    """

    def __init__(
        self,
        *,
        on_train_begin: "Callable[[Trainer], None] | None" = None,
        on_batch: "Callable[[Trainer, Buffers], None] | None" = None,
        on_validation: "Callable[[Trainer, ValScores], None] | None" = None,
        on_epoch: "Callable[[Trainer, EpochStats, EpochTiming], None] | None" = None,
        on_checkpoint: "Callable[[Trainer, Path], None] | None" = None,
        on_train_end: "Callable[[Trainer, TrainResult | None], None] | None" = None,
    ) -> None:
        functions = {
            "on_train_begin": on_train_begin,
            "on_batch": on_batch,
            "on_validation": on_validation,
            "on_epoch": on_epoch,
            "on_checkpoint": on_checkpoint,
            "on_train_end": on_train_end,
        }
        for name, function in functions.items():
            if function is None:
                continue
            if not callable(function):
                raise UsageError(f"{name}={function!r} is no function: give one with the arguments of Callback.{name}.")
            setattr(self, name, function)


class EpochCallback(Protocol):
    """An object that is called after each epoch."""

    def on_epoch(self, trainer: "Trainer", stats: EpochStats, timing: EpochTiming) -> None:
        """Handle the end of an epoch."""


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


EpochFunction = Callable[["Trainer", EpochStats, EpochTiming], None]
CallbackLike = Callback | LambdaCallback | EpochCallback | EpochFunction
"""What `callbacks` takes: an object with methods of `Callback`, or a function that is called after each epoch."""

EVENTS = {name: method for name, method in vars(Callback).items() if name.startswith("on_")}
"""The methods of a callback by name."""
EXPECTED = (
    "callbacks is a list of functions f(trainer, stats, timing), or of objects with a method "
    "on_epoch(trainer, stats, timing) or others of deat.Callback"
)


class _FunctionCallback:
    """A function that is called after each epoch, as a callback."""

    def __init__(self, function: EpochFunction) -> None:
        self.on_epoch = function


def check_callbacks(callbacks: Any) -> list[Any]:
    """Check that callbacks can be called.

    Args:
        callbacks: A list of functions, or of objects with methods of `Callback`.

    Returns:
        The callbacks as objects, in a new list.

    Raises:
        UsageError: It is not a list, an entry has no such method, or a method takes other arguments.
    """
    if not isinstance(callbacks, list | tuple):
        raise UsageError(f"callbacks is of type {type(callbacks).__name__}; {EXPECTED}.")
    return [_check_callback(callback) for callback in callbacks]


def _check_callback(callback: Any) -> Any:
    handlers = {name: getattr(callback, name) for name in EVENTS if callable(getattr(callback, name, None))}
    if isinstance(callback, LambdaCallback) and not handlers:
        raise UsageError(f"a LambdaCallback has no function: name one of {', '.join(EVENTS)}.")
    if isinstance(callback, type) or not (handlers or callable(callback)):
        kind = f"the class {callback.__name__}" if isinstance(callback, type) else f"a {type(callback).__name__}"
        raise UsageError(f"a callback is {kind}, which has no on_epoch to call; {EXPECTED}.")
    if not handlers:
        callback, name = _FunctionCallback(callback), getattr(callback, "__name__", type(callback).__name__)
        handlers = {"on_epoch": callback.on_epoch}
        if not _accepts(callback.on_epoch, EVENTS["on_epoch"]):
            raise UsageError(f"the callback {name} does not take three arguments; {EXPECTED}.")
    for event, handler in handlers.items():
        if not _accepts(handler, EVENTS[event]):
            names = list(inspect.signature(EVENTS[event]).parameters)[1:]
            count = {1: "one argument", 2: "two arguments", 3: "three arguments"}[len(names)]
            raise UsageError(
                f"{event} of a {type(callback).__name__} does not take {count}; it is {event}({', '.join(names)}), and "
                f"{EXPECTED}."
            )
    return callback


def _accepts(handler: Callable[..., Any], declared: Callable[..., Any]) -> bool:
    """Whether a bound method takes as many arguments as the method of `Callback`, which has self."""
    arguments = [None] * (len(inspect.signature(declared).parameters) - 1)
    try:
        inspect.signature(handler).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # Python knows no signature of some built-in functions
        return True
    return True
