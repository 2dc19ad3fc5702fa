"""Types of command-line flags, and the check for unknown flags with suggestions."""

from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from difflib import get_close_matches
from itertools import takewhile
from typing import Annotated, Any

from tyro.conf import arg
from tyro.constructors import PrimitiveConstructorSpec

from deat.errors import UsageError, unknown_name_error
from deat.recipes.overrides import DEDICATED_FLAGS
from deat.runs.resolve_request import Request
from deat.threat import UNION_RULES
from deat.training.config import TrainConfig
from deat.training.named_optimizers import OPTIMIZERS
from deat.utils.numbers import parse_int, parse_number


def _flag_spec(metavar: str, parse: Callable[[str], object]) -> PrimitiveConstructorSpec[Any]:
    """How tyro reads a flag with one value; None stands for a flag that is not given."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda args: parse(args[0]),
        is_instance=lambda value: value is None or isinstance(value, int | float | str | tuple),
        str_from_instance=lambda value: [str(value)],
    )


def _parse_nonempty(text: str) -> str:
    """Reject an empty text, so that an unset shell variable does not pass for an omitted flag."""
    if not text:
        raise UsageError("Empty value. Omit the flag or give a value.")
    return text


def _parse_numbers(text: str) -> tuple[float, ...]:
    """Parse numbers between commas."""
    return tuple(parse_number(part) for part in text.split(","))


_NO_DEFAULT_HINT = arg(help_behavior_hint="")
OptionalFloat = Annotated[float | None, _flag_spec("NUMBER", parse_number), _NO_DEFAULT_HINT]
"""A number or a fraction such as 8/255, or None."""
OptionalInt = Annotated[int | None, _flag_spec("INT", parse_int), _NO_DEFAULT_HINT]
"""An integer, or None."""
FloatFlag = Annotated[float, _flag_spec("NUMBER", parse_number)]
"""A number with a default."""
IntFlag = Annotated[int, _flag_spec("INT", parse_int)]
"""An integer with a default."""
OptionalStr = Annotated[str | None, _flag_spec("TEXT", _parse_nonempty), _NO_DEFAULT_HINT]
"""A non-empty text, or None."""


def _parse_class_weights(text: str) -> str | tuple[float, ...]:
    return text if text == "balanced" else tuple(parse_number(weight) for weight in text.split(","))


ClassWeightsFlag = Annotated[
    tuple[float, ...] | str | None, _flag_spec("balanced|W,W,...", _parse_class_weights), _NO_DEFAULT_HINT
]
"""A number for each class, or "balanced"."""


def _choice_spec(kind: str, *choices: str) -> PrimitiveConstructorSpec[Any]:
    """How tyro reads a flag that takes one of a few names."""

    def parse(text: str) -> str:
        """Return a known choice, or raise UsageError."""
        if text not in choices:
            raise unknown_name_error(kind, text, choices)
        return text

    return _flag_spec("|".join(choices), parse)


NormChoice = Annotated[str | None, _choice_spec("norm", "linf", "l2", "l1"), _NO_DEFAULT_HINT]
ThreatRuleChoice = Annotated[str | None, _choice_spec("threat-rule", *UNION_RULES), _NO_DEFAULT_HINT]
LrScheduleChoice = Annotated[
    str | None, _choice_spec("lr-schedule", "cyclic", "multistep", "cosine", "flat"), _NO_DEFAULT_HINT
]
WatchChoice = Annotated[str | None, _choice_spec("watch", "none", "warn", "stop", "rollback"), _NO_DEFAULT_HINT]
StartChoice = Annotated[
    str | None, _choice_spec("start", "zero", "uniform", "normal", "bernoulli", "jitter"), _NO_DEFAULT_HINT
]
PenaltyChoice = Annotated[str | None, _choice_spec("g-form", "gradient", "curvature"), _NO_DEFAULT_HINT]
YesNoChoice = Annotated[str | None, _choice_spec("answer", "yes", "no"), _NO_DEFAULT_HINT]
OptimizerChoice = Annotated[str | None, _choice_spec("optimizer", *OPTIMIZERS), _NO_DEFAULT_HINT]
BetasFlag = Annotated[tuple[float, ...] | None, _flag_spec("B1,B2", _parse_numbers), _NO_DEFAULT_HINT]
ParallelChoice = Annotated[str | None, _choice_spec("parallel", "ray"), _NO_DEFAULT_HINT]


SYNONYMS_BY_FLAG = {
    "lr": ("learning-rate",),
    "ema": ("model-ema", "ema-decay"),
    "clip-grad-norm": ("clip-grad", "max-grad-norm", "grad-clip"),
    "label-smoothing": ("smoothing",),
    "random-erasing": ("reprob", "erasing"),
    "eps": ("epsilon", "radius"),
    "alpha": ("step-size",),
    "batch-size": ("batch", "bs"),
    "epochs": ("num-epochs", "n-epochs"),
    "weight-decay": ("wd", "decay"),
    "lr-schedule": ("rate", "scheduler", "lr-scheduler"),
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
    "n-train": ("train-images", "num-train", "train-size", "subset", "limit-train", "max-train-samples"),
    "optimizer": ("optim", "opt", "optimiser"),
}
"""Flags of deat, and their names in other programs."""

FLAG_BY_SYNONYM = {synonym: flag for flag, synonyms in SYNONYMS_BY_FLAG.items() for synonym in synonyms}

MIN_SIMILARITY = 0.75
"""How similar a misspelled flag and a suggestion must be; 1 is equal."""


def check_flag_names(command: str, command_type: type[Any], argv: Sequence[str]) -> None:
    """Reject unknown flags, with the flag that was probably meant.

    This runs before the parser, which reports a missing argument for `deat evaluate --epsilon 0.1 my-run`: it does not
    know that `--epsilon` takes a value.

    Args:
        command: The command's name, such as "train".
        command_type: The command's dataclass. Its fields with a default are the flags.
        argv: Arguments that follow the command's name.

    Raises:
        UsageError: If a flag is unknown.
    """
    flags = {_with_dashes(field.name) for field in fields(command_type) if field.default is not MISSING} | {"help"}
    for argument in takewhile(lambda argument: argument != "--", argv):
        flag = argument.partition("=")[0]
        name = _with_dashes(flag.removeprefix("--"))
        if flag.startswith("--") and name not in flags:
            suggestion = _suggest_flag(name, flags)
            hint = f"Did you mean {suggestion}?" if suggestion else f"deat {command} --help lists the options."
            raise UsageError(f"unknown option {flag!r} of deat {command}. {hint}")


def _suggest_flag(name: str, flags: set[str]) -> str | None:
    name = FLAG_BY_SYNONYM.get(name, name)
    if name in flags:
        return f"--{name}"
    settings = {_with_dashes(field.name) for group in (Request, TrainConfig) for field in fields(group)}
    if "set" in flags and name in settings - DEDICATED_FLAGS.keys():
        return f"--set {name.replace('-', '_')}=..."
    similar = get_close_matches(name, flags, n=1, cutoff=MIN_SIMILARITY)
    return f"--{similar[0]}" if similar else None


def _with_dashes(name: str) -> str:
    return name.replace("_", "-")
