"""Names that strangers chose, made harmless for the kinds of file that only a report writes."""

import html
import unicodedata
from itertools import groupby
from typing import Any

from deat.utils.text import make_printable

LATEX_ASCII_ESCAPES = {
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
LATEX_MATH_COMMANDS = {
    **{"α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "varepsilon", "ϵ": "epsilon", "ζ": "zeta"},
    **{"η": "eta", "θ": "theta", "ι": "iota", "κ": "kappa", "λ": "lambda", "μ": "mu", "µ": "mu", "ν": "nu", "ξ": "xi"},
    **{
        "π": "pi",
        "ρ": "rho",
        "σ": "sigma",
        "ς": "varsigma",
        "τ": "tau",
        "υ": "upsilon",
        "φ": "varphi",
        "χ": "chi",
        "ψ": "psi",
    },
    **{"ω": "omega", "Γ": "Gamma", "Δ": "Delta", "Θ": "Theta", "Λ": "Lambda", "Ξ": "Xi", "Π": "Pi", "Σ": "Sigma"},
    **{"Υ": "Upsilon", "Φ": "Phi", "Ψ": "Psi", "Ω": "Omega", "∇": "nabla", "ℓ": "ell", "∞": "infty", "∈": "in"},
    **{"±": "pm", "×": "times", "÷": "div", "·": "cdot", "≤": "le", "≥": "ge", "≠": "ne", "≈": "approx"},
    **{"→": "rightarrow", "←": "leftarrow"},
}
LATEX_LETTER_COMMANDS = {
    "ß": "ss",
    "æ": "ae",
    "Æ": "AE",
    "œ": "oe",
    "Œ": "OE",
    "ø": "o",
    "Ø": "O",
    "ł": "l",
    "Ł": "L",
    "ı": "i",
}
LATEX_ACCENT_COMMANDS = {
    **{"\u0300": "`", "\u0301": "'", "\u0302": "^", "\u0303": "~", "\u0304": "=", "\u0306": "u", "\u0307": "."},
    **{"\u0308": '"', "\u030a": "r", "\u030b": "H", "\u030c": "v", "\u0323": "d", "\u0327": "c"},
}
"""Marks above and below a letter, by the commands that every font encoding has."""
LATEX_ESCAPES = {
    **LATEX_ASCII_ESCAPES,
    **{c: f"$\\{name}$" for c, name in LATEX_MATH_COMMANDS.items()},
    **{c: f"\\{name}{{}}" for c, name in LATEX_LETTER_COMMANDS.items()},
    **{"−": "$-$", "–": "--", "—": "--", "‘": "`", "’": "'", "“": "``", "”": "''", "…": "..."},
    **{"†": r"\dag{}", "‡": r"\ddag{}", "⚑": r"\textbf{!}"},
}


def escape_latex(text: str) -> str:
    """Text for LaTeX, in which nothing is a command and which pdflatex sets with its own fonts.

    What those lack is written by its number, such as U+65E5.
    """
    written = [(_escape_latex_character(c), c) for c in unicodedata.normalize("NFC", make_printable(text))]
    parts = []
    for known, group in groupby(written, lambda one: one[0] is not None):
        held = list(group)
        numbers = " ".join(f"U+{ord(c):04X}" for _, c in held)
        parts.append("".join(str(shown) for shown, _ in held) if known else f"\\texttt{{{numbers}}}")
    return "".join(parts)


def _escape_latex_character(character: str) -> str | None:
    """A character in LaTeX; None where the usual fonts do not have it."""
    if character in LATEX_ESCAPES or character.isascii():
        return LATEX_ESCAPES.get(character, character)
    base, mark = unicodedata.normalize("NFD", character)[0], unicodedata.normalize("NFD", character)[1:]
    return f"\\{LATEX_ACCENT_COMMANDS[mark]}{{{base}}}" if mark in LATEX_ACCENT_COMMANDS and base.isascii() else None


def escape_html(text: str) -> str:
    """Text for HTML, in an element or a quoted attribute."""
    return html.escape(make_printable(text), quote=True)


FORMULA_STARTS = frozenset("=+-@＝＋－＠")
"""First characters of a text that a spreadsheet may run as a formula."""


def escape_csv(value: Any) -> Any:
    """Escape a field for CSV, so that no spreadsheet runs it as a formula.

    Args:
        value: A number, a text or None. Only texts change.

    Returns:
        The value; a text without control characters, after an apostrophe if it begins like a formula.
    """
    if not isinstance(value, str):
        return value
    text = make_printable(value)
    return f"'{text}" if text.lstrip()[:1] in FORMULA_STARTS else text
