"""Settings of a recipe changed by hand: `--set epochs=5 --set lr=0.02`."""

import re
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from typing import Any, Union, get_args, get_origin, get_type_hints

from deat.errors import UsageError, unknown
from deat.methods import method as find_method
from deat.methods.tune import tune
from deat.recipes.recipe import Judging, Row, rescaled
from deat.runs.request import Request
from deat.threat import Linf
from deat.training.config import Settings
from deat.utils.numbers import number, whole

ELSEWHERE = {
    "data": "--data",
    "model": "--model",
    "method": "--methods",
    "seed": "--seeds",
    "data_root": "--data-root",
    "download": "--download",
}
"""What has a flag of its own."""
SPECIAL = ("gamma", "max_steps", "beta", "tau", "compact")
"""Settings that only some methods have: the other rows stay as they are."""


def override(rows: Sequence[Row], given: dict[str, str]) -> list[Row]:
    """The rows with these settings, each written as text; of rows that they make the same one stays."""
    values = {name: _parse(name, text) for name, text in given.items()}
    for name in set(values) & set(SPECIAL):
        if not any(_takes(row, name, values[name]) for row in rows):
            _tuned(rows[0], name, values[name])  # whose refusal says why
    changed = [_change(row, values) for row in rows]
    others = [row for row in changed if not set(row.about) & set(values)]
    kept: list[Row] = []
    for row in changed:
        if row in others:
            kept.append(row)
        elif not any(_is_same(row, other) for other in (*others, *kept)):
            kept.append(_relabelled(row, given))
    return kept


def settings_of(texts: Iterable[str]) -> dict[str, str]:
    """`key=value` texts as a dictionary."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"--set {text!r} is not of the form key=value, such as epochs=5.")
        found[name.strip().replace("-", "_")] = value.strip()
    return found


def _is_same(row: Row, other: Row) -> bool:
    return (row.request, row.settings, row.judging) == (other.request, other.settings, other.judging)


def _relabelled(row: Row, given: dict[str, str]) -> Row:
    """A row that is about a setting, named by what this now is, which the paper does not have."""
    label = row.label
    for name in set(row.about) & set(given):
        label = re.sub(rf"\b{name} \S+", f"{name} {given[name]}".replace("\\", r"\\"), label)
    return replace(row, label=label, paper=None)


def _change(row: Row, values: dict[str, Any]) -> Row:
    mine = {name: value for name, value in values.items() if name not in SPECIAL or _takes(row, name, value)}
    request = replace(row.request, **_of(Request, mine))
    settings = {**row.settings, **_of(Settings, mine)}
    if "epochs" in mine and "milestones" not in mine and row.settings.get("milestones"):
        milestones = row.settings["milestones"]
        settings["milestones"] = rescaled(milestones, row.settings["epochs"], mine["epochs"])
    return replace(row, request=request, settings=settings, judging=replace(row.judging, **_of(Judging, mine)))


def _takes(row: Row, name: str, value: Any) -> bool:
    try:
        _tuned(row, name, value)
    except UsageError:
        return False
    return True


def _tuned(row: Row, name: str, value: Any) -> None:
    """Refuse a setting that the row's method does not have."""
    tune(find_method(row.request.method, rules=row.request.rules), Linf(1.0), **{name: value})


def _of(kind: type[Any], values: dict[str, Any]) -> dict[str, Any]:
    names = {f.name for f in fields(kind)}
    return {name: value for name, value in values.items() if name in names}


def _kinds() -> dict[str, Any]:
    """Everything that can be set, and its type."""
    found = {name: kind for part in (Request, Settings, Judging) for name, kind in get_type_hints(part).items()}
    return {name: kind for name, kind in found.items() if name not in ELSEWHERE}


def _parse(name: str, text: str) -> Any:
    if name in ELSEWHERE:
        raise UsageError(f"{name} is not for --set; use {ELSEWHERE[name]}.")
    kinds = _kinds()
    if name not in kinds:
        raise unknown("setting", name, kinds)
    try:
        return _value(text, kinds[name])
    except ValueError as error:
        raise UsageError(f"--set {name}={text}: {error}") from None


def _value(text: str, kind: Any) -> Any:
    """A text as a value of a declared type."""
    if get_origin(kind) in (Union, types.UnionType):
        inner = [k for k in get_args(kind) if k is not type(None)]
        empty = type(None) in get_args(kind) and text.lower() in ("", "auto", "default")
        return None if empty else _value(text, inner[0])
    if get_origin(kind) is tuple:
        return tuple(_value(part.strip(), get_args(kind)[0]) for part in text.split(",") if part.strip())
    return _READERS[kind](text)


def _yes(text: str) -> bool:
    answers = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if text.lower() not in answers:
        raise ValueError(f"{text!r} is neither true nor false")
    return answers[text.lower()]


_READERS: dict[Any, Callable[[str], Any]] = {int: whole, float: number, str: str, bool: _yes}
