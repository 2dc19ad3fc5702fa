"""The training process of six methods: accuracy, robustness gain, l_X and the Lipschitz bound, epoch by epoch.

Ten epochs of the FAST setup for each. PGD-20 is run every epoch on 1,000 training images that are held out (the
paper does not say on which images); the last model is evaluated. The backprops of these runs are the paper's cost
table (Table 2).
"""

from deat.methods import get_method
from deat.recipes.cifar10_fast import ALPHA_BY_METHOD, FAST_CONFIG
from deat.recipes.recipe import EvaluationPlan, RecipeRow, register_recipe
from deat.runs.resolve_request import Request


@register_recipe(
    "training-process",
    paper="Figure 2 and Table 2",
    rules="released",
    data="cifar10",
    models=("preact_resnet18",),
    methods=("fgsm", "pgd-7", "free-4", "free-8", "deat-3", "deat-40%"),
)
def training_process(method: str, model: str) -> list[RecipeRow]:
    """Six methods in ten epochs, PGD-20 after each."""
    label = get_method(method).name
    request = Request(
        model=model, method=method, norm="linf", eps=8 / 255, alpha=ALPHA_BY_METHOD.get(label), held_out=1000
    )
    settings = {**FAST_CONFIG, "val_attack": "pgd-20"}
    plan = EvaluationPlan(("natural", "fgsm", "pgd-20"), epoch="last")
    return [RecipeRow(label, request, settings, plan, ("tab:computational_cost", f"{model} {label}"))]
