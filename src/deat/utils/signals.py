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
from deat.utils.distributed import ALONE, Ranks

SIGNALS = (signal.SIGTERM, signal.SIGINT)
USUAL = (signal.SIG_DFL, signal.default_int_handler)
"""What is done with them where nobody made anything of them."""
ECHO = 2.0
"""Seconds within which a launcher may pass on a signal that its processes have had already."""


class Interruption:
    """Whether somebody asked training to stop; asked of one process, all of a run stop between the same batches."""

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self.asked: str | None = None
        self.ranks, self._since = ranks, 0.0

    def ask(self, why: str = "asked to stop") -> None:
        """Ask training to stop after the batch that is running."""
        self.asked = why

    def check(self) -> None:
        """Raise Interrupted if somebody asked; every process of a run must come by."""
        if self.ranks.any(self.asked is not None):
            raise Interrupted(next(filter(None, self.ranks.gather(self.asked))))

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, SIGTERM and SIGINT ask to stop, and a second one leaves at once; then all is as it was before.

        Handlers that were there are called as well; a signal that was ignored stays ignored.
        """
        with _handled(self._handler, lambda former: former not in (signal.SIG_IGN, None)):
            yield

    def _handler(self, former: Any) -> Any:
        def handle(number: int, frame: FrameType | None) -> None:
            """Ask to stop, or leave at once if that was asked before."""
            if self.asked:
                if not self.ranks.many or monotonic() - self._since > ECHO:
                    _leave()
                return
            self._since = monotonic()
            self.ask(f"interrupted by {signal.Signals(number).name}")
            if former not in USUAL and not isinstance(former, Heard):
                former(number, frame)

        return handle


class Asked(KeyboardInterrupt):
    """Ctrl-C or SIGTERM. Of a KeyboardInterrupt itself, Python remembers that code it ran had not caught it."""


class Heard:
    """Whether a signal has come, which an import that was cut short may say in words of its own."""

    def __init__(self) -> None:
        self.signal = False

    def __call__(self, number: int, frame: FrameType | None) -> NoReturn:
        """A handler that ends work."""
        self.signal = True
        raise Asked


@contextmanager
def terminable() -> Iterator[Heard]:
    """Inside, SIGTERM and SIGINT raise Asked, where nothing else was made of them."""
    heard = Heard()
    with _handled(lambda former: heard, USUAL.__contains__):
        yield heard


@contextmanager
def leaving(status: Callable[[], int]) -> Iterator[Heard]:
    """Inside, SIGTERM and SIGINT end this process at once, where nothing else was made of them; `status` gives its own.

    A thread does so: Python's handlers wait for the call that is running, which may wait for a process that is gone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield Heard()
        return
    heard, told = os.pipe()
    os.set_blocking(told, False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # what a child is told is not meant for us
    try:
        with _handled(lambda former: _heard, USUAL.__contains__), _waking(told):
            threading.Thread(target=_listen, args=(heard, status), daemon=True).start()
            yield Heard()
    finally:
        os.close(told)  # which ends the thread


@contextmanager
def _handled(by: Callable[[Any], Any], instead_of: Callable[[Any], bool]) -> Iterator[None]:
    """Inside, what `by` makes of a former handler takes its place, where that is wanted; only in the main thread."""
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: former for number in SIGNALS if instead_of(former := signal.getsignal(number))}
    for number, former in before.items():
        signal.signal(number, by(former))
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


@contextmanager
def _waking(told: int) -> Iterator[None]:
    """Inside, every signal's number is written to this pipe, at once."""
    former = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(former)


def _heard(number: int, frame: FrameType | None) -> None:
    """Leave it to the thread that listens."""


def _listen(heard: int, status: Callable[[], int]) -> None:
    while number := os.read(heard, 1):
        if signal.getsignal(number[0]) is _heard:
            try:
                os._exit(status())
            finally:  # nothing that goes wrong in saying so may keep it here
                os._exit(Interrupted.exit_code)
    os.close(heard)


def _leave() -> None:
    """End at once: whatever is being written has not got its name yet."""
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, b"deat: left at once\n")
    os._exit(Interrupted.exit_code)
