"""Every method of the paper, one file a family. Importing this package registers all of its files."""

from importlib import import_module
from pkgutil import iter_modules

from deat.methods.method import Method
from deat.methods.method_registry import get_method, list_methods, register_method
from deat.methods.paper_vs_released_rules import DEFAULT_RULES, LITERAL_RULES, RELEASED_RULES, RuleSet
from deat.methods.prefixes import auto_steps, awp, friendly, gplus, mplus

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = [
    "DEFAULT_RULES",
    "LITERAL_RULES",
    "RELEASED_RULES",
    "Method",
    "RuleSet",
    "auto_steps",
    "awp",
    "friendly",
    "get_method",
    "gplus",
    "list_methods",
    "mplus",
    "register_method",
]
