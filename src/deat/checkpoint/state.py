"""A nested state as JSON and named tensors, and back: exact to the last bit, and without pickle."""

import types
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from deat.errors import CheckpointError

T = TypeVar("T")


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a declared type; a whole number passes for a float, and true for no number."""
    if get_origin(hint) in (types.UnionType, Union):
        return any(fits(value, kind) for kind in get_args(hint))
    if get_origin(hint) is dict:
        key, item = get_args(hint)
        return isinstance(value, dict) and all(fits(k, key) and fits(v, item) for k, v in value.items())
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(fits(item, get_args(hint)[0]) for item in value)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, hint) or (hint is float and isinstance(value, int))


def check_all(kind: type[T], values: Any) -> list[T]:
    """A list of values that are all of one kind."""
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise TypeError(f"{str(values)[:80]!r} is no list of {kind.__name__}s")
    return list(values)


def built(kind: type[T], parts: dict[str, Any]) -> T:
    """A dataclass from its parts; a TypeError that names the part which is of another kind."""
    hints = get_type_hints(kind)
    wrong = [name for name, value in parts.items() if name in hints and not fits(value, hints[name])]
    if wrong:
        raise TypeError(f"{wrong[0]} of a {kind.__name__} is {str(parts[wrong[0]])[:80]!r}")
    return kind(**parts)


Kinds = dict[str, type[Any]]
"""The dataclasses that a state may hold, by name: nothing else is ever built from a file."""


def split(value: Any, kinds: Kinds) -> tuple[Any, dict[str, Tensor]]:
    """The value's JSON, tensors replaced by their names and floats in hexadecimal, and its tensors."""
    tensors: dict[str, Tensor] = {}
    return _encode(value, kinds, (), tensors), tensors


def join(shape: Any, tensors: dict[str, Tensor], kinds: Kinds) -> Any:
    """The value that was split; a CheckpointError where the file is not what split writes."""
    try:
        return _decode(shape, tensors, kinds)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        raise CheckpointError(f"a checkpoint's state cannot be read ({type(error).__name__}: {error})") from None


def _encode(value: Any, kinds: Kinds, path: tuple[str, ...], tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return {"$float": float(value).hex()}
    if isinstance(value, Tensor):
        return {"$tensor": _name(path, value, tensors)}
    if isinstance(value, list | tuple):
        items = [_encode(item, kinds, (*path, str(i)), tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, dict):
        return _encode_dict(value, kinds, path, tensors)
    if is_dataclass(value) and kinds.get(type(value).__name__) is type(value):
        parts = {f.name: getattr(value, f.name) for f in fields(value)}
        return {"$kind": type(value).__name__, "fields": _encode(parts, kinds, path, tensors)}
    raise CheckpointError(
        f"{'.'.join(path) or 'the state'} is a {type(value).__name__}, which a checkpoint cannot hold: "
        "it takes tensors, numbers, texts, and lists and dicts of them"
    )


def _encode_dict(value: dict[Any, Any], kinds: Kinds, path: tuple[str, ...], tensors: dict[str, Tensor]) -> Any:
    wrong = [key for key in value if not isinstance(key, str | int)]
    if wrong:
        raise CheckpointError(f"{'.'.join(path)} has the key {wrong[0]!r}; a checkpoint takes texts and whole numbers")
    pairs = [(key, _encode(item, kinds, (*path, str(key)), tensors)) for key, item in value.items()]
    if all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs):
        return dict(pairs)
    return {"$dict": [list(pair) for pair in pairs]}


def _name(path: tuple[str, ...], tensor: Tensor, tensors: dict[str, Tensor]) -> str:
    name = ".".join(path) or "value"
    while name in tensors:  # "a.b" may also be the b of an a
        name += "_"
    tensors[name] = tensor
    return name


def _decode(shape: Any, tensors: dict[str, Tensor], kinds: Kinds) -> Any:
    if isinstance(shape, list):
        return [_decode(item, tensors, kinds) for item in shape]
    if not isinstance(shape, dict):
        return shape
    if "$float" in shape:
        return float.fromhex(shape["$float"])
    if "$tensor" in shape:
        return tensors[shape["$tensor"]]
    if "$tuple" in shape:
        return tuple(_decode(item, tensors, kinds) for item in shape["$tuple"])
    if "$dict" in shape:
        return {key: _decode(item, tensors, kinds) for key, item in shape["$dict"]}
    if "$kind" in shape:
        return built(kinds[shape["$kind"]], _decode(shape["fields"], tensors, kinds))
    return {key: _decode(item, tensors, kinds) for key, item in shape.items()}
