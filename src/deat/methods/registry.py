"""Method names: registered patterns, the paper's spellings, and the prefixes m+ and f+.

A pattern's capital letters are whole numbers: ``pgd-K`` answers to ``pgd-7`` and ``pgd-10``, and to ``pgd``
with the default of the builder's own parameter k. In brackets they are left out of the name at that default:
``trades[-K]``. What a file registers is named behind its path, as in ``own.py:bold-2`` and ``own.py:m+bold``.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from deat.errors import UsageError, unknown_name_error
from deat.methods.method import Method
from deat.methods.prefixes import friendly, mplus
from deat.methods.rules import Rules, get_rules
from deat.utils.user_code import get_qualified_name, is_file_spec, load_module, no_such_name_error, split_spec

MethodBuilder = Callable[..., Method]
PREFIXES: dict[str, Callable[[Method, Rules], Method]] = {
    "m+": lambda base, rules: mplus(base, rules=rules),
    "f+": lambda base, rules: friendly(base),
}
METHOD_ALIASES = {r"u-fgsm": "fgsm", r"pgd-at": "pgd", r"free-at": "free", r"\bmdeat\b": "m+deat"}


@dataclass(frozen=True)
class RegisteredMethod:
    """One registered pattern, the function that builds its methods, and the prefixes that it is known with."""

    pattern: str
    build: MethodBuilder
    prefixes: tuple[str, ...] = ()

    @property
    def stem(self) -> str:
        """The pattern without its parameters, such as pgd."""
        return re.split(r"\[?-(?=[A-Z])", self.pattern)[0]

    def name(self, **parameters: int) -> str:
        """The pattern with parameters, or else the builder's defaults, filled in, such as pgd-7."""
        defaults = {p.name: p.default for p in inspect.signature(self.build).parameters.values()}
        if "[" in self.pattern and defaults | parameters == defaults:
            return self.stem
        return re.sub(r"[A-Z]", lambda m: str((defaults | parameters)[m[0].lower()]), self._pattern_without_brackets)

    def match(self, name: str) -> dict[str, int] | None:
        """The parameters that a name gives, or None if it is not of this pattern."""
        expression = re.sub(r"[A-Z]", lambda m: f"(?P<{m[0].lower()}>\\d+)", re.escape(self._pattern_without_brackets))
        found = re.fullmatch(expression, name)
        return {key: int(value) for key, value in found.groupdict().items()} if found else None

    @property
    def _pattern_without_brackets(self) -> str:
        return self.pattern.replace("[", "").replace("]", "")


_METHODS: dict[str, RegisteredMethod] = {}


def register_method(pattern: str, *prefixes: str) -> Callable[[MethodBuilder], MethodBuilder]:
    """Adds a method: decorates a function that returns a Method, with parameters for the pattern's letters.

    A parameter called `rules`, if there is one, receives the rule set. Every method can be composed with m+ and f+;
    the prefixes given are those with which it is listed as well.
    """

    def add(build: MethodBuilder) -> MethodBuilder:
        """Register the function, and give it back as it is."""
        letters = {c.lower() for c in pattern if c.isupper()}
        missing = letters - set(inspect.signature(build).parameters)
        if missing:
            raise UsageError(f"register({pattern!r}): {build.__name__} takes no parameter {sorted(missing)}.")
        for prefix in set(prefixes) - set(PREFIXES):
            raise unknown_name_error("prefix", prefix, PREFIXES)
        if pattern in _METHODS and get_qualified_name(_METHODS[pattern].build) != get_qualified_name(build):
            raise UsageError(f"register({pattern!r}): a method with this pattern is registered already.")
        _METHODS[pattern] = RegisteredMethod(pattern, build, prefixes)
        return build

    return add


def list_methods() -> list[str]:
    """Every registered name, parameters at their defaults."""
    return [prefix + entry.name() for entry in _METHODS.values() for prefix in ("", *entry.prefixes)]


def get_method(name: str | Method, *, rules: str | Rules = "paper") -> Method:
    """The method of that name: registered, composed with m+ or f+, or from a file (``my_file.py:NAME``)."""
    if isinstance(name, Method):
        return name
    if not isinstance(name, str):
        raise UsageError(f"{name!r} is no method; give a name, such as m+deat, or a deat.Method.")
    return _build_method(name.strip() if is_file_spec(name) else _normalize_name(name), get_rules(rules), name)


def _build_method(name: str, rules: Rules, original_name: str) -> Method:
    found = _build_registered(name, rules, list(_METHODS.values()))
    if found:
        return found
    for prefix, compose in PREFIXES.items():
        if name.lower().startswith(prefix):
            return compose(_build_method(name[len(prefix) :], rules, original_name), rules)
    if is_file_spec(name):
        return _build_from_file(name, rules)
    raise unknown_name_error(
        "method", original_name, list_methods(), "Numbers may change (pgd-10, deat-55%), and m+ and f+ compose."
    )


def _build_registered(name: str, rules: Rules, entries: list[RegisteredMethod]) -> Method | None:
    """The method that one of these patterns builds for a name, if one does."""
    for entry in entries:
        parameters = entry.match(name)
        if parameters is not None:
            return replace(_call_builder(entry.build, rules, parameters), name=entry.name(**parameters))
    stems = [entry for entry in entries if entry.stem == name]
    if len(stems) == 1:  # "deat" alone would be ambiguous
        return replace(_call_builder(stems[0].build, rules, {}), name=stems[0].name())
    return None


def _normalize_name(name: str) -> str:
    text = name.strip().lower().replace(" ", "")
    for written, ours in METHOD_ALIASES.items():
        text = re.sub(written, ours, text)
    return text


def _build_from_file(spec: str, rules: Rules) -> Method:
    """What a file calls by that name, or has registered, behind any prefixes that stand before the name."""
    file, name = split_spec(spec)
    for prefix, compose in PREFIXES.items():
        if name.lower().startswith(prefix):
            return compose(_build_from_file(f"{file}:{name[len(prefix) :]}", rules), rules)
    module = load_module(spec)
    if hasattr(module, name):
        return _to_method(getattr(module, name), rules, spec)
    added = [entry for entry in _METHODS.values() if not str(entry.build.__module__).startswith("deat.")]
    found = _build_registered(_normalize_name(name), rules, added)
    if not found:
        raise no_such_name_error(file, name, module, [entry.name() for entry in added])
    return found


def _to_method(value: object, rules: Rules, spec: str) -> Method:
    if callable(value) and not isinstance(value, Method):
        value = _call_builder(value, rules, {})
    if not isinstance(value, Method):
        raise UsageError(f"{spec} is a {type(value).__name__}; a deat.Method or a function that returns one is needed.")
    return value


def _call_builder(build: MethodBuilder, rules: Rules, parameters: dict[str, int]) -> Method:
    if "rules" in inspect.signature(build).parameters:
        return build(rules=rules, **parameters)
    return build(**parameters)
