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
from deat.training.messages import is_dead_worker, is_out_of_memory
from deat.utils.distributed import exit_if_distributed, is_lost_peer_error, should_print_error
from deat.utils.signals import StopSignalHandler, exit_on_signals, raise_on_signals
from deat.utils.text import make_printable_lines
from deat.utils.user_code import find_user_code_line

PACKAGE_ROOT = Path(__file__).parents[1]
INTERRUPTED_NO_RUN = "interrupted; there is no run to resume"
INTERRUPTED_RESUMABLE = "interrupted; the same command goes on where it was"
OUT_OF_MEMORY_MESSAGE = (
    "out of memory. Ask for less at once: with `deat train` a smaller --batch-size, model or --precision bf16, "
    "with `deat evaluate` a smaller --block. What was saved or judged before is kept."
)

WORKER_KILLED_MESSAGE = (
    "a process that decodes images was killed, as by a lack of memory or of shared memory (/dev/shm, small in "
    "containers). Give more of it, or let `deat train` start fewer: --workers 1, or 0 for none. What was saved is kept."
)


def run_to_exit_status(command: Callable[[], int], is_resumable: Callable[[], bool]) -> int:
    """Run a command to its end, good or bad; goes_on says whether one that is interrupted can be given again."""

    def interrupted() -> int:
        """Say whether the command goes on, and with which status it leaves."""
        return (
            _report_error(INTERRUPTED_RESUMABLE, Interrupted.exit_code)
            if is_resumable()
            else _report_error(INTERRUPTED_NO_RUN, 130)
        )

    # Of several processes none may wait for another to notice that it is asked to stop.
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    with raise_on_signals() if alone else exit_on_signals(interrupted) as heard:
        return exit_if_distributed(_run_command(command, interrupted, heard))


def _run_command(
    command: Callable[[], int], on_interrupt: Callable[[], int], received_signal: StopSignalHandler
) -> int:
    try:
        return command()
    except DeatError as error:
        return _report_error(str(error), error.exit_code)
    except BrokenPipeError:  # whoever read our output left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return on_interrupt()
    except Exception as error:
        if received_signal.signal:
            return on_interrupt()
        if is_lost_peer_error(error):
            return _report_error(
                "another process of this run is gone, so this one ends too.", Interrupted.exit_code, is_fallback=True
            )
        if is_out_of_memory(error):
            return _report_error(OUT_OF_MEMORY_MESSAGE, NumericalError.exit_code)
        if is_dead_worker(error):
            return _report_error(WORKER_KILLED_MESSAGE, DataError.exit_code)
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            return _report_error(f"{str(error.filename)[:80]!r}... is too long for a file's name. Choose another.", 2)
        place = find_user_code_line(error)
        if place:
            return _report_error(
                f"the error above comes from code of yours: {place}", UsageError.exit_code, preamble=_format_traceback()
            )
        return _report_error(
            "this is a defect of deat's; the lines above say where.", DeatError.exit_code, preamble=_format_traceback()
        )


def _report_error(text: str, status: int, *, preamble: str = "", is_fallback: bool = False) -> int:
    """Say what went wrong, once for all processes that found the same; a `last` word only where nobody said why."""
    if should_print_error(preamble + text, is_fallback=is_fallback):
        print(make_printable_lines(f"{preamble}deat: {text}"), file=sys.stderr, flush=True)
    return status


def _format_traceback() -> str:
    return traceback.format_exc()


def replace_unprintable_characters() -> None:
    """Print what a terminal of few characters cannot show as question marks, rather than fail."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


@contextmanager
def short_warnings() -> Iterator[None]:
    """Inside, deat's own warnings are shown as lines of its own, without a place in its code."""
    usual = warnings.formatwarning

    def shown(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        """One warning as text."""
        own = Path(filename).is_relative_to(PACKAGE_ROOT)
        return (
            f"deat: {make_printable_lines(str(message))}\n" if own else usual(message, category, filename, lineno, line)
        )

    warnings.formatwarning = shown
    try:
        yield
    finally:
        warnings.formatwarning = usual
