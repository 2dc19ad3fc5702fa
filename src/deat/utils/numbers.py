"""Numbers that people write, or the reason why one is not accepted, and numbers written for people."""

import math
import sys
from collections.abc import Callable
from contextlib import suppress
from numbers import Integral, Real
from typing import Any, SupportsFloat

from deat.errors import UsageError

MAX_FLOAT = sys.float_info.max
"""The largest finite number; a whole one may be larger still, and would be none in a computation."""


def parse_number(text: str | SupportsFloat) -> float:
    """The finite number a text stands for: "8/255", "0.03", "1e-3"; a number is itself."""
    try:
        top, slash, bottom = text.partition("/") if isinstance(text, str) else (text, "", "")
        value = float(top) / (float(bottom) if slash else 1.0)
    except (ValueError, TypeError, ArithmeticError):
        value = math.nan
    if not math.isfinite(value):
        shown = text[:40] if isinstance(text, str) else text
        raise UsageError(f"{shown!r} is not a number. Write a finite one, such as 0.03, 1e-3 or 8/255.")
    return value


def parse_int(text: str) -> int:
    """The whole number that a text stands for."""
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{text[:40]!r} is not a whole number. Write one in digits, such as 30.") from None


def is_int_at_least(value: Any, minimum: int) -> bool:
    """Whether a value is a whole number, be it Python's or NumPy's, and not below the least; True is none."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= minimum


def check_number(name: str, value: Any, is_valid: Callable[[float], bool], requirement: str) -> None:
    """Refuse what is not a finite number, or not an accepted one; text says which are, such as ">= 0"."""
    found = to_python_number(value)
    if type(found) not in (int, float) or not abs(found) <= MAX_FLOAT or not is_valid(found):
        raise UsageError(f"{name} must be a number {requirement}, not {value!r}.")


def check_int(name: str, value: Any, minimum: int) -> None:
    """Refuse what is not a whole number, or a smaller one."""
    if not is_int_at_least(value, minimum):
        raise UsageError(f"{name} must be a whole number >= {minimum}, not {value!r}.")


def to_python_number(value: Any) -> Any:
    """A number of any type as Python's own, which JSON has; whatever else is itself."""
    if type(value) is tuple:
        return tuple(map(to_python_number, value))
    if isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):  # a fraction that is no finite number
            return int(value) if isinstance(value, Integral) else float(value)
    return value


def convert_number_fields(instance: Any) -> None:
    """Turn all numbers among the fields of a frozen dataclass that is being made into Python's own."""
    for name, value in tuple(vars(instance).items()):
        object.__setattr__(instance, name, to_python_number(value))


def format_eps(value: float) -> str:
    """A radius or a step as people write it: 8/255 or 2.5/255, but 0.15 or 12 where it is a short decimal itself."""
    short, levels = f"{value:.4g}", f"{255 * value:.1f}".removesuffix(".0")
    near = math.isclose(float(levels), 255 * value, rel_tol=1e-9)
    return f"{levels}/255" if near and float(short) != value else short


def format_duration(seconds: float | None) -> str:
    """Seconds as m:ss or h:mm:ss; -:-- for None, an unknown time."""
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_seconds(seconds: float) -> str:
    """Seconds in about three digits: 0.04, 1.2, 123."""
    return f"{seconds:.{2 if seconds < 1 else 1 if seconds < 100 else 0}f}"
