"""Runs a command and turns its outcome, errors and signals into a message and an exit status."""

import errno
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Protocol

from deat.errors import CheckpointError, DataError, DeatError, Interrupted, NumericalError, UsageError
from deat.training.messages import is_dead_worker, is_out_of_memory
from deat.utils.distributed import get_message_store, is_process_group_initialized
from deat.utils.signals import (
    StopSignal,
    StopSignalHandler,
    delay_signals,
    exit_on_signals,
    raise_on_signals,
)
from deat.utils.text import make_printable_lines
from deat.utils.user_code import find_user_code_line

PACKAGE_ROOT = Path(__file__).parents[1]
EXIT_INTERRUPTED_NO_RUN = 130
EXIT_BROKEN_PIPE = 141
INTERRUPTED_NO_RUN = "interrupted; there is no run to resume"
INTERRUPTED_RESUMABLE = "interrupted; the same command resumes where it stopped"
OUT_OF_MEMORY_MESSAGE = (
    "out of memory. With `deat train`, use a smaller --batch-size or model, or --precision bf16. With `deat evaluate`, "
    "use a smaller --block. Checkpoints and verdicts that were saved remain."
)
WORKER_KILLED_MESSAGE = (
    "a process that decodes images was killed, perhaps because memory or shared memory ran out (/dev/shm is small in "
    "containers). Provide more, or run `deat train` with --workers 1, or with --workers 0 for none. "
    "Checkpoints that were saved remain."
)
SYSTEM_ERRORS = {
    getattr(errno, name)
    for name in (
        "ENOSPC",
        "EDQUOT",
        "EFBIG",
        "EROFS",
        "EACCES",
        "EPERM",
        "EIO",
        "EMFILE",
        "ENFILE",
        "ESTALE",
        "ENOTCONN",
    )
    if hasattr(errno, name)
}
"""Numbers of errors for which the system or the disk is the reason: full, read-only, forbidden, broken or gone."""
NETWORK_ERROR_SIGNS = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")


class Command(Protocol):
    """A parsed command line."""

    @property
    def is_resumable(self) -> bool:
        """True if the command resumes when it is interrupted and run again."""

    def run(self) -> int:
        """Run the command and return its exit status."""


def run_to_exit_status(parse: Callable[[], Command], *, ends_process: bool = False) -> int:
    """Parse and run a command, and report how it failed.

    Args:
        parse: Parses the command line.
        ends_process: Whether the process exits with the result.

    Returns:
        The exit status: that of the command, or that of its error. An interrupted command has 75 if it is resumable,
        else 130. In a distributed run the process ends here.

    Raises:
        SystemExit: Where `parse` raises it.
    """
    command: Command | None = None

    def parse_and_run() -> int:
        """Parse the command line and run the command."""
        nonlocal command
        with delay_signals():  # only a parsed command knows whether it is resumable
            command = parse()
        try:
            status = command.run()
        except SystemExit as error:
            raise UsageError(_describe_exit(error)) from error
        sys.stdout.flush()  # a closed pipe raises here, where it is handled
        return status

    def report_interrupt() -> int:
        """Print how to continue after an interruption, and return the exit status."""
        if command is not None and command.is_resumable:
            return _report_error(INTERRUPTED_RESUMABLE, Interrupted.exit_code)
        return _report_error(INTERRUPTED_NO_RUN, EXIT_INTERRUPTED_NO_RUN)

    # A process of a distributed run may be blocked in a collective call, where Python's handlers do not run.
    is_alone = os.environ.get("WORLD_SIZE", "1") == "1"
    install = raise_on_signals if is_alone else partial(exit_on_signals, report_interrupt)
    with install(ends_process=ends_process) as handler:
        try:
            status = _run_command(parse_and_run, report_interrupt, handler)
            handler.leaving = True
        except StopSignal:  # a signal came while an error was being reported
            handler.leaving = True
            status = report_interrupt()
        return exit_if_distributed(status)


def _run_command(parse_and_run: Callable[[], int], on_interrupt: Callable[[], int], handler: StopSignalHandler) -> int:
    try:
        return parse_and_run()
    except DeatError as error:
        return _report_error(str(error), error.exit_code)
    except BrokenPipeError:
        _discard_output()
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        handler.leaving = True
        return on_interrupt()
    except Exception as error:
        if handler.received:  # an import that is interrupted may raise another error
            return on_interrupt()
        return _report_unexpected_error(error)


def _describe_exit(error: SystemExit) -> str:
    """Describe that the user's code, such as a network, ended the process with `sys.exit` in the middle of the work."""
    line = find_user_code_line(error)
    where = f" in your code: {line}" if line else ""
    return (
        f"sys.exit({error.code!r}) was called{where}, before the command was done. Raise an error instead. Checkpoints and "
        "verdicts that were saved remain."
    )


def _report_unexpected_error(error: Exception) -> int:
    if is_lost_peer_error(error):
        message = "another process of this run is gone, so this one ends too."
        return _report_error(message, Interrupted.exit_code, is_fallback=True)
    if is_out_of_memory(error):
        return _report_error(OUT_OF_MEMORY_MESSAGE, NumericalError.exit_code)
    if is_dead_worker(error):
        return _report_error(WORKER_KILLED_MESSAGE, DataError.exit_code)
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        message = f"the file name {str(error.filename)[:80]!r}... is too long. Choose a shorter one."
        return _report_error(message, UsageError.exit_code)
    user_line = find_user_code_line(error)
    if isinstance(error, OSError) and error.errno in SYSTEM_ERRORS and not user_line:
        return _report_error(_describe_system_error(error), CheckpointError.exit_code)
    if user_line:
        message = f"the error above comes from your code: {user_line}"
        return _report_error(message, UsageError.exit_code, preamble=traceback.format_exc())
    message = "internal error; please report it with the traceback above."
    return _report_error(message, DeatError.exit_code, preamble=traceback.format_exc())


def _describe_system_error(error: OSError) -> str:
    """Describe a read or write that the system refused, and say what it was where that is known."""
    try:
        sys.stdout.flush()
    except OSError:
        _discard_output()
    what = repr(str(error.filename)) if error.filename else "a file or standard output"
    return (
        f"{what}: {error.strerror}. Checkpoints and verdicts that were saved remain. Put that right and give the same "
        "command again; `deat resume RUN` continues a training."
    )


def _discard_output() -> None:
    """Write what is still buffered for standard output to nowhere, so that it is no error at the end of the process."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report_error(message: str, status: int, *, preamble: str = "", is_fallback: bool = False) -> int:
    """Print an error to standard error, once for all processes of a run, and return the exit status."""
    if should_print_error(preamble + message, is_fallback=is_fallback):
        with suppress(OSError):  # the status says it too
            print(make_printable_lines(f"{preamble}deat: {message}"), file=sys.stderr, flush=True)
    return status


def exit_if_distributed(exit_code: int = 0) -> int:
    """End the process at once if it belongs to a distributed run.

    The interpreter's shutdown is skipped, since it may wait for a process that is gone, and sometimes aborts in threads
    that torch left running.

    Args:
        exit_code: Exit status of the process.

    Returns:
        `exit_code`, if the process is not part of a distributed run.
    """
    if is_process_group_initialized():
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(exit_code)
    return exit_code


def should_print_error(text: str, *, is_fallback: bool) -> bool:
    """Decide whether this process prints an error: of several processes with the same error, only the first does.

    Args:
        text: The error.
        is_fallback: Print it only if no process printed another error.

    Returns:
        True if this process should print the error.
    """
    store = get_message_store()
    if store is None:
        return True
    try:
        num_printed = store.add("anything", 0 if is_fallback else 1)
        is_first = store.add(sha256(text.encode()).hexdigest(), 1) == 1
    except (RuntimeError, OSError):  # the process that serves the store is gone
        return True
    return is_first and not (is_fallback and num_printed)


def is_lost_peer_error(error: BaseException) -> bool:
    """Check whether an error means that another process of the distributed run is gone.

    Args:
        error: The error.

    Returns:
        True if the error comes from the connection to another process.
    """
    is_network_error = isinstance(error, RuntimeError) and any(sign in str(error) for sign in NETWORK_ERROR_SIGNS)
    return is_network_error and is_process_group_initialized()


@contextmanager
def short_warnings() -> Iterator[None]:
    """Print warnings of deat as one line, without their place in deat's code, inside a `with` block."""
    former = warnings.formatwarning

    def format_warning(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        """Show a warning of deat as one line, and others as Python does."""
        if Path(filename).is_relative_to(PACKAGE_ROOT):
            return f"deat: {make_printable_lines(str(message))}\n"
        return former(message, category, filename, lineno, line)

    warnings.formatwarning = format_warning
    try:
        yield
    finally:
        warnings.formatwarning = former
