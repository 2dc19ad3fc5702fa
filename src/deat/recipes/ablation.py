"""Which of M+DEAT's settings matter: learning rate, start and step size, one changed at a time, in seven rows.

The standard setup. The authors' normal start had a mean of -8/255 by mistake and was not projected; here its mean is 0
and it is projected.
"""

from dataclasses import replace
from typing import Any

from deat.recipes.cifar10_standard import cifar10_standard
from deat.recipes.recipe import EvaluationPlan, RecipeRow, register_recipe

VARIANTS: dict[str, dict[str, Any]] = {
    "alpha 8": {"alpha": 8 / 255},
    "alpha 12": {"alpha": 12 / 255},
    "zero start": {"start": "zero"},
    "normal start": {"start": "normal"},
    "cyclic lr": {"lr_schedule": "cyclic"},
    "flat lr": {"lr_schedule": "flat"},
}


@register_recipe(
    "ablation",
    paper="Table 9",
    rules="released",
    data="cifar10",
    models=("preact_resnet18",),
    methods=("m+deat",),
)
def ablation(method: str, model: str) -> list[RecipeRow]:
    """Learning rate, start and step size of M+DEAT changed one at a time."""
    rows = []
    for row in cifar10_standard(method, model):
        base = replace(row, evaluation=EvaluationPlan(("natural", "pgd-100", "cw-20")))
        rows += [_make_variant(base, model, name, change) for name, change in VARIANTS.items()]
        rows.append(replace(base, paper_row=("tab:ablation", f"{model} {row.label}")))
    return rows


def _make_variant(row: RecipeRow, model: str, name: str, change: dict[str, Any]) -> RecipeRow:
    label = f"{row.label} {name}"
    request = replace(row.request, **{key: value for key, value in change.items() if key != "lr_schedule"})
    settings = {**row.settings, **{key: value for key, value in change.items() if key == "lr_schedule"}}
    paper_row = ("tab:ablation", f"{model} {label}")
    return replace(
        row, label=label, request=request, settings=settings, paper_row=paper_row, varied_settings=tuple(change)
    )
