"""Robust accuracy against backprops: one-step, replaying and crafting methods at equal budgets, on CIFAR-10.

The budgets are 16 and 32 backprops for each image. A method trains for as many epochs as it can afford; for M+, whose
k is not known in advance, this is estimated by the mean of its fewest and its most backprops. The other settings are
those of the FAST setup: one triangle 0 -> 0.1 -> 0, batches of 128, weight decay 5e-4, all 50,000 images, bf16. Weights
are averaged with a decay of 0.995, and both the averaged and the last weights are evaluated, so that no image chooses
between them. DEAT-3 and FGSM-PGI have two rows more, with a label smoothing of 0.1. AutoAttack runs on the averaged
weights and 300 images. The rule set is `default`, with each method's own step sizes.

`long-front` has 240 backprops for each image on PreAct-ResNet 18, a little less than M+DEAT needs in the standard setup
(246, by the paper's times), a decay of 0.9995 and a label smoothing of 0.4, as published long trainings with one step
have them. AutoAttack runs on 1,000 images.
"""

from dataclasses import replace

from deat.methods import Method, get_method
from deat.recipes.cifar10_fast import FAST_CONFIG
from deat.recipes.recipe import EvaluationPlan, RecipeRow, register_recipe
from deat.runs.resolve_request import Request
from deat.threat import Linf
from deat.training.training_cost import backprop_bounds

BUDGETS = (16, 32)
"""Backprops for each image."""
LONG_BUDGET = 240
SMOOTHED_METHODS = ("deat-3", "fgsm-pgi")
"""Methods with a second row, with a label smoothing of 0.1."""
THREAT = Linf(8 / 255)


@register_recipe(
    "front",
    paper="none, robustness per backprop",
    rules="default",
    data="cifar10",
    models=("preact_resnet8",),
    methods=(
        "deat-3",
        "m+deat",
        "free-4",
        "n-fgsm",
        "fgsm-pgi",
        "fgsm",
        "pgd-7",
        "free-8",
        "awp+deat-3",
        "g+deat-3",
        "awp+fgsm-pgi",
        "g+fgsm-pgi",
    ),
    seeds=(0, 1, 2),
)
def front(method: str, model: str) -> list[RecipeRow]:
    """Robust accuracy at equal backprops, with averaged weights beside the last ones."""
    resolved = get_method(method, rules="default")
    request = Request(model=model, method=method, norm="linf", eps=THREAT.eps, held_out=0)
    plan = EvaluationPlan(("natural", "pgd-20", "aa"), epoch="averaged", n=2000, aa_n=300)
    rows = []
    for budget in BUDGETS:
        settings = {**FAST_CONFIG, "epochs": count_epochs(resolved, budget), "ema": 0.995}
        rows.append(RecipeRow(f"{resolved.name} at {budget}", request, settings, plan))
        if resolved.name in SMOOTHED_METHODS:
            smoothed = {**settings, "label_smoothing": 0.1}
            rows.append(replace(rows[-1], label=f"{resolved.name} smoothed at {budget}", settings=smoothed))
    return rows


@register_recipe(
    "long-front",
    paper="none, robustness per backprop",
    rules="default",
    data="cifar10",
    models=("preact_resnet18",),
    methods=("awp+fgsm-pgi", "fgsm-pgi", "m+deat", "free-4", "deat-6", "n-fgsm", "pgd-7"),
)
def long_front(method: str, model: str) -> list[RecipeRow]:
    """Robust accuracy after 240 backprops for each image, with averaged weights and smoothed labels."""
    resolved = get_method(method, rules="default")
    request = Request(model=model, method=method, norm="linf", eps=THREAT.eps, held_out=0)
    settings = {**FAST_CONFIG, "epochs": count_epochs(resolved, LONG_BUDGET), "ema": 0.9995, "label_smoothing": 0.4}
    plan = EvaluationPlan(("natural", "pgd-20", "aa"), epoch="averaged", aa_n=1000)
    return [RecipeRow(resolved.name, request, settings, plan)]


def count_epochs(method: Method, budget: int) -> int:
    """Count the epochs that a method can train for.

    Args:
        method: The training method.
        budget: Backprops for each image.

    Returns:
        The largest number of epochs whose expected backprops are within the budget, at least 1.
    """

    def expected_backprops(epochs: int) -> float:
        """The mean of the fewest and the most backprops of a training."""
        return sum(backprop_bounds(method, method.bind(THREAT, epochs), epochs)) / 2

    epochs = 1
    while expected_backprops(epochs + 1) <= budget:
        epochs += 1
    return epochs
