"""M+DEAT against U-FGSM under three setups: FAST on PreAct-ResNet 18 and on WRN-34-10, and standard on PreAct-ResNet
18.

Each row is that of `cifar10-fast` or `cifar10-standard`, with its settings, rules and selection. Under FAST
the paper's numbers are means over three seeds, and so are ours; under the standard setup they are of a single seed, as
ours are unless --seeds gives more.
"""

from dataclasses import replace

from deat.recipes.cifar10_fast import cifar10_fast
from deat.recipes.cifar10_standard import cifar10_standard
from deat.recipes.recipe import RecipeRow, register_recipe


@register_recipe(
    "u-fgsm",
    paper="Table 8",
    rules="released",
    data="cifar10",
    models=("preact_resnet18", "wide_resnet34_10"),
    methods=("m+deat", "fgsm"),
    seeds=(0, 1, 2),
)
def u_fgsm(method: str, model: str) -> list[RecipeRow]:
    """M+DEAT and U-FGSM under the FAST and the standard setup."""
    fast = [_relabel_row(row, model, "fast") for row in cifar10_fast(method, model)]
    if model == "wide_resnet34_10":
        return fast
    return fast + [replace(_relabel_row(row, model, "standard"), seeds=(0,)) for row in cifar10_standard(method, model)]


def _relabel_row(row: RecipeRow, model: str, setup: str) -> RecipeRow:
    method = row.label.split()[0]
    return replace(row, label=f"{row.label} {setup}", paper_row=("deat_vs_ufgsm", f"{model} {method} {setup}"))
