"""Stop requests: a signal sets a flag, and training checks it between batches, where it can stop without loss."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from types import FrameType
from typing import Any, NoReturn

from deat.errors import Interrupted
from deat.utils.distributed import SINGLE_PROCESS, Distributed

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
DEFAULT_HANDLERS = (signal.SIG_DFL, signal.default_int_handler)
"""The handlers of a process that has installed none."""
REPEATED_SIGNAL_SECONDS = 2.0
"""Seconds within which a second signal to several processes is taken for a copy that their launcher sent."""


def signal_reason(number: signal.Signals) -> str:
    """Return the reason for which a training stops on a signal."""
    return f"interrupted by {number.name}"


def raise_keyboard_interrupt() -> NoReturn:
    """Raise what Python itself raises on Ctrl-C.

    Raises:
        KeyboardInterrupt: Always.
    """
    raise KeyboardInterrupt


class Interruption:
    """A request to stop training. If one process gets it, all processes of a run stop after the same batch.

    Args:
        distributed: The processes of the run.

    Attributes:
        reason: Why training should stop, or None if it should not.

    Example:
        >>> class StopAtAccuracy:
        ...     def on_epoch(self, trainer, stats, timing):
        ...         if stats.train_accuracy > 0.9:
        ...             trainer.interruption.request("accurate enough")
    """

    def __init__(self, distributed: Distributed = SINGLE_PROCESS) -> None:
        self.reason: str | None = None
        self.distributed, self._requested_at, self._saving = distributed, 0.0, False

    def request(self, reason: str = "stop requested") -> None:
        """Request that training stops after the current batch.

        Args:
            reason: The message of the error with which training stops.
        """
        self.reason = reason

    def check(self) -> None:
        """Stop if that was requested. All processes of a run must call this together.

        Raises:
            Interrupted: If any process got a request.
        """
        if self.distributed.all_reduce_any(self.reason is not None):
            raise Interrupted(next(filter(None, self.distributed.all_gather_json(self.reason))))

    @contextmanager
    def catch_signals(self, on_second_signal: Callable[[], None] | None = None) -> Iterator[None]:
        """Take SIGTERM and SIGINT as stop requests, in the main thread; other threads get no signals.

        Handlers that were installed before are called too, and an ignored signal stays ignored. At the end of the with
        statement, the former handlers are restored.

        Args:
            on_second_signal: What a second signal does before `saving`; by default it ends the process at once.
        """
        on_second_signal = on_second_signal or _exit_now
        formers: list[Any] = []

        def make_handler(former: Any) -> Any:
            """Replace a handler, which is noted."""
            formers.append(former)
            return self._make_handler(former, on_second_signal)

        with _installed_handlers(make_handler, lambda former: former not in (signal.SIG_IGN, None)):
            try:
                yield
            except Interrupted:  # the work is saved: another signal may not change how the command ends
                for former in formers:
                    if isinstance(former, StopSignalHandler):
                        former.leaving = True
                raise

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Ignore further signals inside, so that a second one cannot cut off the save."""
        self._saving = True
        try:
            yield
        finally:
            self._saving = False

    def _make_handler(self, former: Any, on_second_signal: Callable[[], None]) -> Any:
        def handle(number: int, frame: FrameType | None) -> None:
            """Request a stop at the first signal; a later one, unless it comes while saving, is for the caller."""
            if self._saving:
                return
            if self.reason:
                if not self.distributed.is_multiprocess or monotonic() - self._requested_at > REPEATED_SIGNAL_SECONDS:
                    on_second_signal()
                return
            self._requested_at = monotonic()
            self.request(signal_reason(signal.Signals(number)))
            if former not in DEFAULT_HANDLERS and not isinstance(former, StopSignalHandler):
                former(number, frame)

        return handle


class StopSignal(KeyboardInterrupt):
    """SIGINT or SIGTERM.

    After a plain KeyboardInterrupt has passed through `exec`, Python ends the process by SIGINT even if it was caught.
    """


class StopSignalHandler:
    """A signal handler that raises StopSignal.

    Attributes:
        received: Whether a signal came. An import that a signal interrupts may raise another error instead.
        leaving: Whether the command has ended, so that signals are only noted: its exit status is decided.
    """

    def __init__(self) -> None:
        self.received = self.leaving = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        self.received = True
        if not self.leaving:
            raise StopSignal


class _ThreadedStopSignalHandler(StopSignalHandler):
    """A signal handler that does nothing: the thread of `exit_on_signals` handles the signal."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Do nothing."""


@contextmanager
def raise_on_signals(*, ends_process: bool = False) -> Iterator[StopSignalHandler]:
    """Let SIGTERM and SIGINT raise StopSignal in the body of the with statement, if they have default handlers.

    Args:
        ends_process: Whether the process exits after the with statement. The signals are ignored from there on, so that
            they do not change its exit status.

    Yields:
        The handler, which says whether a signal came.
    """
    handler = StopSignalHandler()
    with _installed_handlers(lambda former: handler, DEFAULT_HANDLERS.__contains__, ends_process=ends_process):
        yield handler


@contextmanager
def exit_on_signals(get_exit_code: Callable[[], int], *, ends_process: bool = False) -> Iterator[StopSignalHandler]:
    """Let SIGTERM and SIGINT end this process at once in the body of the with statement, if they have default handlers.

    A thread ends the process. Python's own handlers run after the current call, which may wait for a process that died.

    Args:
        get_exit_code: Called in that thread. Its result is the exit code.
        ends_process: See `raise_on_signals`.

    Yields:
        The handler. After its `leaving` is true, signals no longer end the process.
    """
    handler = _ThreadedStopSignalHandler()
    if threading.current_thread() is not threading.main_thread():
        yield handler
        return
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # a child would write its signals to our pipe
    try:
        with (
            _installed_handlers(lambda former: handler, DEFAULT_HANDLERS.__contains__, ends_process=ends_process),
            _wakeup_pipe(write_fd),
        ):
            threading.Thread(target=_exit_on_wakeup, args=(read_fd, get_exit_code), daemon=True).start()
            yield handler
    finally:
        os.close(write_fd)  # ends the thread


@contextmanager
def delay_signals() -> Iterator[None]:
    """Delay SIGTERM and SIGINT inside a `with` block, and handle them when it ends.

    Only signals that `raise_on_signals` or `exit_on_signals` would handle are delayed.
    """
    delayed: list[int] = []
    try:
        with _installed_handlers(lambda former: lambda number, frame: delayed.append(number), _is_stop_handler):
            yield
    finally:
        if delayed:
            signal.raise_signal(delayed[0])


def _is_stop_handler(handler: Any) -> bool:
    return isinstance(handler, StopSignalHandler)


@contextmanager
def _installed_handlers(
    make_handler: Callable[[Any], Any], should_replace: Callable[[Any], bool], *, ends_process: bool = False
) -> Iterator[None]:
    """Replace handlers of stop signals by those that `make_handler` makes of them, in the main thread only."""
    former_handlers: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        former_handlers = {s: former for s in STOP_SIGNALS if should_replace(former := signal.getsignal(s))}
    for number, former in former_handlers.items():
        signal.signal(number, make_handler(former))
    try:
        yield
    finally:
        for number, former in former_handlers.items():
            signal.signal(number, signal.SIG_IGN if ends_process else former)


@contextmanager
def _wakeup_pipe(write_fd: int) -> Iterator[None]:
    """Let Python write the number of every signal to a pipe as soon as it comes."""
    former = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(former)


def _exit_on_wakeup(read_fd: int, get_exit_code: Callable[[], int]) -> None:
    while number := os.read(read_fd, 1):
        handler = signal.getsignal(number[0])
        if isinstance(handler, _ThreadedStopSignalHandler) and not handler.leaving:
            try:
                os._exit(get_exit_code())
            finally:  # also if get_exit_code fails
                os._exit(Interrupted.exit_code)
    os.close(read_fd)


def _exit_now() -> None:
    """Exit without cleaning up, which is safe: a file that is being written still has its temporary name."""
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"deat: stopped at once\n")
    os._exit(Interrupted.exit_code)
