"""A line of progress that is redrawn while work runs, on a terminal and in a notebook; elsewhere a line now and then."""

import html
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from threading import Event, Thread
from time import perf_counter
from types import TracebackType
from typing import Any, Protocol

from deat.utils.text import make_printable_lines

NOTEBOOK_INTERVAL_SECONDS = 0.5
PLAIN_INTERVAL_SECONDS = 60.0
"""How often a line is printed where nothing can be redrawn; shorter work prints none."""
CLOSED_STREAM_ERRORS = (OSError, ValueError, AttributeError)
"""What writing to a closed or missing standard error raises."""

RenderLine = Callable[[], str]
"""Returns the line as it is now; empty for none. It is called from another thread."""


class LiveDisplay(Protocol):
    """Shows a line of progress below lines that stay. Use it as a context manager; it never raises for a closed stream."""

    def __enter__(self) -> object:
        """Begin to show the line."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the line."""

    def print(self, text: str) -> None:
        """Add a line that stays."""


def make_live_display(render: RenderLine) -> LiveDisplay:
    """Return the display that standard error, or the notebook, can show.

    Args:
        render: Returns the line as it is now.
    """
    if is_notebook():
        return NotebookDisplay(render)
    return TerminalDisplay(render) if is_stderr_redrawable() else PlainDisplay(render)


def is_notebook() -> bool:
    """Return True in a notebook, whose cells show what IPython displays."""
    ipython = sys.modules.get("IPython")  # a notebook has imported it
    shell = getattr(ipython, "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


def is_stderr_redrawable() -> bool:
    """Return True if standard error is a terminal on which lines can be redrawn."""
    try:
        return sys.stderr.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
    except CLOSED_STREAM_ERRORS:
        return False


def print_to_stderr(text: str) -> None:
    """Print to standard error as it is, if it is open."""
    with suppress(*CLOSED_STREAM_ERRORS):
        print(text, file=sys.stderr, flush=True)


class TerminalDisplay:
    """The line at the bottom of a terminal.

    Args:
        render: Returns the line as it is now.
    """

    def __init__(self, render: RenderLine) -> None:
        from rich.live import Live  # slow to import
        from rich.text import Text

        from deat.utils.console import PlainConsole

        # What is printed to a standard output that is piped must not come out on the terminal.
        is_same_terminal = sys.stdout is not None and not sys.stdout.closed and sys.stdout.isatty()
        self._live = Live(
            console=PlainConsole(file=sys.stderr),
            get_renderable=lambda: Text(render(), no_wrap=True, overflow="ellipsis"),
            refresh_per_second=4,
            transient=True,
            redirect_stdout=is_same_terminal,
        )

    def __enter__(self) -> "TerminalDisplay":
        """Begin to show the line."""
        with suppress(*CLOSED_STREAM_ERRORS):
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the line."""
        with suppress(*CLOSED_STREAM_ERRORS):
            self._live.stop()

    def print(self, text: str) -> None:
        """Add a line that stays, above the progress."""
        with suppress(*CLOSED_STREAM_ERRORS):
            self._live.console.print(make_printable_lines(text), soft_wrap=True)


class _RefreshedDisplay:
    """A display that a thread of its own refreshes."""

    interval = PLAIN_INTERVAL_SECONDS

    def __init__(self, render: RenderLine) -> None:
        self._render, self._ended = render, Event()
        self._thread = Thread(target=self._run, name="deat-progress", daemon=True)

    def __enter__(self) -> "_RefreshedDisplay":
        """Begin to show the line."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self.interval):
            self._refresh(self._render())

    def _refresh(self, line: str) -> None:
        raise NotImplementedError


class PlainDisplay(_RefreshedDisplay):
    """Lines on standard error, for pipes and files: a line of progress only if nothing else came for a minute.

    Args:
        render: Returns the line as it is now.
    """

    def __init__(self, render: RenderLine) -> None:
        super().__init__(render)
        self._last_printed = perf_counter()

    def print(self, text: str) -> None:
        """Print a line."""
        self._last_printed = perf_counter()
        print_to_stderr(text)

    def _refresh(self, line: str) -> None:
        if line and perf_counter() - self._last_printed >= self.interval:
            self.print(line)


class NotebookDisplay(_RefreshedDisplay):
    """One output of a notebook's cell: the lines that stay, and below them the progress.

    Args:
        render: Returns the line as it is now.
    """

    interval = NOTEBOOK_INTERVAL_SECONDS

    def __init__(self, render: RenderLine) -> None:
        super().__init__(render)
        self._lines: list[str] = []
        self._handle: Any = None

    def __enter__(self) -> "NotebookDisplay":
        """Begin to show the line."""
        self._refresh(self._render())
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the lines that stay."""
        super().__exit__(kind, error, trace)
        self._refresh("")

    def print(self, text: str) -> None:
        """Add a line that stays."""
        self._lines.append(make_printable_lines(text))
        self._refresh(self._render() if self._thread.is_alive() else "")

    def _refresh(self, line: str) -> None:
        display = import_module("IPython.display").display  # a notebook has it
        text = "\n".join([*self._lines, *filter(None, [line])])
        content = {"text/plain": text, "text/html": f"<pre style='white-space: pre-wrap'>{html.escape(text)}</pre>"}
        if self._handle is None:
            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)
