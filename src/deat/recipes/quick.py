"""A whole table in about three minutes on two cores (--jobs 2), on the digits inside the package. A demonstration, not
a result. Its 16 runs take one core each, so one at a time they take about twice as long.

30 epochs of 64 at a cyclic rate with its peak of 0.05 at 30 %, Linf eps 0.15, the three-layer network, best epoch
by CW-20 on held-out images, that of natural training by natural accuracy. The rule set is `default`.
"""

from deat.methods import get_method
from deat.recipes.recipe import EvaluationPlan, RecipeRow, register_recipe
from deat.runs.resolve_request import DATASET_DEFAULTS, Request


@register_recipe(
    "quick",
    paper="none, a demonstration",
    rules="default",
    data="digits",
    models=("small",),
    methods=("natural", "fgsm", "free-8", "pgd-7", "deat-3", "m+deat", "m+pgd", "m+trades"),
    seeds=(0, 1),
)
def quick(method: str, model: str) -> list[RecipeRow]:
    """Eight methods on digits, in about three minutes on two cores (--jobs 2)."""
    plan = EvaluationPlan(("natural", "fgsm", "pgd-20", "cw-20"))
    request = Request(model=model, method=method)
    return [RecipeRow(get_method(method).name, request, dict(DATASET_DEFAULTS["digits"]), plan)]
