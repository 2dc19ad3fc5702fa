"""Names from elsewhere, made safe to show: on a terminal, in a log, in Markdown."""

from collections.abc import Sequence


def make_printable(text: str) -> str:
    """A text on one line without control characters, which could move a terminal's cursor or colour what follows."""
    return "".join(c if c.isprintable() else "?" for c in text)


def clip_middle(text: str, max_chars: int) -> str:
    """A plain text of at most so many characters; it is cut in the middle, since names may differ at either end."""
    shown, tail = make_printable(text), (max_chars - 1) // 2
    return shown if len(shown) <= max_chars else f"{shown[: max_chars - 1 - tail]}…{shown[-tail:]}"


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


def make_printable_lines(text: str) -> str:
    """A text of several lines, each of them plain."""
    return "\n".join(map(make_printable, text.expandtabs().split("\n")))


def escape_markdown(text: str) -> str:
    """A text that is itself in Markdown: no HTML, no table cells, no links."""
    marks = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "\\": "\\\\", "|": "\\|", "`": "\\`", "[": "\\[", "]": "\\]"}
    return "".join(marks.get(c, c) for c in make_printable(text))
