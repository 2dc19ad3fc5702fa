"""Being asked to stop: a signal sets a flag, and training asks for it where it can stop without loss."""

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
"""What is done with them where nobody made anything of them."""
REPEATED_SIGNAL_SECONDS = 2.0
"""Seconds within which a launcher may pass on a signal that its processes have had already."""


class Interruption:
    """Whether somebody asked training to stop; asked of one process, all of a run stop between the same batches."""

    def __init__(self, distributed: Distributed = SINGLE_PROCESS) -> None:
        self.reason: str | None = None
        self.distributed, self._requested_at = distributed, 0.0

    def request(self, reason: str = "asked to stop") -> None:
        """Ask training to stop after the batch that is running."""
        self.reason = reason

    def check(self) -> None:
        """Raise Interrupted if somebody asked; every process of a run must come by."""
        if self.distributed.all_reduce_any(self.reason is not None):
            raise Interrupted(next(filter(None, self.distributed.all_gather(self.reason))))

    @contextmanager
    def catch_signals(self) -> Iterator[None]:
        """Inside, SIGTERM and SIGINT ask to stop, and a second one leaves at once; then all is as it was before.

        Handlers that were there are called as well; a signal that was ignored stays ignored.
        """
        with _installed_handlers(self._make_handler, lambda former: former not in (signal.SIG_IGN, None)):
            yield

    def _make_handler(self, former: Any) -> Any:
        def handle(number: int, frame: FrameType | None) -> None:
            """Ask to stop, or leave at once if that was asked before."""
            if self.reason:
                if not self.distributed.is_multiprocess or monotonic() - self._requested_at > REPEATED_SIGNAL_SECONDS:
                    _exit_now()
                return
            self._requested_at = monotonic()
            self.request(f"interrupted by {signal.Signals(number).name}")
            if former not in DEFAULT_HANDLERS and not isinstance(former, StopSignalHandler):
                former(number, frame)

        return handle


class StopSignal(KeyboardInterrupt):
    """Ctrl-C or SIGTERM. Of a KeyboardInterrupt itself, Python remembers that code it ran had not caught it."""


class StopSignalHandler:
    """Whether a signal has come, which an import that was cut short may say in words of its own."""

    def __init__(self) -> None:
        self.received = False

    def __call__(self, number: int, frame: FrameType | None) -> NoReturn:
        """A handler that ends work."""
        self.received = True
        raise StopSignal


@contextmanager
def raise_on_signals() -> Iterator[StopSignalHandler]:
    """Inside, SIGTERM and SIGINT raise Asked, where nothing else was made of them."""
    heard = StopSignalHandler()
    with _installed_handlers(lambda former: heard, DEFAULT_HANDLERS.__contains__):
        yield heard


@contextmanager
def exit_on_signals(get_exit_code: Callable[[], int]) -> Iterator[StopSignalHandler]:
    """Inside, SIGTERM and SIGINT end this process at once, where nothing else was made of them; `status` gives its own.

    A thread does so: Python's handlers wait for the call that is running, which may wait for a process that is gone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield StopSignalHandler()
        return
    heard, told = os.pipe()
    os.set_blocking(told, False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # what a child is told is not meant for us
    try:
        with _installed_handlers(lambda former: _defer_to_thread, DEFAULT_HANDLERS.__contains__), _wakeup_pipe(told):
            threading.Thread(target=_exit_on_wakeup, args=(heard, get_exit_code), daemon=True).start()
            yield StopSignalHandler()
    finally:
        os.close(told)  # which ends the thread


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
    return isinstance(handler, StopSignalHandler) or handler is _defer_to_thread


@contextmanager
def _installed_handlers(make_handler: Callable[[Any], Any], should_replace: Callable[[Any], bool]) -> Iterator[None]:
    """Inside, what `by` makes of a former handler takes its place, where that is wanted; only in the main thread."""
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: former for number in STOP_SIGNALS if should_replace(former := signal.getsignal(number))}
    for number, former in before.items():
        signal.signal(number, make_handler(former))
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


@contextmanager
def _wakeup_pipe(write_fd: int) -> Iterator[None]:
    """Inside, every signal's number is written to this pipe, at once."""
    former = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(former)


def _defer_to_thread(number: int, frame: FrameType | None) -> None:
    """Leave it to the thread that listens."""


def _exit_on_wakeup(read_fd: int, get_exit_code: Callable[[], int]) -> None:
    while number := os.read(read_fd, 1):
        if signal.getsignal(number[0]) is _defer_to_thread:
            try:
                os._exit(get_exit_code())
            finally:  # nothing that goes wrong in saying so may keep it here
                os._exit(Interrupted.exit_code)
    os.close(read_fd)


def _exit_now() -> None:
    """End at once: whatever is being written has not got its name yet."""
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"deat: left at once\n")
    os._exit(Interrupted.exit_code)
