"""Names that strangers chose, made harmless for the kinds of file that only a report writes."""

import html

from deat.plain import plain

LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "|": r"\textbar{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "*": "{*}",  # at the start of a row, this and a bracket would belong to the end of the line before
    "[": "{[}",
    "]": "{]}",
    **{c: f"\\{c}" for c in "&%$#_{}"},
}


def latex(text: str) -> str:
    """Text for LaTeX, in which nothing is a command."""
    return "".join(LATEX.get(c, c) for c in plain(text))


def markup(text: str) -> str:
    """Text for HTML, in an element or a quoted attribute."""
    return html.escape(plain(text), quote=True)
