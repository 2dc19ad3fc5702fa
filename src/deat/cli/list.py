"""`deat list`: the names that commands accept."""

import inspect
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

from tyro.conf import Positional

from deat import data, methods, models, recipes
from deat.cli.flag_types import OptionalStr
from deat.cli.saved_listings import Rows, print_rows
from deat.core.union_rules import describe_rule
from deat.errors import UsageError
from deat.evaluation.attack_registry import list_attack_plugins
from deat.evaluation.attacks import ATTACK_FAMILIES, AUTOATTACK_PARTS, Attack
from deat.integrations.loggers import list_loggers
from deat.methods.method_registry import list_file_methods
from deat.radius_checks import USUAL_RADII
from deat.tasks import get_task, list_tasks
from deat.threat import UNION_RULES, Linf
from deat.training.training_cost import backprop_bounds
from deat.utils.plugins import PLUGIN_GROUPS, loaded_plugins


@dataclass(frozen=True)
class ListCommand:
    """List the available methods, models, data sets, attacks, threats, tasks, recipes, loggers or installed plugins."""

    is_resumable: ClassVar[bool] = False

    kind: Positional[
        Literal["methods", "models", "data", "attacks", "threats", "tasks", "recipes", "loggers", "plugins"]
    ]
    """What to list."""
    code: OptionalStr = None
    """methods: also list those that this Python file defines, with the names to train them by."""
    json: bool = False
    """Print one JSON document instead of a table."""

    def run(self) -> int:
        """Print the list."""
        return run_list(self)


def run_list(args: ListCommand) -> int:
    """Print the rows of one kind, as a table or as JSON.

    Args:
        args: The command.

    Returns:
        The exit status, 0.
    """
    if args.code and args.kind != "methods":
        raise UsageError(f"--code is for deat list methods, not {args.kind}.")
    rows = compute_rows(args.kind)
    if args.code:
        rows += [_method_row(method) for method in list_file_methods(args.code)]
    print_rows(args.kind, rows, as_json=args.json)
    return 0


def compute_rows(kind: str) -> Rows:
    """Compute the rows of one kind, from the registries.

    Args:
        kind: What is listed, such as "methods".
    """
    return ROWS_BY_KIND[kind]()


def _method_rows() -> list[dict[str, Any]]:
    return [_method_row(methods.get_method(name)) for name in methods.list_methods()]


def _method_row(method: methods.Method) -> dict[str, Any]:
    return {
        "name": method.name,
        "play": type(method.play).__name__.lower(),
        "backprops in 10 epochs": _format_backprops(method),
        "what": method.summary,
    }


def _format_backprops(method: methods.Method) -> str:
    fewest, most = backprop_bounds(method, method.bind(Linf(8 / 255), 10), 10)
    return f"{fewest}" if fewest == most else f"{fewest}-{most}"


def _attack_rows() -> list[dict[str, Any]]:
    descriptions = {
        **{pattern: _describe_attack(build(20)) for pattern, build in ATTACK_FAMILIES.items()},
        "pgd-NxR, cw-NxR": "the same with R random starts",
        "pgd-N-last, cw-N-last": "the same, but scores the last step instead of the worst",
        **dict.fromkeys(AUTOATTACK_PARTS, "one part of AutoAttack"),
        "aa": "standard AutoAttack: each of its four parts attacks the images that the parts before it did not fool",
    }
    descriptions |= {name: _first_sentence(attack) for name, attack in list_attack_plugins().items()}
    return [{"name": name, "what": description} for name, description in descriptions.items()]


def _task_rows() -> list[dict[str, Any]]:
    tasks = [(name, get_task(name)) for name in list_tasks()]
    return [{"name": name, "metric": task.metric_names[0], "what": _first_sentence(task)} for name, task in tasks]


def _first_sentence(value: object) -> str:
    return " ".join((inspect.getdoc(type(value)) or "").split("\n\n")[0].split()).split(". ")[0].rstrip(".")


def _plugin_rows() -> list[dict[str, Any]]:
    """Every plugin of every group; looking up the names loads them, and warns of those that fail."""
    methods.list_methods(), models.list_models(), list_tasks(), list_attack_plugins(), list_loggers()
    return [
        {"name": one.name, "group": one.group, "package": one.origin, "problem": one.problem}
        for group in PLUGIN_GROUPS
        for one in loaded_plugins(group)
    ]


def _describe_attack(attack: Attack) -> str:
    if not attack.steps:
        return "no attack"
    steps = "one step" if attack.steps == 1 else "N steps"
    return f"{steps} of {attack.alpha:g} eps, {attack.start} start, on {LOSS_DESCRIPTIONS[attack.loss]}"


def _threat_rows() -> list[dict[str, Any]]:
    """The norms of single balls, and the rules by which training picks among several."""
    balls = [{"name": f"{norm}:EPS", "what": what, "usual": f"eps {USUAL_RADII[norm]}"} for norm, what in NORMS.items()]
    several = {"name": "linf:EPS+l2:EPS+l1:EPS", "what": "several balls at once", "usual": "--threat-rule worst"}
    rules = [{"name": f"--threat-rule {name}", "what": describe_rule(name), "usual": ""} for name in UNION_RULES]
    return [*balls, several, *rules]


def _recipe_rows() -> list[dict[str, Any]]:
    return [
        {
            "name": recipe.name,
            "in the paper": recipe.paper,
            "rules": recipe.rules,
            "data": recipe.data or "folder:PATH",
            "models": ", ".join(recipe.models),
            "methods": ", ".join(recipe.methods),
            "seeds": len(recipe.seeds),
            "what": recipe.summary,
            "settings": recipe.description,
        }
        for recipe in map(recipes.get_recipe, recipes.list_recipes())
    ]


def _logger_rows() -> list[dict[str, Any]]:
    return [
        {
            "name": info.name,
            "what": info.what,
            "install": f"pip install 'deat[{info.extra}]'" if info.missing and info.extra else "",
        }
        for info in list_loggers()
    ]


NORMS = {
    "linf": "every value changes by at most eps",
    "l2": "the Euclidean length of the change is at most eps",
    "l1": "the absolute changes sum to at most eps",
}
LOSS_DESCRIPTIONS = {"ce": "cross-entropy", "margin": "the margin", "segpgd": "right pixels first (segmentation)"}
ROWS_BY_KIND = {
    "methods": _method_rows,
    "models": lambda: [asdict(info) for info in models.list_model_infos()],
    "data": lambda: [asdict(info) for info in data.list_dataset_infos()],
    "attacks": _attack_rows,
    "threats": _threat_rows,
    "tasks": _task_rows,
    "recipes": _recipe_rows,
    "loggers": _logger_rows,
    "plugins": _plugin_rows,
}
