"""Flags by the names that they have in other programs, which spelling alone does not lead from."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from deat.errors import UsageError
from deat.recipes.overrides import ELSEWHERE
from deat.training.run import Request
from deat.training.settings import Settings

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
    command = next((kind for kind in kinds if [kind.__name__.lower()] == given[:1]), None)
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
