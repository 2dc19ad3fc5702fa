"""The kinds of flags that commands have: left out by default, and read by what they mean."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Annotated, Any

from tyro.conf import arg
from tyro.constructors import PrimitiveConstructorSpec

from deat.errors import UsageError, unknown
from deat.recipes.overrides import ELSEWHERE
from deat.runs.request import Request
from deat.training.config import Settings
from deat.utils.numbers import number, whole


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


MEANT = {
    "lr": ("learning-rate",),
    "eps": ("epsilon", "radius"),
    "alpha": ("step-size",),
    "batch-size": ("batch", "bs"),
    "epochs": ("num-epochs", "n-epochs"),
    "weight-decay": ("wd", "decay"),
    "rate": ("scheduler", "lr-scheduler", "lr-schedule"),
    "data": ("dataset", "data-dir", "data-path"),
    "model": ("arch", "network", "net"),
    "init": ("weights", "pretrained", "checkpoint"),
    "out": ("output", "output-dir", "save-dir"),
    "device": ("gpu", "cuda"),
    "workers": ("num-workers",),
    "size": ("image-size", "img-size", "resolution"),
    "held-out": ("val-split", "validation-split"),
    "precision": ("dtype", "amp"),
    "normalize": ("mean", "std"),
    "n": ("num-images", "num-samples"),
}
"""Flags, and what others call them."""

SYNONYMS = {other: flag for flag, others in MEANT.items() for other in others}


def check_names(given: Sequence[str], kinds: Sequence[type[Any]]) -> None:
    """Refuse a flag that goes by another name here, and say which; whatever else is unknown is the parser's to tell."""
    command = next((kind for kind in kinds if [kind.__name__.removesuffix("Command").lower()] == given[:1]), None)
    known = {_dashed(field.name) for field in fields(command)} if command else set()
    for word in given[1:]:
        option = word.partition("=")[0]
        name = _dashed(option.removeprefix("--"))
        hint = _hint(name, known) if option.startswith("--") and name not in known else None
        if hint:
            raise UsageError(f"unknown option {option!r}. Did you mean {hint}?")


def _hint(name: str, known: set[str]) -> str | None:
    """What is meant by a flag that a command does not have."""
    meant = SYNONYMS.get(name, name)
    if meant in known:
        return f"--{meant}"
    settings = {_dashed(field.name) for kind in (Request, Settings) for field in fields(kind)} - ELSEWHERE.keys()
    return f"--set {meant.replace('-', '_')}=..." if "set" in known and meant in settings else None


def _dashed(name: str) -> str:
    return name.replace("_", "-")
