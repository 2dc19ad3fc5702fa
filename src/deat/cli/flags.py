"""The kinds of flags that commands have: left out by default, and read by what they mean."""

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Annotated, Any

from tyro.conf import arg
from tyro.constructors import PrimitiveConstructorSpec

from deat.errors import UsageError, unknown_name_error
from deat.recipes.overrides import DEDICATED_FLAGS
from deat.runs.request import Request
from deat.training.config import TrainConfig
from deat.utils.numbers import parse_int, parse_number


def _flag_spec(metavar: str, parse: Callable[[str], object]) -> PrimitiveConstructorSpec[Any]:
    """A flag that is left out by default and whose text is read by `parse`."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda args: parse(args[0]),
        is_instance=lambda value: value is None or isinstance(value, int | float | str),
        str_from_instance=lambda value: [str(value)],
    )


def _parse_nonempty(text: str) -> str:
    """A text that is not empty: a variable that the shell does not know must not be taken for a flag left out."""
    if not text:
        raise UsageError("'' says nothing. Leave the flag away, or give it a value.")
    return text


_NO_DEFAULT_HINT = arg(help_behavior_hint="")
OptionalFloat = Annotated[float | None, _flag_spec("NUMBER", parse_number), _NO_DEFAULT_HINT]
"""A number that may be written as a fraction, such as 8/255."""
OptionalInt = Annotated[int | None, _flag_spec("INT", parse_int), _NO_DEFAULT_HINT]
IntFlag = Annotated[int, _flag_spec("INT", parse_int)]
"""A whole number that has a default of its own."""
OptionalStr = Annotated[str | None, _flag_spec("TEXT", _parse_nonempty), _NO_DEFAULT_HINT]


def _choice_spec(what: str, *known: str) -> PrimitiveConstructorSpec[Any]:
    """A flag that takes one of a few names."""

    def parse(text: str) -> str:
        """The name, or which there are."""
        if text not in known:
            raise unknown_name_error(what, text, known)
        return text

    return _flag_spec("|".join(known), parse)


NormChoice = Annotated[str | None, _choice_spec("norm", "linf", "l2", "l1"), _NO_DEFAULT_HINT]
LrScheduleChoice = Annotated[
    str | None, _choice_spec("rate", "cyclic", "multistep", "cosine", "flat"), _NO_DEFAULT_HINT
]
WatchChoice = Annotated[str | None, _choice_spec("watch", "none", "warn", "stop", "rollback"), _NO_DEFAULT_HINT]
StartChoice = Annotated[
    str | None, _choice_spec("start", "zero", "uniform", "normal", "bernoulli", "jitter"), _NO_DEFAULT_HINT
]
ParallelChoice = Annotated[str | None, _choice_spec("parallel", "ray"), _NO_DEFAULT_HINT]


SYNONYMS_BY_FLAG = {
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

FLAG_BY_SYNONYM = {other: flag for flag, others in SYNONYMS_BY_FLAG.items() for other in others}


def check_flag_names(argv: Sequence[str], commands: Sequence[type[Any]]) -> None:
    """Refuse a flag that goes by another name here, and say which; whatever else is unknown is the parser's to tell."""
    command = next((kind for kind in commands if [kind.__name__.removesuffix("Command").lower()] == argv[:1]), None)
    known = {_with_dashes(field.name) for field in fields(command)} if command else set()
    for word in argv[1:]:
        option = word.partition("=")[0]
        name = _with_dashes(option.removeprefix("--"))
        hint = _suggest_flag(name, known) if option.startswith("--") and name not in known else None
        if hint:
            raise UsageError(f"unknown option {option!r}. Did you mean {hint}?")


def _suggest_flag(name: str, known: set[str]) -> str | None:
    """What is meant by a flag that a command does not have."""
    meant = FLAG_BY_SYNONYM.get(name, name)
    if meant in known:
        return f"--{meant}"
    settings = {
        _with_dashes(field.name) for kind in (Request, TrainConfig) for field in fields(kind)
    } - DEDICATED_FLAGS.keys()
    return f"--set {meant.replace('-', '_')}=..." if "set" in known and meant in settings else None


def _with_dashes(name: str) -> str:
    return name.replace("_", "-")
