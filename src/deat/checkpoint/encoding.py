"""Encode a nested state as JSON and named tensors, and decode it, exactly and without pickle."""

import types
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from deat.errors import CheckpointError

T = TypeVar("T")


def matches_type(value: Any, hint: Any) -> bool:
    """Return whether a value has a declared type. An int is accepted as a float, a bool is not accepted as a number.

    Args:
        value: The value.
        hint: A class, a union, dict[key, item] or tuple[item, ...].
    """
    if get_origin(hint) in (types.UnionType, Union):
        return any(matches_type(value, kind) for kind in get_args(hint))
    if get_origin(hint) is dict:
        key, item = get_args(hint)
        return isinstance(value, dict) and all(matches_type(k, key) and matches_type(v, item) for k, v in value.items())
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(matches_type(item, get_args(hint)[0]) for item in value)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, hint) or (hint is float and isinstance(value, int))


def check_list_of(kind: type[T], values: Any) -> list[T]:
    """Return a list after checking that all values are of one class.

    Args:
        kind: The class.
        values: The list.

    Raises:
        TypeError: It is not a list, or a value is of another class.
    """
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise TypeError(f"{str(values)[:80]!r} is not a list of {kind.__name__}s")
    return list(values)


def build_dataclass(kind: type[T], values: dict[str, Any]) -> T:
    """Make a dataclass after checking the types of its fields.

    Args:
        kind: The dataclass.
        values: Its fields by name.

    Returns:
        The instance.

    Raises:
        TypeError: A field has another type, or is unknown or missing.
    """
    hints = get_type_hints(kind)
    wrong = [name for name, value in values.items() if name in hints and not matches_type(value, hints[name])]
    if wrong:
        raise TypeError(f"{wrong[0]} of a {kind.__name__} is {str(values[wrong[0]])[:80]!r}")
    return kind(**values)


ClassesByName = dict[str, type[Any]]
"""The dataclasses that a state may contain, by name; no other class is made from a file."""


def encode_state(value: Any, classes: ClassesByName) -> tuple[Any, dict[str, Tensor]]:
    """Encode a state.

    Args:
        value: Tensors, numbers, strings and dataclasses, in lists, tuples and dicts.
        classes: The dataclasses that may occur.

    Returns:
        The JSON, with floats in hexadecimal and names for tensors, and the tensors by name.

    Raises:
        CheckpointError: The state has a value of another type.
    """
    tensors: dict[str, Tensor] = {}
    return _encode(value, classes, (), tensors), tensors


def decode_state(encoded: Any, tensors: dict[str, Tensor], classes: ClassesByName) -> Any:
    """Decode a state.

    Args:
        encoded: The JSON of :func:`encode_state`.
        tensors: The tensors by name.
        classes: The dataclasses that may occur.

    Returns:
        The state.

    Raises:
        CheckpointError: The JSON is not one of :func:`encode_state`.
    """
    try:
        return _decode(encoded, tensors, classes)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        raise CheckpointError(f"a checkpoint's state cannot be read ({type(error).__name__}: {error})") from None


def _encode(value: Any, classes: ClassesByName, path: tuple[str, ...], tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return {"$float": float(value).hex()}
    if isinstance(value, Tensor):
        return {"$tensor": _add_tensor(path, value, tensors)}
    if isinstance(value, list | tuple):
        items = [_encode(item, classes, (*path, str(i)), tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, dict):
        return _encode_dict(value, classes, path, tensors)
    if is_dataclass(value) and classes.get(type(value).__name__) is type(value):
        parts = {f.name: getattr(value, f.name) for f in fields(value)}
        return {"$kind": type(value).__name__, "fields": _encode(parts, classes, path, tensors)}
    raise CheckpointError(
        f"{'.'.join(path) or 'the state'} is a {type(value).__name__}, which a checkpoint cannot hold: "
        "it takes tensors, numbers, strings, and lists and dicts of them"
    )


def _encode_dict(
    value: dict[Any, Any], classes: ClassesByName, path: tuple[str, ...], tensors: dict[str, Tensor]
) -> Any:
    wrong = [key for key in value if not isinstance(key, str | int)]
    if wrong:
        raise CheckpointError(
            f"{'.'.join(path)} has the key {wrong[0]!r}; a checkpoint takes strings and whole numbers"
        )
    pairs = [(key, _encode(item, classes, (*path, str(key)), tensors)) for key, item in value.items()]
    if all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs):
        return dict(pairs)
    return {"$dict": [list(pair) for pair in pairs]}


def _add_tensor(path: tuple[str, ...], tensor: Tensor, tensors: dict[str, Tensor]) -> str:
    name = ".".join(path) or "value"
    while name in tensors:  # the key "a.b" and the key "b" in "a" have the same path
        name += "_"
    tensors[name] = tensor
    return name


def _decode(encoded: Any, tensors: dict[str, Tensor], classes: ClassesByName) -> Any:
    if isinstance(encoded, list):
        return [_decode(item, tensors, classes) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if "$float" in encoded:
        return float.fromhex(encoded["$float"])
    if "$tensor" in encoded:
        return tensors[encoded["$tensor"]]
    if "$tuple" in encoded:
        return tuple(_decode(item, tensors, classes) for item in encoded["$tuple"])
    if "$dict" in encoded:
        return {key: _decode(item, tensors, classes) for key, item in encoded["$dict"]}
    if "$kind" in encoded:
        return build_dataclass(classes[encoded["$kind"]], _decode(encoded["fields"], tensors, classes))
    return {key: _decode(item, tensors, classes) for key, item in encoded.items()}
