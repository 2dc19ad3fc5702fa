"""The standard setup: the paper's benchmark of all methods on CIFAR-10.

50 epochs of 128, SGD with momentum 0.9 and weight decay 5e-4, the learning rate 0.05 (PreAct-ResNet 18; DenseNet
0.01) decayed at epochs 25 and 40, fp32. 1,000 training images are held out and choose the best epoch by CW-20; the
last epoch is evaluated as well, without AutoAttack. The authors chose by CW-10 on test images, which nothing here does.
gamma is 1.01. M+DEAT and U-FGSM step by 10/255, FREE by 8/255, Amata by 20/255 over its steps, the others by 2/255,
but M+PGD by 10/255 on DenseNet. PGD-7 starts at random, the authors' on DenseNet at zero. Table 3's rows of DenseNet
need --model densenet121_12; U-FGSM is compared with Table 8.
"""

from deat.methods import get_method
from deat.recipes.recipe import EvaluationPlan, RecipeRow, register_recipe
from deat.runs.resolve_request import Request

LR_BY_MODEL = {"densenet121_12": 0.01, "densenet121_32": 0.01}
EVALUATION_PLAN = EvaluationPlan(("natural", "pgd-100", "cw-20", "aa"))


@register_recipe(
    "cifar10-standard",
    paper="Table 3",
    rules="released",
    data="cifar10",
    models=("preact_resnet18",),
    methods=(
        *("free-4", "free-6", "free-8", "m+deat"),
        *("pgd-7", "fat-5", "yopo-5-3", "amata-2-10", "m+pgd"),
        *("trades", "f+trades", "m+trades", "mart", "f+mart", "m+mart", "fgsm"),
    ),
)
def cifar10_standard(method: str, model: str) -> list[RecipeRow]:
    """All methods in 50 epochs with a decaying rate, best epoch by CW-20 on held-out images."""
    label = get_method(method).name
    request = Request(
        model=model,
        method=method,
        norm="linf",
        eps=8 / 255,
        alpha=10 / 255 if (label, model) == ("m+pgd", "densenet121_12") else None,
        held_out=1000,
    )
    settings = {
        "epochs": 50,
        "batch_size": 128,
        "lr": LR_BY_MODEL.get(model, 0.05),
        "lr_schedule": "multistep",
        "milestones": (25, 40),
        "precision": "fp32",
        "val_attack": "cw-20",
    }
    paper_row = ("cifar10_result_std", f"{model} {label}")
    if label == "fgsm":
        paper_row = ("deat_vs_ufgsm", f"{model} {label} standard")
    return [RecipeRow(label, request, settings, EVALUATION_PLAN, paper_row)]
