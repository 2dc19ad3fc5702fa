"""The kinds of flags that commands have: left out by default, and read by what they mean."""

from collections.abc import Callable
from typing import Annotated, Any

from tyro.conf import arg
from tyro.constructors import PrimitiveConstructorSpec

from deat.errors import UsageError, unknown
from deat.numbers import number, whole


def _flag(metavar: str, parse: Callable[[str], object]) -> PrimitiveConstructorSpec[Any]:
    """A flag that is left out by default and whose text is read by `parse`."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda args: parse(args[0]),
        is_instance=lambda value: value is None or isinstance(value, int | float | str),
        str_from_instance=lambda value: [str(value)],
    )


def _text(text: str) -> str:
    """A text that is not empty: a variable that the shell does not know must not be taken for a flag left out."""
    if not text:
        raise UsageError("'' says nothing. Leave the flag away, or give it a value.")
    return text


_QUIET = arg(help_behavior_hint="")
MaybeNumber = Annotated[float | None, _flag("NUMBER", number), _QUIET]
"""A number that may be written as a fraction, such as 8/255."""
MaybeWhole = Annotated[int | None, _flag("INT", whole), _QUIET]
Whole = Annotated[int, _flag("INT", whole)]
"""A whole number that has a default of its own."""
MaybeText = Annotated[str | None, _flag("TEXT", _text), _QUIET]


def _one_of(what: str, *known: str) -> PrimitiveConstructorSpec[Any]:
    """A flag that takes one of a few names."""

    def parse(text: str) -> str:
        """The name, or which there are."""
        if text not in known:
            raise unknown(what, text, known)
        return text

    return _flag("|".join(known), parse)


Norm = Annotated[str | None, _one_of("norm", "linf", "l2", "l1"), _QUIET]
Shape = Annotated[str | None, _one_of("rate", "cyclic", "multistep", "cosine", "flat"), _QUIET]
Watch = Annotated[str | None, _one_of("watch", "none", "warn", "stop", "rollback"), _QUIET]
Start = Annotated[str | None, _one_of("start", "zero", "uniform", "normal", "bernoulli", "jitter"), _QUIET]
Parallel = Annotated[str | None, _one_of("parallel", "ray"), _QUIET]
