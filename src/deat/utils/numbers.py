"""Numbers that users give: parsed from text, checked, and converted to Python's own types."""

import math
import sys
from collections.abc import Callable
from contextlib import suppress
from numbers import Integral, Real
from typing import Any, SupportsFloat

from deat.errors import UsageError

MAX_FLOAT = sys.float_info.max
"""The largest finite float. A larger integer is refused too, since a computation cannot use it."""


def parse_number(text: str | SupportsFloat) -> float:
    """Parse a finite number.

    Args:
        text: A decimal or a fraction, such as "0.03", "1e-3" or "8/255", or a number.

    Returns:
        The number as a float.

    Raises:
        UsageError: If it is not a finite number.

    Example:
        >>> parse_number("8/255")
        0.03137254901960784
    """
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
    """Parse an integer.

    Args:
        text: Its digits.

    Returns:
        The integer.

    Raises:
        UsageError: If the text is not an integer.
    """
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{text[:40]!r} is not a whole number. Write one in digits, such as 30.") from None


def is_int_at_least(value: Any, minimum: int) -> bool:
    """Return whether a value is an integer, of Python or NumPy, and not less than a minimum. Booleans are not."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= minimum


def check_number(name: str, value: Any, is_valid: Callable[[float], bool], requirement: str) -> None:
    """Check that a value is a finite number in an accepted range.

    Args:
        name: The name of the setting, for the message.
        value: The value.
        is_valid: Whether a finite number is accepted.
        requirement: Which numbers are accepted, for the message, such as ">= 0".

    Raises:
        UsageError: If it is not.
    """
    number = to_python_number(value)
    if type(number) not in (int, float) or not abs(number) <= MAX_FLOAT or not is_valid(number):
        raise UsageError(f"{name} must be a number {requirement}, not {value!r}.")


def check_int(name: str, value: Any, minimum: int) -> None:
    """Check that a value is an integer and not less than a minimum.

    Args:
        name: The name of the setting, for the message.
        value: The value.
        minimum: The smallest accepted value.

    Raises:
        UsageError: If it is not.
    """
    if not is_int_at_least(value, minimum):
        raise UsageError(f"{name} must be a whole number >= {minimum}, not {value!r}.")


def to_python_number(value: Any) -> Any:
    """Convert a number of any library, or a tuple of such, to Python's int and float, which JSON can write.

    Args:
        value: The value. What is not a number is returned unchanged.

    Returns:
        The converted value.
    """
    if type(value) is tuple:
        return tuple(map(to_python_number, value))
    if isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):  # a fraction too large for a float
            return int(value) if isinstance(value, Integral) else float(value)
    return value


def convert_number_fields(instance: Any) -> None:
    """Convert all numbers among the fields of a frozen dataclass, in its `__post_init__`, to Python's own types."""
    for name, value in tuple(vars(instance).items()):
        object.__setattr__(instance, name, to_python_number(value))
