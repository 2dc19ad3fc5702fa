"""`deat list`: what can be named."""

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.table import Table
from tyro.conf import Positional

from deat import data, methods, models, recipes
from deat.evaluation.attacks import ATTACK_FAMILIES, Attack
from deat.evaluation.autoattack import AUTOATTACK_PARTS
from deat.threat import Linf
from deat.training.cost_estimate import backprop_bounds
from deat.utils.terminal import make_table_console


@dataclass(frozen=True)
class ListCommand:
    """List what can be named: methods, models, data, attacks or recipes."""

    kind: Positional[Literal["methods", "models", "data", "attacks", "recipes"]]
    """What to list. Yours are named by their file, my_file.py:NAME; methods that it registers as own.py:m+bold-2."""
    json: bool = False
    """Print one JSON document."""

    def run(self) -> int:
        """Print the list."""
        return run_list(self)


def run_list(args: ListCommand) -> int:
    """Print the rows of one kind, as a table or as JSON."""
    rows = ROWS_BY_KIND[args.kind]()
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    shown = [{name: value for name, value in row.items() if name not in OMITTED_COLUMNS} for row in rows]
    table = Table(*shown[0], box=None, pad_edge=False)
    for row in shown:
        table.add_row(*(f"{value:,}" if isinstance(value, int) else str(value or "") for value in row.values()))
    console = make_table_console()
    console.print(table)
    for row in rows:
        if "settings" in row:
            console.print(f"\n{row['name']}: {row['methods']} on {row['models']}\n{row['settings']}")
    return 0


def _method_rows() -> list[dict[str, Any]]:
    found = [methods.get_method(name) for name in methods.list_methods()]
    return [
        {
            "name": m.name,
            "play": type(m.play).__name__.lower(),
            "backprops in 10 epochs": _format_backprops(m),
            "what": m.summary,
        }
        for m in found
    ]


def _format_backprops(m: methods.Method) -> str:
    few, many = backprop_bounds(m, m.bind(Linf(8 / 255), 10), 10)
    return f"{few}" if few == many else f"{few}-{many}"


def _attack_rows() -> list[dict[str, Any]]:
    ours = {pattern: _describe_attack(build(20)) for pattern, build in ATTACK_FAMILIES.items()}
    forms = {"pgd-NxR, cw-NxR": "the same from R starts", "pgd-N-last, cw-N-last": "the same, the last step scored"}
    theirs = dict.fromkeys(AUTOATTACK_PARTS, "a part of AutoAttack")
    found = {**ours, **forms, **theirs, "aa": "standard AutoAttack: its four parts, survivors going on"}
    return [{"name": name, "what": what} for name, what in found.items()]


def _describe_attack(attack: Attack) -> str:
    if not attack.steps:
        return "no attack"
    steps = "one step" if attack.steps == 1 else "N steps"
    return f"{steps} of {attack.alpha:g} eps, {attack.start} start, on {LOSS_DESCRIPTIONS[attack.loss]}"


def _recipe_rows() -> list[dict[str, Any]]:
    found = [recipes.get_recipe(name) for name in recipes.list_recipes()]
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
            "settings": r.description,
        }
        for r in found
    ]


LOSS_DESCRIPTIONS = {"ce": "cross-entropy", "margin": "the margin"}
OMITTED_COLUMNS = ("methods", "settings", "models")
"""What is too long for a column."""
ROWS_BY_KIND = {
    "methods": _method_rows,
    "models": lambda: [asdict(info) for info in models.list_model_infos()],
    "data": lambda: [asdict(info) for info in data.list_dataset_infos()],
    "attacks": _attack_rows,
    "recipes": _recipe_rows,
}
