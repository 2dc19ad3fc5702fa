"""How M+DEAT's step size and gamma trade robustness against cost.

alpha 8, 10, 12 and 14/255 by gamma 1.1, 1.01 and 1.001, five seeds of ten epochs in the FAST setup, all images,
last model. The figure sets the PGD-20 error against backprops.
"""

from deat.recipes.cifar10_fast import FAST
from deat.recipes.recipe import Judging, Row, register, title
from deat.runs.request import Request

ALPHAS, GAMMAS = (8, 10, 12, 14), (1.1, 1.01, 1.001)


@register(
    "alpha-gamma",
    paper="Figure 3",
    rules="released",
    data="cifar10",
    models=("preact_resnet18",),
    methods=("m+deat",),
    seeds=(0, 1, 2, 3, 4),
)
def alpha_gamma(method: str, model: str) -> list[Row]:
    """Four step sizes by three gammas, PGD-20 error against backprops."""
    return [_row(method, model, alpha, gamma) for gamma in GAMMAS for alpha in ALPHAS]


def _row(method: str, model: str, alpha: int, gamma: float) -> Row:
    request = Request(model=model, method=method, norm="linf", eps=8 / 255, alpha=alpha / 255, gamma=gamma, held_out=0)
    label = f"{title(method)} alpha {alpha} gamma {gamma:g}"
    return Row(label, request, dict(FAST), Judging(("natural", "pgd-20"), epoch="last"), about=("alpha", "gamma"))
