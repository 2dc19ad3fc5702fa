"""Escapes names from other people's files for LaTeX and CSV.

The page's templates escape HTML, and `deat.utils.text.escape_markdown` escapes Markdown.
"""

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
    "*": "{*}",  # at the start of a row, LaTeX reads this and a bracket as arguments of the line break before
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
"""Commands for combining marks that every font encoding has."""
LATEX_ESCAPES = {
    **LATEX_ASCII_ESCAPES,
    **{c: f"$\\{name}$" for c, name in LATEX_MATH_COMMANDS.items()},
    **{c: f"\\{name}{{}}" for c, name in LATEX_LETTER_COMMANDS.items()},
    **{"−": "$-$", "–": "--", "—": "--", "‘": "`", "’": "'", "“": "``", "”": "''", "…": "..."},
    **{"†": r"\dag{}", "‡": r"\ddag{}", "⚑": r"\textbf{!}"},
}


FORMULA_STARTS = frozenset("=+-@＝＋－＠")
"""First characters of a text that a spreadsheet may run as a formula."""


def escape_latex(text: str) -> str:
    """Escape a text for LaTeX, so that nothing in it is a command and pdflatex can set it with its own fonts.

    Args:
        text: Any text.

    Returns:
        ASCII. Characters that the fonts lack are written by their number, such as U+65E5.
    """
    escaped = [(_escape_latex_character(c), c) for c in unicodedata.normalize("NFC", make_printable(text))]
    parts = []
    for is_known, group in groupby(escaped, lambda pair: pair[0] is not None):
        pairs = list(group)
        if is_known:
            parts.append("".join(str(latex) for latex, _ in pairs))
        else:
            parts.append(f"\\texttt{{{' '.join(f'U+{ord(c):04X}' for _, c in pairs)}}}")
    return "".join(parts)


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


def _escape_latex_character(character: str) -> str | None:
    """A character in LaTeX; None if the usual fonts lack it."""
    if character in LATEX_ESCAPES or character.isascii():
        return LATEX_ESCAPES.get(character, character)
    base, mark = unicodedata.normalize("NFD", character)[0], unicodedata.normalize("NFD", character)[1:]
    return f"\\{LATEX_ACCENT_COMMANDS[mark]}{{{base}}}" if mark in LATEX_ACCENT_COMMANDS and base.isascii() else None
