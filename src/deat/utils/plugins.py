"""Names that installed packages add, by entry points. Nothing is searched or imported until an unknown name is used.

A package names its objects in its pyproject.toml:

    [project.entry-points."deat.methods"]
    bold-K = "my_package:bold"
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType

from deat.errors import DeatError
from deat.utils.text import summarize_error, truncate_text

PLUGIN_GROUPS = {
    "deat.methods": "a deat.Method, or a function that returns one, as for deat.register_method",
    "deat.tasks": "a subclass of deat.tasks.Task whose name is that of the entry point",
    "deat.attacks": "an attack, or a function or class that returns one when it is called without arguments",
    "deat.models": "a function or class that returns a network, as for deat.register_model",
    "deat.loggers": "a class derived from deat.integrations.loggers.Logger",
}
"""The groups of entry points, and what an entry point of each names."""
AddPlugin = Callable[[str, object, str], None]
"""Registers an object under a name; the last argument says where it comes from. Raises DeatError for a refusal."""


@dataclass(frozen=True)
class Plugin:
    """An entry point of a group that was loaded, or that failed.

    Attributes:
        group: The group, such as "deat.methods".
        name: The name.
        origin: The package and its version.
        problem: Why it is not used; empty where it is.
    """

    group: str
    name: str
    origin: str
    problem: str = ""


_LOADED: dict[str, list[Plugin]] = {}


def load_plugins(group: str, add: AddPlugin) -> list[Plugin]:
    """Load the plugins of a group, once in a process.

    One that cannot be imported or added is reported by a warning, and the others are loaded.

    Args:
        group: A name of `PLUGIN_GROUPS`.
        add: Registers the object of an entry point. It is not called for a module, which registers its own.

    Returns:
        All plugins of the group.
    """
    if group not in _LOADED:
        _LOADED[group] = []  # first, since a plugin may look up a name while it is imported
        for entry in sorted(entry_points(group=group), key=lambda e: (e.name, _origin(e))):
            _LOADED[group].append(_load(entry, group, add))
    return _LOADED[group]


def loaded_plugins(group: str) -> list[Plugin]:
    """Return the plugins of a group that were loaded so far, with the problems of those that failed."""
    return list(_LOADED.get(group, ()))


def _load(entry: EntryPoint, group: str, add: AddPlugin) -> Plugin:
    origin = _origin(entry)
    try:
        value = entry.load()
        if not isinstance(value, ModuleType):
            add(entry.name, value, origin)
    except DeatError as error:
        problem = truncate_text(str(error), 400)
    except (Exception, SystemExit) as error:  # whatever a package raises while it is imported
        problem = f"it cannot be imported: {summarize_error(error)}"
    else:
        return Plugin(group, entry.name, origin)
    warnings.warn(
        f"the plugin {entry.name!r} of {origin} ({group}, {entry.value}) is not used: {problem}",
        RuntimeWarning,
        stacklevel=2,
    )
    return Plugin(group, entry.name, origin, problem)


def _origin(entry: EntryPoint) -> str:
    """The package of an entry point and its version, such as "deat-example 1.0"."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "a package without a name"
