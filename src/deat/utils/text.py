"""Text for people: names and errors from elsewhere made safe and short, numbers as people write them, messages."""

import math
import shlex
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

PROGRESS_BAR_CHARS = 20
MAX_EXCERPT_CHARS = 200
"""Characters of a file's content, or of another library's error, in a message."""
MessageHandler = Callable[[str], None]
"""Shows a message to the user, as `print` does."""


def show_as_warning(text: str) -> None:
    """Show a message as a RuntimeWarning."""
    warn_caller(text, RuntimeWarning)


def warn_caller(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line outside deat that called into it, however many of our functions are between.

    Args:
        text: The warning.
        category: Its class.
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == "deat":
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def ignore_message(text: str) -> None:
    """Show nothing."""


def make_printable(text: str) -> str:
    """Replace control characters, which could move a terminal's cursor or colour the text after them, by "?".

    Line breaks are replaced too, so that the result is one line.
    """
    return "".join(c if c.isprintable() else "?" for c in text)


def format_names(names: Sequence[str], limit: int = 5) -> str:
    """Quote the first names of a list and count the others.

    Args:
        names: The names.
        limit: How many are shown.

    Example:
        >>> format_names(["a", "b", "c"], limit=2)
        "'a', 'b' and 1 more"
    """
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return f"{', '.join(map(repr, names[:limit]))}{more}"


def quote_for_shell(text: str) -> str:
    r"""Quote an argument for a shell, so that a printed command works: as one argument, of the same bytes.

    Control characters and bytes that are no text are escaped, as bash, zsh and ksh read them.

    Args:
        text: The argument, such as a path.

    Example:
        >>> quote_for_shell("a\tb"), quote_for_shell("-x")
        ("$'a\\tb'", './-x')
    """
    text = f"./{text}" if text.startswith("-") else text
    if text.isprintable():
        return shlex.quote(text)
    escaped = {"\\": r"\\", "'": r"\'", "\t": r"\t", "\n": r"\n"}
    parts = (escaped.get(c) or (c if c.isprintable() else _escape_bytes(c)) for c in text)
    return f"$'{''.join(parts)}'"


def _escape_bytes(character: str) -> str:
    return "".join(f"\\{byte:03o}" for byte in character.encode("utf-8", "surrogateescape"))


def make_printable_lines(text: str) -> str:
    """Replace control characters in every line of a text, and expand its tabs."""
    return "\n".join(map(make_printable, text.expandtabs().split("\n")))


def truncate_text(text: str, max_chars: int = MAX_EXCERPT_CHARS, *, where: Literal["end", "middle"] = "end") -> str:
    """Shorten a text and make it printable.

    Args:
        text: The text.
        max_chars: The largest length of the result.
        where: What is left out of a longer text: its end, or its middle, since names may differ at either end.

    Returns:
        The text, with "…" for what was left out.
    """
    shown = make_printable(text)
    if len(shown) <= max_chars:
        return shown
    tail = (max_chars - 1) // 2 if where == "middle" else 0
    return f"{shown[: max_chars - 1 - tail]}…{shown[len(shown) - tail :]}"


def summarize_error(error: BaseException) -> str:
    """Describe an error in one short line. The text of some errors contains the whole file that they are about."""
    return truncate_text(str(error) if isinstance(error, UnicodeError) else repr(error))


def capitalize_sentence(text: str) -> str:
    """Return a text with a capital at its beginning; a first word with capitals of its own, such as mIoU, stays.

    Example:
        >>> capitalize_sentence("exact match, mAP"), capitalize_sentence("mAP")
        ('Exact match, mAP', 'mAP')
    """
    first_word = text.partition(" ")[0]
    return text[:1].upper() + text[1:] if first_word.islower() else text


def escape_markdown(text: str) -> str:
    """Make a text printable and escape it for Markdown: HTML, table cells, code and links."""
    marks = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "\\": "\\\\", "|": "\\|", "`": "\\`", "[": "\\[", "]": "\\]"}
    return "".join(marks.get(c, c) for c in make_printable(text))


def format_markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table: cells are escaped, all columns but the first are aligned to the right.

    Args:
        header: The columns' names.
        rows: One text for each column of each row.

    Returns:
        The table's lines.

    Example:
        >>> print(format_markdown_table(["row", "loss"], [["a", "0.5"]]))
        | row | loss |
        | --- | ---: |
        | a | 0.5 |
    """
    lines = [[escape_markdown(cell) for cell in row] for row in (header, *rows)]
    lines.insert(1, ["---"] + ["---:"] * (len(header) - 1))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def format_percent(share: float) -> str:
    """Format a share in percent with two decimals and without a sign: 0.435 is 43.50."""
    return f"{100 * share:.2f}"


def format_eps(value: float) -> str:
    """Format a radius or a step size as people write it: 8/255 or 2.5/255, or 0.15 where that is exact."""
    short, levels = f"{value:.4g}", f"{255 * value:.1f}".removesuffix(".0")
    near = math.isclose(float(levels), 255 * value, rel_tol=1e-6)  # also of a float32
    return f"{levels}/255" if near and float(short) != value else short


def format_progress_bar(fraction: float) -> str:
    """Draw a progress bar of fixed width.

    Args:
        fraction: Completed part of the work, from 0 to 1.

    Returns:
        The bar as text.
    """
    full = round(PROGRESS_BAR_CHARS * fraction)
    return "━" * full + "╌" * (PROGRESS_BAR_CHARS - full)


def format_duration(seconds: float | None) -> str:
    """Format seconds as m:ss or h:mm:ss; None, an unknown time, is "-:--"."""
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_duration_range(seconds: tuple[float, float]) -> str:
    """Format the least and the most seconds as "m:ss to m:ss", or as "m:ss" where they are the same."""
    least, most = map(format_duration, seconds)
    return least if least == most else f"{least} to {most}"


def format_seconds(seconds: float) -> str:
    """Format seconds with about three digits: 0.04, 1.2, 123."""
    return f"{seconds:.{2 if seconds < 1 else 1 if seconds < 100 else 0}f}"
