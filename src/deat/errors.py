"""The errors that deat raises, each with the exit code of the command line.

A message names the value, what is accepted, and what to do next.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class DeatError(Exception):
    """Base class of all errors that deat explains."""

    exit_code = 70


class UsageError(DeatError, ValueError):
    """A setting, name or argument that is not accepted."""

    exit_code = 2


class DataError(DeatError, ValueError):
    """Data that is missing or in the wrong form."""

    exit_code = 3


class NewerVersionError(DataError):
    """A file that a later version of deat wrote. It is not damaged."""


class CheckpointError(DeatError):
    """Weights or a run folder that cannot be read or written."""

    exit_code = 4


class NumericalError(DeatError, ArithmeticError):
    """Training that produced a NaN or an infinity, or ran out of memory.

    Args:
        message: The text of the error.
        details: Where and how it happened, for the run's record. The values are JSON values.
    """

    exit_code = 5

    def __init__(self, message: str, **details: object) -> None:
        super().__init__(message)
        self.details = details

    @property
    def batch(self) -> int | None:
        """The first bad batch of the epoch, if it is known."""
        batch = self.details.get("batch")
        return batch if isinstance(batch, int) else None


class BusyError(DeatError):
    """A run or an evaluation that another process is working on."""

    exit_code = 7


class Interrupted(DeatError):
    """Training that stopped because of a signal or a request, and can be resumed."""

    exit_code = 75


def unknown_name_error(
    what: str, value: object, known: Iterable[str], hint: str = "", *, suggests: bool = True
) -> UsageError:
    """Make the error for an unknown name, which suggests similar ones.

    Args:
        what: What the name is of, such as "method".
        value: The unknown name.
        known: The names that are accepted.
        hint: A sentence to add to the message.
        suggests: Whether to suggest similar names.

    Returns:
        The error, to be raised.
    """
    names = sorted(known)
    hint = f" {hint}" if hint else ""
    suggestion = did_you_mean(value, names) if suggests and isinstance(value, str) else ""
    return UsageError(f"unknown {what} {value!r}.{suggestion} Known: {', '.join(names)}.{hint}")


def did_you_mean(value: str, known: Iterable[str]) -> str:
    """Return the sentence "Did you mean ...?" with the most similar names, or "" if none is similar.

    Args:
        value: What was given.
        known: The names that are accepted.
    """
    similar = get_close_matches(value.lower(), list(known), n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(map(repr, similar))}?" if similar else ""


def check_is_instance(model: object) -> None:
    """Check that a model is not a class.

    Args:
        model: What the user gave as a model.

    Raises:
        UsageError: If it is a class, which must be called first.
    """
    if isinstance(model, type):
        raise UsageError(f"the model is the class {model.__name__}, not a network: call it, {model.__name__}(...).")
