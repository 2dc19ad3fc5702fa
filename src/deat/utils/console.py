"""Helpers for printing to a terminal: a console without markup, lines on standard error, progress bars."""

import sys
from typing import Any

from rich.console import Console

from deat.utils.text import make_printable_lines

PIPED_TABLE_COLUMNS = 160
"""Width of a table that is piped to a file or another program."""


class PlainConsole(Console):
    """Rich console that prints text unchanged: no markup, emoji codes or highlighting.

    Names of folders and classes may look like markup, such as `:dog:` or `[red]`, or hold control characters, which are
    replaced. A closed pipe raises BrokenPipeError instead of exiting the process.

    Args:
        **options: Options of `rich.console.Console`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(emoji=False, markup=False, highlight=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print objects; control characters in texts are replaced, since they could move the cursor."""
        super().print(*(make_printable_lines(o) if isinstance(o, str) else o for o in objects), **options)

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError, so that the command line chooses the exit status.

        Raises:
            BrokenPipeError: Always.
        """
        raise BrokenPipeError


def make_table_console() -> PlainConsole:
    """Create a console for tables: as wide as the terminal, or wide enough for any table if the output is piped.

    Returns:
        The console. It does not wrap lines of text.
    """
    return PlainConsole(soft_wrap=True, width=None if is_stdout_terminal() else PIPED_TABLE_COLUMNS)


def print_stderr(text: str) -> None:
    """Print a message to standard error, which leaves piped and JSON output intact.

    Args:
        text: The message. Control characters are replaced.
    """
    print(f"deat: {make_printable_lines(text)}", file=sys.stderr, flush=True)


def is_stdout_terminal() -> bool:
    """Return True if standard output is a terminal."""
    return sys.stdout.isatty()


def is_all_output_terminal() -> bool:
    """Return True if standard output and standard error are both terminals."""
    return sys.stdout.isatty() and sys.stderr.isatty()
