"""Methods by name: registered patterns, the paper's spellings, and the prefixes m+, auto+, f+, g+ and awp+.

A pattern's capital letters are whole numbers: ``pgd-K`` matches ``pgd-7`` and ``pgd-10``, and ``pgd`` with the default
of the builder's parameter k. A part in brackets is left out of the name at that default: ``trades[-K]``. A method
that a file registers is named after the file's path, as in ``own.py:bold-2`` and ``own.py:m+bold``.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

from deat.errors import UsageError, unknown_name_error
from deat.methods.method import Method
from deat.methods.paper_vs_released_rules import RuleSet, get_rule_set
from deat.methods.prefixes import PREFIXES, UPDATE_PREFIXES
from deat.utils.plugins import load_plugins
from deat.utils.user_code import get_qualified_name, is_file_spec, load_module, no_such_name_error, split_spec

PLUGIN_GROUP = "deat.methods"
MethodBuilder = Callable[..., Method]
METHOD_ALIASES = {
    r"u-fgsm": "fgsm",
    r"pgd-at": "pgd",
    r"free-at": "free",
    r"\bmdeat\b": "m+deat",
    r"(^|\+)auto$": r"\1auto+deat",
}
"""Spellings of the paper and short names, as regular expressions, and the names that they stand for."""


@dataclass(frozen=True)
class RegisteredMethod:
    """A registered pattern, the function that builds its methods, and the prefixes that it is listed with."""

    pattern: str
    build: MethodBuilder
    prefixes: tuple[str, ...] = ()
    origin: str = ""
    """The package that it comes from, if it is a plugin's."""

    @property
    def base_name(self) -> str:
        """The pattern without its numbers, such as pgd."""
        return re.split(r"\[?-(?=[A-Z])", self.pattern)[0]

    def format_name(self, **parameters: int) -> str:
        """The pattern with its numbers filled in, by default the builder's, such as pgd-7."""
        defaults = {p.name: p.default for p in inspect.signature(self.build).parameters.values()}
        if "[" in self.pattern and defaults | parameters == defaults:
            return self.base_name
        return re.sub(r"[A-Z]", lambda m: str((defaults | parameters)[m[0].lower()]), self._pattern_without_brackets)

    def match(self, name: str) -> dict[str, int] | None:
        """The numbers in a name, or None for a name of another pattern."""
        expression = re.sub(r"[A-Z]", lambda m: f"(?P<{m[0].lower()}>\\d+)", re.escape(self._pattern_without_brackets))
        match = re.fullmatch(expression, name)
        return {key: int(value) for key, value in match.groupdict().items()} if match else None

    @property
    def _pattern_without_brackets(self) -> str:
        return self.pattern.replace("[", "").replace("]", "")


_METHODS: dict[str, RegisteredMethod] = {}


def register_method(pattern: str, *prefixes: str) -> Callable[[MethodBuilder], MethodBuilder]:
    """Register a method under a name: a decorator for a function that returns a Method.

    A parameter of the function called `rules`, if there is one, receives the rule set. Every method can be composed
    with m+, auto+, f+, g+ and awp+.

    Args:
        pattern: Name of the method. Capital letters are whole numbers and parameters of the function, as in bold-K.
        *prefixes: Prefixes with which the method is listed as well, such as "m+".

    Returns:
        The decorator, which returns the function unchanged.

    Raises:
        UsageError: If the function lacks a parameter of the pattern, a prefix is unknown, or the name is taken.

    Example:
        >>> @deat.register_method("bold-K")
        ... def bold(k: int = 3) -> deat.Method:
        ...     return deat.Method("bold", deat.Craft(), deat.attack_schedules.Fixed(k=k, alpha_eps=0.5))
    """

    def register(build: MethodBuilder) -> MethodBuilder:
        """Register the function and return it."""
        letters = {c.lower() for c in pattern if c.isupper()}
        missing = letters - set(inspect.signature(build).parameters)
        if missing:
            raise UsageError(f"register_method({pattern!r}): {build.__name__} lacks the parameters {sorted(missing)}.")
        for prefix in set(prefixes) - set(PREFIXES):
            raise unknown_name_error("prefix", prefix, PREFIXES)
        if pattern in _METHODS and get_qualified_name(_METHODS[pattern].build) != get_qualified_name(build):
            raise UsageError(
                f"register_method({pattern!r}): a method with this pattern is registered already. Choose another name."
            )
        _METHODS[pattern] = RegisteredMethod(pattern, build, prefixes)
        return build

    return register


def list_methods() -> list[str]:
    """List every registered name, also those of installed plugins.

    Returns:
        The names, with numbers at their defaults.
    """
    load_plugins(PLUGIN_GROUP, _add_plugin)
    return [prefix + entry.format_name() for entry in _METHODS.values() for prefix in ("", *entry.prefixes)]


def get_method(name: str | Method, *, rules: str | RuleSet = "default") -> Method:
    """Return the method of a name.

    Args:
        name: A registered name (numbers may change, m+, auto+, f+, g+ and awp+ compose), a file's method as my_file.py:NAME,
            or a Method, which is returned as it is.
        rules: Rule set, "default", "literal" or "released".

    Returns:
        The method.

    Raises:
        UsageError: If no method has this name, or its parts do not fit together.

    Example:
        >>> deat.get_method("m+pgd-10").schedule.max_steps
        10
    """
    if isinstance(name, Method):
        return _with_summary(name, _own_docstring(name))
    if not isinstance(name, str):
        raise UsageError(f"{name!r} is no method. Give a name, such as m+deat, or a deat.Method.")
    return _build_method(name.strip() if is_file_spec(name) else _normalize_name(name), get_rule_set(rules), name)


def find_method_plugin(name: str) -> str:
    """Return the package and version of the plugin that a method's name is of; empty for any other name."""
    if is_file_spec(name):
        return ""
    base = _normalize_name(name)
    while prefix := next((p for p in PREFIXES if base.startswith(p)), None):
        base = base.removeprefix(prefix)
    entry = _find_entry(base, list(_METHODS.values()))
    return entry[0].origin if entry else ""


def _add_plugin(name: str, value: object, origin: str) -> None:
    """Register the method of an entry point under its name; one that means another method already is refused."""
    if not re.fullmatch(r"[a-z0-9][a-zA-Z0-9-]*", name):
        raise UsageError("its name has other characters than letters, digits and -; capital letters are numbers.")
    if not isinstance(value, Method) and not callable(value):
        raise UsageError(f"it is a {type(value).__name__}, and not a deat.Method or a function that returns one.")
    build: MethodBuilder = (lambda: value) if isinstance(value, Method) else value
    letters = {c.lower() for c in name if c.isupper()}
    if missing := letters - set(inspect.signature(build).parameters):
        raise UsageError(f"its function lacks the parameters {sorted(missing)} of its name.")
    entry = RegisteredMethod(name, build, origin=origin)
    shown = entry.format_name(**dict.fromkeys(letters, 1))
    for other in _METHODS.values():
        if other.base_name == entry.base_name or other.match(shown) is not None:
            owner = other.origin or ("deat" if str(other.build.__module__).startswith("deat.") else "this program")
            raise UsageError(f"the name {other.pattern} is taken by {owner}.")
    _METHODS[name] = entry


def _build_method(name: str, rules: RuleSet, original_name: str) -> Method:
    method = _build_registered(name, rules, list(_METHODS.values()))
    if method:
        return method
    if (split := _split_update_prefix(name)) and not is_file_spec(name):
        prefix, other_prefixes, base = split
        method = PREFIXES[prefix](_build_method(other_prefixes + base, rules, original_name), rules)
        return replace(method, name=name[: -len(base)] + _without_prefixes(method.name))
    for prefix, compose in PREFIXES.items():
        if name.lower().startswith(prefix):
            return compose(_build_method(name[len(prefix) :], rules, original_name), rules)
    if is_file_spec(name):
        return _build_from_file(name, rules)
    load_plugins(PLUGIN_GROUP, _add_plugin)
    method = _build_registered(name, rules, list(_METHODS.values()))
    if method:
        return method
    raise unknown_name_error(
        "method",
        original_name,
        list_methods(),
        "Numbers may change (pgd-10, deat-55%), and m+, auto+, f+, g+ and awp+ compose.",
    )


def _split_update_prefix(name: str) -> tuple[str, str, str] | None:
    """The first prefix that changes updates alone, the other prefixes, and the rest of a name.

    It is applied last wherever it stands, so that m+g+deat is built as m+deat is, whose base has no name of its own.
    """
    base = _without_prefixes(name)
    prefixes = re.findall(_PREFIX, name[: len(name) - len(base)])
    for prefix in prefixes:
        if prefix in UPDATE_PREFIXES:
            others = prefixes.copy()
            others.remove(prefix)
            return prefix, "".join(others), base
    return None


def _without_prefixes(name: str) -> str:
    return re.sub(rf"^(?:{_PREFIX})+", "", name)


_PREFIX = "|".join(map(re.escape, PREFIXES))


def _build_registered(name: str, rules: RuleSet, entries: list[RegisteredMethod]) -> Method | None:
    """The method that one of these patterns builds for a name, or None."""
    match = _find_entry(name, entries)
    if match is None:
        return None
    entry, parameters = match
    method = _call_builder(entry.build, rules, parameters)
    if not isinstance(method, Method):
        raise UsageError(f"{entry.pattern} returned a {type(method).__name__}, and not a deat.Method.")
    return replace(method, name=entry.format_name(**parameters))


def _find_entry(name: str, entries: list[RegisteredMethod]) -> tuple[RegisteredMethod, dict[str, int]] | None:
    """The pattern that a name is of, and the numbers in it."""
    for entry in entries:
        parameters = entry.match(name)
        if parameters is not None:
            return entry, parameters
    same_base = [entry for entry in entries if entry.base_name == name]
    return (same_base[0], {}) if len(same_base) == 1 else None  # "deat" alone would be ambiguous


def _normalize_name(name: str) -> str:
    text = name.strip().lower().replace(" ", "")
    for spelling, registered_name in METHOD_ALIASES.items():
        text = re.sub(spelling, registered_name, text)
    return text


def _build_from_file(spec: str, rules: RuleSet) -> Method:
    """The method that a file defines or registers under a name, which may begin with prefixes."""
    file, name = split_spec(spec)
    for prefix, compose in PREFIXES.items():
        if name.lower().startswith(prefix):
            return compose(_build_from_file(f"{file}:{name[len(prefix) :]}", rules), rules)
    module = load_module(spec)
    if hasattr(module, name):
        own = _with_summary(_to_method(getattr(module, name), rules, spec), module.__doc__)
        return _with_summary(own, _own_docstring(own))
    user_entries = [entry for entry in _METHODS.values() if not str(entry.build.__module__).startswith("deat.")]
    method = _build_registered(_normalize_name(name), rules, user_entries)
    if not method:
        raise no_such_name_error(file, name, module, [entry.format_name() for entry in user_entries])
    return _with_summary(method, module.__doc__)


def list_file_methods(file: str) -> list[Method]:
    """Build the methods that a file defines or registers, each named by what the command line takes.

    Args:
        file: Path of a Python file. It is run.

    Returns:
        The methods: those that it registers, with numbers at their defaults; objects; and functions whose annotation
        says that they return a Method.

    Raises:
        UsageError: If the file is missing or fails, or defines no method.
    """
    module = load_module(f"{file}:methods")
    registered = [entry for entry in _METHODS.values() if entry.build.__module__ == module.__name__]
    builders = [id(entry.build) for entry in registered]
    names = [prefix + entry.format_name() for entry in registered for prefix in ("", *entry.prefixes)]
    names += [name for name, value in vars(module).items() if _is_method(value, module) and id(value) not in builders]
    if not names:
        raise UsageError(
            f"{file!r} defines no method: no deat.Method, no @deat.register_method, no function -> deat.Method."
        )
    return [replace(get_method(spec), name=spec) for spec in (f"{file}:{name}" for name in names)]


def _is_method(value: object, module: ModuleType) -> bool:
    """Whether a file's object is a Method, or a function of its own that is annotated to return one."""
    if inspect.isfunction(value) and value.__module__ == module.__name__:
        return value.__annotations__.get("return") in (Method, "Method", "deat.Method")
    return isinstance(value, Method)


def _to_method(value: object, rules: RuleSet, spec: str) -> Method:
    if callable(value) and not isinstance(value, Method):
        value = _call_builder(value, rules, {})
    if not isinstance(value, Method):
        raise UsageError(f"{spec} is a {type(value).__name__}. A deat.Method or a function that returns one is needed.")
    return value


def _call_builder(build: MethodBuilder, rules: RuleSet, parameters: dict[str, int]) -> Method:
    takes_rules = "rules" in inspect.signature(build).parameters
    method = build(rules=rules, **parameters) if takes_rules else build(**parameters)
    return _with_summary(method, inspect.getdoc(build)) if isinstance(method, Method) else method


def _own_docstring(method: Method) -> str | None:
    """The docstring of the first part of a method whose class is the user's own; a dataclass without one has none."""
    kinds = map(type, (method.play, method.schedule, method.objective))
    docstrings = [
        doc
        for kind in kinds
        if kind.__module__.partition(".")[0] != "deat" and (doc := vars(kind).get("__doc__"))
        if not doc.startswith(f"{kind.__name__}(")
    ]
    return next(iter(docstrings), None)


def _with_summary(method: Method, docstring: str | None) -> Method:
    """The method with the first sentence of a docstring as its summary, if it has none."""
    if method.summary or not docstring:
        return method
    paragraph = " ".join(inspect.cleandoc(docstring).split("\n\n")[0].split())
    return replace(method, summary=paragraph.split(". ")[0].rstrip("."))
