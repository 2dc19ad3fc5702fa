"""Whether a value that a file gave is of the kind that its field declares."""

import types
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

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
