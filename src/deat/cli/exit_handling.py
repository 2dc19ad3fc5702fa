"""How a command ends: what is said, by whom of several processes, and with which exit status."""

import errno
import io
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from deat.errors import DataError, DeatError, Interrupted, NumericalError, UsageError
from deat.training.messages import is_lost_worker, is_shortage
from deat.utils.distributed import is_lost_peer, leave, say_once
from deat.utils.signals import Heard, leaving, terminable
from deat.utils.text import plain_lines
from deat.utils.user_code import blamed

PACKAGE = Path(__file__).parents[1]
NO_RUN = "interrupted; there is no run to resume"
GOES_ON = "interrupted; the same command goes on where it was"
SHORTAGE = (
    "out of memory. Ask for less at once: with `deat train` a smaller --batch-size, model or --precision bf16, "
    "with `deat evaluate` a smaller --block. What was saved or judged before is kept."
)

LOST_WORKER = (
    "a process that decodes images was killed, as by a lack of memory or of shared memory (/dev/shm, small in "
    "containers). Give more of it, or let `deat train` start fewer: --workers 1, or 0 for none. What was saved is kept."
)


def ended(command: Callable[[], int], goes_on: Callable[[], bool]) -> int:
    """Run a command to its end, good or bad; goes_on says whether one that is interrupted can be given again."""

    def interrupted() -> int:
        """Say whether the command goes on, and with which status it leaves."""
        return _say(GOES_ON, Interrupted.exit_code) if goes_on() else _say(NO_RUN, 130)

    # Of several processes none may wait for another to notice that it is asked to stop.
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    with terminable() if alone else leaving(interrupted) as heard:
        return leave(_status(command, interrupted, heard))


def _status(command: Callable[[], int], interrupted: Callable[[], int], heard: Heard) -> int:
    try:
        return command()
    except DeatError as error:
        return _say(str(error), error.exit_code)
    except BrokenPipeError:  # whoever read our output left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return interrupted()
    except Exception as error:
        if heard.signal:
            return interrupted()
        if is_lost_peer(error):
            return _say("another process of this run is gone, so this one ends too.", Interrupted.exit_code, last=True)
        if is_shortage(error):
            return _say(SHORTAGE, NumericalError.exit_code)
        if is_lost_worker(error):
            return _say(LOST_WORKER, DataError.exit_code)
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            return _say(f"{str(error.filename)[:80]!r}... is too long for a file's name. Choose another.", 2)
        place = blamed(error)
        if place:
            return _say(f"the error above comes from code of yours: {place}", UsageError.exit_code, above=_trace())
        return _say("this is a defect of deat's; the lines above say where.", DeatError.exit_code, above=_trace())


def _say(text: str, status: int, *, above: str = "", last: bool = False) -> int:
    """Say what went wrong, once for all processes that found the same; a `last` word only where nobody said why."""
    if say_once(above + text, last=last):
        print(plain_lines(f"{above}deat: {text}"), file=sys.stderr, flush=True)
    return status


def _trace() -> str:
    return traceback.format_exc()


def tolerate_any_terminal() -> None:
    """Print what a terminal of few characters cannot show as question marks, rather than fail."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Inside, deat's own warnings are shown as lines of its own, without a place in its code."""
    usual = warnings.formatwarning

    def shown(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        """One warning as text."""
        own = Path(filename).is_relative_to(PACKAGE)
        return f"deat: {plain_lines(str(message))}\n" if own else usual(message, category, filename, lineno, line)

    warnings.formatwarning = shown
    try:
        yield
    finally:
        warnings.formatwarning = usual
