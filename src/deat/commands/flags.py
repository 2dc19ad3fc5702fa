"""The kinds of flags that commands have: left out by default, and read by what they mean."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from tyro.conf import arg
from tyro.constructors import PrimitiveConstructorSpec

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


_QUIET = arg(help_behavior_hint="")
MaybeNumber = Annotated[float | None, _flag("NUMBER", number), _QUIET]
"""A number that may be written as a fraction, such as 8/255."""
MaybeWhole = Annotated[int | None, _flag("INT", whole), _QUIET]
Whole = Annotated[int, _flag("INT", whole)]
"""A whole number that has a default of its own."""
MaybeText = Annotated[str | None, _flag("TEXT", str), _QUIET]
Norm = Annotated[Literal["linf", "l2", "l1"] | None, arg(metavar="linf|l2|l1", help_behavior_hint="")]
Shape = Annotated[
    Literal["cyclic", "multistep", "cosine", "flat"] | None,
    arg(metavar="cyclic|multistep|cosine|flat", help_behavior_hint=""),
]
Watch = Annotated[
    Literal["none", "warn", "stop", "rollback"] | None,
    arg(metavar="none|warn|stop|rollback", help_behavior_hint=""),
]
Start = Annotated[
    Literal["zero", "uniform", "normal", "bernoulli", "jitter"] | None,
    arg(metavar="zero|uniform|normal|bernoulli|jitter", help_behavior_hint=""),
]
