"""ImageNet: M+DEAT against FREE-4 and Amata, on ResNet 50 with a perturbation that is carried from batch to batch.

23 epochs of 256, learning rate 0.1 decayed at epochs 8 and 16 (M+DEAT 9 and 16, as the authors ran it), weight
decay 1e-4, fp32, eps 4/255. FREE-4 steps by 4/255; M+DEAT by 6/255, with gamma 1.1 and 1.01 and k at most 3. The
carried perturbation is limited by eps alone, and images are clamped to [0, 1]. It steps after every pass, also at
k = 0. Amata carries no perturbation; the paper takes its numbers from Amata's authors. l_X is measured in pixel space, not in the
normalised one. The last model is evaluated by PGD-10 and PGD-50 with steps of 1/255, scoring the last iterate. Other
image folders work too: --data folder:PATH --set size=96 --set epochs=60.
"""

from dataclasses import replace
from typing import Any

from deat.methods import get_method
from deat.recipes.recipe import EvaluationPlan, RecipeRow, register_recipe
from deat.runs.resolve_request import Request

REQUEST_BY_METHOD: dict[str, dict[str, Any]] = {
    "free-4": {"alpha": 4 / 255, "persistent": True},
    "m+deat": {"alpha": 6 / 255, "max_steps": 3, "start": "zero", "persistent": True},
}
"""Settings of the paper's methods in this setup."""


@register_recipe(
    "imagenet",
    paper="Table 4",
    rules="released",
    data=None,
    models=("resnet50",),
    methods=("free-4", "amata-2-4", "m+deat"),
)
def imagenet(method: str, model: str) -> list[RecipeRow]:
    """ResNet 50 at eps 4/255 with a carried perturbation, last model."""
    label = get_method(method).name
    request = Request(
        model=model,
        method=method,
        norm="linf",
        eps=4 / 255,
        space="pixel",
        held_out=0,
        size=224,
        **REQUEST_BY_METHOD.get(label, {}),
    )
    settings = {
        "epochs": 23,
        "batch_size": 256,
        "lr": 0.1,
        "lr_schedule": "multistep",
        "milestones": (9, 16) if label == "m+deat" else (8, 16),
        "weight_decay": 1e-4,
        "precision": "fp32",
        "val_attack": "none",
    }
    plan = EvaluationPlan(("natural", "pgd-10-last", "pgd-50-last"), epoch="last")
    row = RecipeRow(label, request, settings, plan, ("imagenet", f"{model} {label}"))
    return [_with_gamma(row, model, gamma) for gamma in (1.1, 1.01)] if label == "m+deat" else [row]


def _with_gamma(row: RecipeRow, model: str, gamma: float) -> RecipeRow:
    label = f"{row.label} gamma {gamma:g}"
    request = replace(row.request, gamma=gamma)
    return replace(
        row, label=label, request=request, paper_row=("imagenet", f"{model} {label}"), varied_settings=("gamma",)
    )
