"""Change settings of a recipe: `--set epochs=5 --set lr=0.02`."""

import re
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from typing import Any, Union, get_args, get_origin, get_type_hints

from deat.errors import UsageError, unknown_name_error
from deat.methods import get_method
from deat.methods.change_settings import configure_method
from deat.recipes.recipe import EvaluationPlan, RecipeRow, rescale_milestones
from deat.runs.resolve_request import Request
from deat.threat import Linf
from deat.training.config import TrainConfig
from deat.utils.numbers import parse_int, parse_number

DEDICATED_FLAGS = {
    "data": "--data",
    "model": "--model",
    "method": "--methods",
    "seed": "--seeds",
    "data_root": "--data-root",
    "download": "--download",
}
"""Settings with a flag of their own."""
METHOD_SPECIFIC_SETTINGS = (
    *("gamma", "max_steps", "beta", "tau", "compact"),
    *("g_weight", "g_step", "g_form"),
    *("awp_gamma", "awp_warmup"),
)
"""Settings that only some methods have. The rows of other methods are left unchanged."""


def apply_overrides(rows: Sequence[RecipeRow], overrides: dict[str, str]) -> list[RecipeRow]:
    """Change settings in all rows.

    Args:
        rows: Rows of a recipe.
        overrides: Values by the name of the setting, both as text.

    Returns:
        The changed rows. Of rows that become the same, one is kept.

    Raises:
        UsageError: If a setting is unknown, no method has it, or its value is not accepted.
    """
    values = {name: _parse_setting(name, text) for name, text in overrides.items()}
    for name in set(values) & set(METHOD_SPECIFIC_SETTINGS):
        if not any(_has_setting(row, name, values[name]) for row in rows):
            _check_has_setting(rows[0], name, values[name])  # raises the error that says why
    changed = [_override_row(row, values) for row in rows]
    unaffected = [row for row in changed if not set(row.varied_settings) & set(values)]
    distinct: list[RecipeRow] = []
    for row in changed:
        if row in unaffected:
            distinct.append(row)
        elif not any(_is_same_run(row, other) for other in (*unaffected, *distinct)):
            distinct.append(_relabel_row(row, overrides))
    return distinct


def parse_overrides(texts: Iterable[str]) -> dict[str, str]:
    """Parse texts of the form key=value.

    Args:
        texts: Such as "epochs=5".

    Returns:
        Values by name, both as text.

    Raises:
        UsageError: If a text has another form.
    """
    overrides: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"--set {text!r} is not of the form key=value, such as epochs=5.")
        overrides[name.strip().replace("-", "_")] = value.strip()
    return overrides


def _is_same_run(row: RecipeRow, other: RecipeRow) -> bool:
    return (row.request, row.settings, row.evaluation) == (other.request, other.settings, other.evaluation)


def _relabel_row(row: RecipeRow, overrides: dict[str, str]) -> RecipeRow:
    """The row with the new values of its varied settings in its label; the paper has no such row."""
    label = row.label
    for name in set(row.varied_settings) & set(overrides):
        label = re.sub(rf"\b{name} \S+", f"{name} {overrides[name]}".replace("\\", r"\\"), label)
    return replace(row, label=label, paper_row=None)


def _override_row(row: RecipeRow, values: dict[str, Any]) -> RecipeRow:
    accepted = {
        name: value
        for name, value in values.items()
        if name not in METHOD_SPECIFIC_SETTINGS or _has_setting(row, name, value)
    }
    if "threat" in accepted:  # it takes the place of the recipe's own
        accepted = {"norm": None, "eps": None, **accepted}
    request = replace(row.request, **_select_fields(Request, accepted))
    settings = {**row.settings, **_select_fields(TrainConfig, accepted)}
    if "epochs" in accepted and "milestones" not in accepted and row.settings.get("milestones"):
        milestones = row.settings["milestones"]
        settings["milestones"] = rescale_milestones(milestones, row.settings["epochs"], accepted["epochs"])
    return replace(
        row,
        request=request,
        settings=settings,
        evaluation=replace(row.evaluation, **_select_fields(EvaluationPlan, accepted)),
    )


def _has_setting(row: RecipeRow, name: str, value: Any) -> bool:
    try:
        _check_has_setting(row, name, value)
    except UsageError:
        return False
    return True


def _check_has_setting(row: RecipeRow, name: str, value: Any) -> None:
    """Refuse a setting that the row's method does not have."""
    configure_method(get_method(row.request.method, rules=row.request.rules), Linf(1.0), **{name: value})


def _select_fields(dataclass_type: type[Any], values: dict[str, Any]) -> dict[str, Any]:
    names = {f.name for f in fields(dataclass_type)}
    return {name: value for name, value in values.items() if name in names}


def _setting_types() -> dict[str, Any]:
    """The type of each setting that can be changed."""
    types_by_name = {
        name: kind for part in (Request, TrainConfig, EvaluationPlan) for name, kind in get_type_hints(part).items()
    }
    return {name: kind for name, kind in types_by_name.items() if name not in DEDICATED_FLAGS}


def _parse_setting(name: str, text: str) -> Any:
    if name in DEDICATED_FLAGS:
        raise UsageError(f"{name} cannot be changed by --set. Use {DEDICATED_FLAGS[name]}.")
    types_by_name = _setting_types()
    if name not in types_by_name:
        raise unknown_name_error("setting", name, types_by_name)
    try:
        return _convert_value(text, types_by_name[name])
    except ValueError as error:
        raise UsageError(f"--set {name}={text}: {error}") from None


def _convert_value(text: str, kind: Any) -> Any:
    if get_origin(kind) in (Union, types.UnionType):
        alternatives = [k for k in get_args(kind) if k is not type(None)]
        is_none = type(None) in get_args(kind) and text.lower() in ("", "auto", "default")
        return None if is_none else _convert_value(text, alternatives[0])
    if get_origin(kind) is tuple:
        return tuple(_convert_value(part.strip(), get_args(kind)[0]) for part in text.split(",") if part.strip())
    return _PARSERS_BY_TYPE[kind](text)


def _parse_bool(text: str) -> bool:
    answers = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if text.lower() not in answers:
        raise ValueError(f"{text!r} is neither true nor false")
    return answers[text.lower()]


_PARSERS_BY_TYPE: dict[Any, Callable[[str], Any]] = {int: parse_int, float: parse_number, str: str, bool: _parse_bool}
