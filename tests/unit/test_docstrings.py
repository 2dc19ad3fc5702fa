"""The docstrings of the public face: an API reference is built from them."""

import inspect
import re
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import pytest

import deat.attack_schedules
import deat.core
import deat.data
import deat.integrations.hub
import deat.integrations.loggers
import deat.methods
import deat.models
import deat.tasks

MODULES = (
    deat,
    deat.core,
    deat.data,
    deat.errors,
    deat.integrations.hub,
    deat.integrations.loggers,
    deat.methods,
    deat.models,
    deat.attack_schedules,
    deat.tasks,
)


def public_objects() -> dict[str, Any]:
    """The public classes and functions of deat, by their full names."""
    values = [
        value
        for module in MODULES
        for name in getattr(module, "__all__", dir(module))
        if not name.startswith("_")
        for value in [getattr(module, name)]
        if (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__.startswith("deat." if hasattr(module, "__all__") else module.__name__)
    ]
    return {f"{value.__module__}.{value.__qualname__}": value for value in values}


def methods_of(cls: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public methods that a class defines itself."""
    for name, value in vars(cls).items():
        function = getattr(value, "__func__", value)
        if not name.startswith("_") and isinstance(inspect.unwrap(function), FunctionType):
            yield name, inspect.unwrap(function)


def undocumented(function: Callable[..., Any]) -> list[str]:
    """What a docstring lacks: arguments, a result, or errors. A summary may say the last two, or name another docstring."""
    doc = inspect.getdoc(function) or ""
    if re.match(r".*; see `[\w.]+`\.", doc):
        return []
    signature = inspect.signature(function)
    parameters = {name for name in signature.parameters if name not in ("self", "cls")}
    documented = set(re.findall(r"^    \*{0,2}(\w+)(?=[:,])", doc.partition("Args:")[2], re.MULTILINE))
    never = {name for name, p in signature.parameters.items() if "Never" in str(p.annotation)}
    missing = sorted(parameters - documented - never)
    is_silent = signature.return_annotation in (None, "None") or "Iterator" in str(signature.return_annotation)
    if not is_silent and not re.search(r"^(Returns|Yields):", doc, re.MULTILINE) and not doc.startswith("Return "):
        missing.append("Returns")
    raised = set(re.findall(r"^\s+raise (\w+Error)\(", inspect.getsource(function), re.MULTILINE))
    if raised - {"NotImplementedError"} and "Raises:" not in doc and not doc.startswith("Raise "):
        missing.append("Raises")
    return missing if doc else ["a docstring"]


@pytest.fixture(scope="module")
def public() -> dict[str, Any]:
    return public_objects()


def test_public_functions_name_their_arguments_results_and_errors(public):
    functions = {name: value for name, value in public.items() if inspect.isfunction(value)}
    assert len(functions) > 40
    assert {name: gaps for name, value in functions.items() if (gaps := undocumented(value))} == {}


def test_public_methods_do_so_too_or_implement_one_that_does(public):
    methods = {
        (full, name): method
        for full, value in public.items()
        if inspect.isclass(value)
        for name, method in methods_of(value)
    }
    gaps = {key: undocumented(method) for key, method in methods.items()}
    complete = {name for (_, name), missing in gaps.items() if not missing}
    assert len(methods) > 200
    assert {key: missing for key, missing in gaps.items() if missing and key[1] not in complete} == {}


def test_public_classes_name_what_they_are_made_of(public):
    gaps = {}
    for name, value in public.items():
        if not inspect.isclass(value) or issubclass(value, Exception) or getattr(value, "_is_protocol", False):
            continue
        docs = "\n".join(base.__doc__ or "" for base in value.__mro__)
        missing = [p for p in inspect.signature(value).parameters if not re.search(rf"\b{p}\b", docs)]
        if missing or not value.__doc__:
            gaps[name] = missing
    assert gaps == {}
