"""The FAST setup: short training with a cyclic learning rate in half precision, on CIFAR-10.

One triangle 0 -> 0.1 -> 0 with momentum 0.9 -> 0.8 -> 0.9 against it, batches of 128, weight decay 5e-4, all 50,000
images, the last model. DEAT-3 takes 12 epochs, DEAT-40% and M+DEAT 11, the others 10. DEAT, in all its forms, and
U-FGSM step by 10/255, FREE by 8/255, PGD-7 by 2/255. gamma is 1.0 on PreAct-ResNet 18 and 1.01 on WRN. Table 6 is
PreAct-ResNet 18, Table 7 needs --model wide_resnet34_10. The paper says 10 epochs of U-FGSM, its time fits 15: both
are run and compared with its Table 8. Half precision is bf16 (the authors: fp16 without loss scaling).
"""

from dataclasses import replace

from deat.methods import get_method
from deat.recipes.recipe import EvaluationPlan, RecipeRow, register_recipe
from deat.runs.resolve_request import Request

EPOCHS_BY_METHOD = {"deat-3": 12, "deat-40%": 11, "m+deat": 11}
ALPHA_BY_METHOD = {"deat-3": 10 / 255, "deat-40%": 10 / 255, "m+deat": 10 / 255}
GAMMA_BY_METHOD_AND_MODEL = {("m+deat", "wide_resnet34_10"): 1.01, ("m+deat", "preact_resnet18"): 1.0}
PAPER_TABLE_BY_MODEL = {"preact_resnet18": "cifar10_result_pre", "wide_resnet34_10": "cifar10_result_wide"}
FAST_CONFIG = {
    "epochs": 10,
    "batch_size": 128,
    "lr": 0.1,
    "lr_schedule": "cyclic",
    "peak": 0.5,
    "cycle_momentum": True,
    "precision": "bf16",
    "val_attack": "none",
}
"""The setup's settings, shared by the recipes that use it."""


@register_recipe(
    "cifar10-fast",
    paper="Tables 6 and 7",
    rules="released",
    data="cifar10",
    models=("preact_resnet18",),
    methods=("deat-3", "deat-40%", "m+deat", "free-4", "free-8", "pgd-7", "fgsm"),
    seeds=(0, 1, 2),
)
def cifar10_fast(method: str, model: str) -> list[RecipeRow]:
    """Ten epochs at a cyclic rate in half precision, on all images, last model."""
    label = get_method(method).name
    request = Request(
        model=model,
        method=method,
        norm="linf",
        eps=8 / 255,
        alpha=ALPHA_BY_METHOD.get(label),
        gamma=GAMMA_BY_METHOD_AND_MODEL.get((label, model)),
        held_out=0,
    )
    settings = {**FAST_CONFIG, "epochs": EPOCHS_BY_METHOD.get(label, 10)}
    plan = EvaluationPlan(("natural", "fgsm", "pgd-100", "cw-20", "aa"), epoch="last")
    if label != "fgsm":
        paper_row = (PAPER_TABLE_BY_MODEL.get(model, ""), f"{model} {label}")
        return [RecipeRow(label, request, settings, plan, paper_row)]
    row = RecipeRow(label, request, settings, plan, ("deat_vs_ufgsm", f"{model} {label} fast"))
    longer = {**settings, "epochs": 15}
    return [row, replace(row, label=f"{label} 15 epochs", settings=longer, varied_settings=("epochs",))]
