"""Method names: registered patterns, the paper's spellings, and the prefixes m+ and f+.

A pattern's capital letters are whole numbers: ``pgd-K`` answers to ``pgd-7`` and ``pgd-10``, and to ``pgd``
with the default of the builder's own parameter k. In brackets they are left out of the name at that default:
``trades[-K]``. What a file registers is named behind its path, as in ``own.py:bold-2`` and ``own.py:m+bold``.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from deat.errors import UsageError, unknown
from deat.methods.method import Method
from deat.methods.prefixes import friendly, mplus
from deat.methods.rules import Rules, rules_named
from deat.utils.user_code import is_file_spec, load_module, no_such_name, origin, split

Builder = Callable[..., Method]
PREFIXES: dict[str, Callable[[Method, Rules], Method]] = {
    "m+": lambda base, rules: mplus(base, rules=rules),
    "f+": lambda base, rules: friendly(base),
}
SPELLINGS = {r"u-fgsm": "fgsm", r"pgd-at": "pgd", r"free-at": "free", r"\bmdeat\b": "m+deat"}


@dataclass(frozen=True)
class Entry:
    """One registered pattern, the function that builds its methods, and the prefixes that it is known with."""

    pattern: str
    build: Builder
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
        return re.sub(r"[A-Z]", lambda m: str((defaults | parameters)[m[0].lower()]), self._plain)

    def match(self, name: str) -> dict[str, int] | None:
        """The parameters that a name gives, or None if it is not of this pattern."""
        expression = re.sub(r"[A-Z]", lambda m: f"(?P<{m[0].lower()}>\\d+)", re.escape(self._plain))
        found = re.fullmatch(expression, name)
        return {key: int(value) for key, value in found.groupdict().items()} if found else None

    @property
    def _plain(self) -> str:
        return self.pattern.replace("[", "").replace("]", "")


_ENTRIES: dict[str, Entry] = {}


def register(pattern: str, *prefixes: str) -> Callable[[Builder], Builder]:
    """Adds a method: decorates a function that returns a Method, with parameters for the pattern's letters.

    A parameter called `rules`, if there is one, receives the rule set. Every method can be composed with m+ and f+;
    the prefixes given are those with which it is listed as well.
    """

    def add(build: Builder) -> Builder:
        """Register the function, and give it back as it is."""
        letters = {c.lower() for c in pattern if c.isupper()}
        missing = letters - set(inspect.signature(build).parameters)
        if missing:
            raise UsageError(f"register({pattern!r}): {build.__name__} takes no parameter {sorted(missing)}.")
        for prefix in set(prefixes) - set(PREFIXES):
            raise unknown("prefix", prefix, PREFIXES)
        if pattern in _ENTRIES and origin(_ENTRIES[pattern].build) != origin(build):
            raise UsageError(f"register({pattern!r}): a method with this pattern is registered already.")
        _ENTRIES[pattern] = Entry(pattern, build, prefixes)
        return build

    return add


def names() -> list[str]:
    """Every registered name, parameters at their defaults."""
    return [prefix + entry.name() for entry in _ENTRIES.values() for prefix in ("", *entry.prefixes)]


def method(name: str | Method, *, rules: str | Rules = "paper") -> Method:
    """The method of that name: registered, composed with m+ or f+, or from a file (``my_file.py:NAME``)."""
    if isinstance(name, Method):
        return name
    if not isinstance(name, str):
        raise UsageError(f"{name!r} is no method; give a name, such as m+deat, or a deat.Method.")
    return _build(name.strip() if is_file_spec(name) else _spelling(name), rules_named(rules), name)


def _build(name: str, rules: Rules, asked: str) -> Method:
    found = _registered(name, rules, list(_ENTRIES.values()))
    if found:
        return found
    for prefix, compose in PREFIXES.items():
        if name.lower().startswith(prefix):
            return compose(_build(name[len(prefix) :], rules, asked), rules)
    if is_file_spec(name):
        return _from_file(name, rules)
    raise unknown("method", asked, names(), "Numbers may change (pgd-10, deat-55%), and m+ and f+ compose.")


def _registered(name: str, rules: Rules, entries: list[Entry]) -> Method | None:
    """The method that one of these patterns builds for a name, if one does."""
    for entry in entries:
        parameters = entry.match(name)
        if parameters is not None:
            return replace(_call(entry.build, rules, parameters), name=entry.name(**parameters))
    stems = [entry for entry in entries if entry.stem == name]
    if len(stems) == 1:  # "deat" alone would be ambiguous
        return replace(_call(stems[0].build, rules, {}), name=stems[0].name())
    return None


def _spelling(name: str) -> str:
    text = name.strip().lower().replace(" ", "")
    for written, ours in SPELLINGS.items():
        text = re.sub(written, ours, text)
    return text


def _from_file(spec: str, rules: Rules) -> Method:
    """What a file calls by that name, or has registered, behind any prefixes that stand before the name."""
    file, name = split(spec)
    for prefix, compose in PREFIXES.items():
        if name.lower().startswith(prefix):
            return compose(_from_file(f"{file}:{name[len(prefix) :]}", rules), rules)
    module = load_module(spec)
    if hasattr(module, name):
        return _as_method(getattr(module, name), rules, spec)
    added = [entry for entry in _ENTRIES.values() if not str(entry.build.__module__).startswith("deat.")]
    found = _registered(_spelling(name), rules, added)
    if not found:
        raise no_such_name(file, name, module, [entry.name() for entry in added])
    return found


def _as_method(found: object, rules: Rules, spec: str) -> Method:
    if callable(found) and not isinstance(found, Method):
        found = _call(found, rules, {})
    if not isinstance(found, Method):
        raise UsageError(f"{spec} is a {type(found).__name__}; a deat.Method or a function that returns one is needed.")
    return found


def _call(build: Builder, rules: Rules, parameters: dict[str, int]) -> Method:
    if "rules" in inspect.signature(build).parameters:
        return build(rules=rules, **parameters)
    return build(**parameters)
