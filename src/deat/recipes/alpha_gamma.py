"""How M+DEAT's step size and gamma trade robustness against cost.

alpha 8, 10, 12 and 14/255 by gamma 1.1, 1.01 and 1.001, five seeds of ten epochs in the FAST setup, all images,
last model. The figure shows the PGD-20 error over backprops.
"""

from deat.methods import get_method
from deat.recipes.cifar10_fast import FAST_CONFIG
from deat.recipes.recipe import EvaluationPlan, RecipeRow, register_recipe
from deat.runs.resolve_request import Request

ALPHAS_IN_255THS, GAMMAS = (8, 10, 12, 14), (1.1, 1.01, 1.001)


@register_recipe(
    "alpha-gamma",
    paper="Figure 3",
    rules="released",
    data="cifar10",
    models=("preact_resnet18",),
    methods=("m+deat",),
    seeds=(0, 1, 2, 3, 4),
)
def alpha_gamma(method: str, model: str) -> list[RecipeRow]:
    """Four step sizes by three gammas, PGD-20 error against backprops."""
    return [_make_row(method, model, alpha, gamma) for gamma in GAMMAS for alpha in ALPHAS_IN_255THS]


def _make_row(method: str, model: str, alpha: int, gamma: float) -> RecipeRow:
    request = Request(model=model, method=method, norm="linf", eps=8 / 255, alpha=alpha / 255, gamma=gamma, held_out=0)
    label = f"{get_method(method).name} alpha {alpha} gamma {gamma:g}"
    plan = EvaluationPlan(("natural", "pgd-20"), epoch="last")
    return RecipeRow(label, request, dict(FAST_CONFIG), plan, varied_settings=("alpha", "gamma"))
