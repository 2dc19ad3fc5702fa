"""What can go wrong, each kind with the exit status the command line leaves with.

A message names the value, what is accepted and what to do next.
"""

from collections.abc import Iterable
from difflib import get_close_matches

MAX_EXCERPT_CHARS = 200
"""Characters of a file's content, or of another library's words, in a message."""


class DeatError(Exception):
    """Any failure that deat explains; the base of all below."""

    exit_code = 70


class UsageError(DeatError, ValueError):
    """A setting, name or argument that is not accepted."""

    exit_code = 2


class DataError(DeatError, ValueError):
    """Data that is missing or is not what it claims to be."""

    exit_code = 3


class NewerVersionError(DataError):
    """A file that a later deat wrote: whole, and not to be taken for damaged."""


class CheckpointError(DeatError):
    """Weights or a run folder that cannot be read or written."""

    exit_code = 4


class NumericalError(DeatError, ArithmeticError):
    """Training that produced a NaN or an infinity, or ran out of memory; facts say where, for the run's record."""

    exit_code = 5

    def __init__(self, message: str, **details: object) -> None:
        super().__init__(message)
        self.details = details

    @property
    def batch(self) -> int | None:
        """The first bad batch of the epoch, if it is known."""
        found = self.details.get("batch")
        return found if isinstance(found, int) else None


class BusyError(DeatError):
    """A run or an evaluation that another process is working on."""

    exit_code = 7


class Interrupted(DeatError):
    """Training that was asked to stop, and can go on later."""

    exit_code = 75


def unknown_name_error(what: str, value: object, known: Iterable[str], hint: str = "") -> UsageError:
    """The error for a name nobody knows, with the nearest known ones."""
    names = sorted(known)
    hint = f" {hint}" if hint else ""
    near = did_you_mean(value, names) if isinstance(value, str) else ""
    return UsageError(f"unknown {what} {value!r}.{near} Known: {', '.join(names)}.{hint}")


def summarize_error(error: BaseException) -> str:
    """What went wrong with a file, for a message of one line; some errors hold the whole file in their repr."""
    return truncate_text(str(error) if isinstance(error, UnicodeError) else repr(error))


def truncate_text(text: str) -> str:
    """A text that may hold much of a file, as far as a message needs it."""
    return text if len(text) <= MAX_EXCERPT_CHARS else f"{text[:MAX_EXCERPT_CHARS]}..."


def check_is_instance(model: object) -> None:
    """Refuse a class where the network belongs that it makes."""
    if isinstance(model, type):
        raise UsageError(f"the model is the class {model.__name__}, not a network: call it, {model.__name__}(...).")


def did_you_mean(value: str, known: Iterable[str]) -> str:
    """The question whether one of the nearest known names was meant; nothing where none is near."""
    near = get_close_matches(value.lower(), list(known), n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
