"""`deat list`: what can be named."""

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.table import Table
from tyro.conf import Positional

from deat import data, methods, models, recipes
from deat.cli.console import Screen, is_terminal
from deat.evaluation.attacks import FAMILIES, Attack
from deat.evaluation.autoattack import PARTS
from deat.threat import Linf
from deat.training.planning import backprops_per_batch


@dataclass(frozen=True)
class ListCommand:
    """List what can be named: methods, models, data, attacks or recipes."""

    kind: Positional[Literal["methods", "models", "data", "attacks", "recipes"]]
    """What to list. Yours are named by their file, my_file.py:NAME; methods that it registers as own.py:m+bold-2."""
    json: bool = False
    """Print one JSON document."""

    def run(self) -> int:
        """Print the list."""
        return list_things(self)


def list_things(order: ListCommand) -> int:
    """Print the rows of one kind, as a table or as JSON."""
    rows = LISTS[order.kind]()
    if order.json:
        print(json.dumps(rows, indent=2))
        return 0
    shown = [{name: value for name, value in row.items() if name not in LONG} for row in rows]
    table = Table(*shown[0], box=None, pad_edge=False)
    for row in shown:
        table.add_row(*(f"{value:,}" if isinstance(value, int) else str(value or "") for value in row.values()))
    console = Screen(soft_wrap=True, width=None if is_terminal() else WIDTH)
    console.print(table)
    for row in rows:
        if "settings" in row:
            console.print(f"\n{row['name']}: {row['methods']} on {row['models']}\n{row['settings']}")
    return 0


def _methods() -> list[dict[str, Any]]:
    found = [methods.method(name) for name in methods.names()]
    return [
        {"name": m.name, "play": type(m.play).__name__.lower(), "backprops in 10 epochs": _cost(m), "what": m.summary}
        for m in found
    ]


def _cost(m: methods.Method) -> str:
    few, many = backprops_per_batch(m, m.bind(Linf(8 / 255), 10), 10)
    return f"{few}" if few == many else f"{few}-{many}"


def _attacks() -> list[dict[str, Any]]:
    ours = {pattern: _described(build(20)) for pattern, build in FAMILIES.items()}
    forms = {"pgd-NxR, cw-NxR": "the same from R starts", "pgd-N-last, cw-N-last": "the same, the last step scored"}
    theirs = dict.fromkeys(PARTS, "a part of AutoAttack")
    found = {**ours, **forms, **theirs, "aa": "standard AutoAttack: its four parts, survivors going on"}
    return [{"name": name, "what": what} for name, what in found.items()]


def _described(how: Attack) -> str:
    if not how.steps:
        return "no attack"
    steps = "one step" if how.steps == 1 else "N steps"
    return f"{steps} of {how.alpha:g} eps, {how.start} start, on {LOSSES[how.loss]}"


def _recipes() -> list[dict[str, Any]]:
    found = [recipes.recipe(name) for name in recipes.names()]
    return [
        {
            "name": r.name,
            "in the paper": r.paper,
            "rules": r.rules,
            "data": r.data or "folder:PATH",
            "models": ", ".join(r.models),
            "methods": ", ".join(r.methods),
            "seeds": len(r.seeds),
            "what": r.summary,
            "settings": r.card,
        }
        for r in found
    ]


LOSSES = {"ce": "cross-entropy", "margin": "the margin"}
LONG = ("methods", "settings", "models")
"""What is too long for a column."""
WIDTH = 160
"""Columns of a table that is piped."""
LISTS = {
    "methods": _methods,
    "models": lambda: [asdict(info) for info in models.infos()],
    "data": lambda: [asdict(info) for info in data.infos()],
    "attacks": _attacks,
    "recipes": _recipes,
}
