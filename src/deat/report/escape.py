"""Names that strangers chose, made harmless for the kinds of file that only a report writes."""

import html
import unicodedata
from itertools import groupby

from deat.utils.text import plain

ASCII = {
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
MATH = {
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
LETTERS = {"ß": "ss", "æ": "ae", "Æ": "AE", "œ": "oe", "Œ": "OE", "ø": "o", "Ø": "O", "ł": "l", "Ł": "L", "ı": "i"}
ACCENTS = {
    **{"\u0300": "`", "\u0301": "'", "\u0302": "^", "\u0303": "~", "\u0304": "=", "\u0306": "u", "\u0307": "."},
    **{"\u0308": '"', "\u030a": "r", "\u030b": "H", "\u030c": "v", "\u0323": "d", "\u0327": "c"},
}
"""Marks above and below a letter, by the commands that every font encoding has."""
LATEX = {
    **ASCII,
    **{c: f"$\\{name}$" for c, name in MATH.items()},
    **{c: f"\\{name}{{}}" for c, name in LETTERS.items()},
    **{"−": "$-$", "–": "--", "—": "--", "‘": "`", "’": "'", "“": "``", "”": "''", "…": "..."},
    **{"†": r"\dag{}", "‡": r"\ddag{}", "⚑": r"\textbf{!}"},
}


def latex(text: str) -> str:
    """Text for LaTeX, in which nothing is a command and which pdflatex sets with its own fonts.

    What those lack is written by its number, such as U+65E5.
    """
    written = [(_written(c), c) for c in unicodedata.normalize("NFC", plain(text))]
    parts = []
    for known, group in groupby(written, lambda one: one[0] is not None):
        held = list(group)
        numbers = " ".join(f"U+{ord(c):04X}" for _, c in held)
        parts.append("".join(str(shown) for shown, _ in held) if known else f"\\texttt{{{numbers}}}")
    return "".join(parts)


def _written(c: str) -> str | None:
    """A character in LaTeX; None where the usual fonts do not have it."""
    if c in LATEX or c.isascii():
        return LATEX.get(c, c)
    base, mark = unicodedata.normalize("NFD", c)[0], unicodedata.normalize("NFD", c)[1:]
    return f"\\{ACCENTS[mark]}{{{base}}}" if mark in ACCENTS and base.isascii() else None


def markup(text: str) -> str:
    """Text for HTML, in an element or a quoted attribute."""
    return html.escape(plain(text), quote=True)
