"""Names that strangers chose, made harmless for each kind of file that a report writes."""

import html

LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "|": r"\textbar{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "[": "{[}",  # at the start of a row it would be the optional argument of the line before
    "]": "{]}",
    **{c: f"\\{c}" for c in "&%$#_{}"},
}


def plain(text: str) -> str:
    """Text on one line without anything invisible: no control character, escape sequence or change of direction."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def markdown(text: str) -> str:
    """Text for a cell of a Markdown table."""
    shown = "".join(f"\\{c}" if c in "\\`[]|" else c for c in plain(text))
    return shown.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def latex(text: str) -> str:
    """Text for LaTeX, in which nothing is a command."""
    return "".join(LATEX.get(c, c) for c in plain(text).replace("\ufffd", "?"))


def markup(text: str) -> str:
    """Text for HTML, in an element or a quoted attribute."""
    return html.escape(plain(text), quote=True)
