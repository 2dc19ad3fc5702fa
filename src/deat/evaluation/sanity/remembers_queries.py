"""Check that a model's answers do not depend on earlier queries: compare it with copies that had none."""

from copy import deepcopy

import torch
from torch import Tensor, nn

from deat.data.image_label_checks import noun_of_shape
from deat.evaluation.attacks import correct_under_attack
from deat.evaluation.sanity.before_attack import count_different_outputs, max_odd_images
from deat.evaluation.sanity.extra_attacks import SWEEP_ATTACK, AttackedSubset, mean_accuracy
from deat.evaluation.sanity.flag_advice import Flag, accuracy_tolerance, make_flag
from deat.models.logits_wrapper import take_logits
from deat.utils.float32_precision import exact_float32
from deat.utils.torch_contexts import eval_mode


class FreshCopies(nn.Module):
    """Answers each query by a new copy of a model, which cannot remember an earlier query.

    Args:
        original: The model, before its first query. It is never called itself.
    """

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original = original

    def forward(self, x: Tensor) -> Tensor:
        """Answer by a new copy."""
        outputs: Tensor = take_logits(deepcopy(self.original).eval()(x))
        return outputs


def copy_before_queries(model: nn.Module) -> FreshCopies | None:
    """Copy a model before its first query; None for one that cannot be copied, which is not checked then."""
    if any(type(module).__name__ == "OptimizedModule" for module in model.modules()):
        return None  # a copy would be compiled again for every query
    try:
        return FreshCopies(deepcopy(model))
    except Exception:  # whatever a model's own code raises
        return None


def check_statefulness(subset: AttackedSubset, copies: FreshCopies) -> Flag | None:
    """Compare a model after all attacks with copies that had no queries.

    Args:
        subset: Images from all over the data, and the model after all attacks.
        copies: Its copies.

    Returns:
        The flag `remembers`, or None.
    """
    model, x = subset.exact_model, subset.x
    with exact_float32(x.device), eval_mode(model):
        with torch.no_grad():
            fresh = copies(x)
            counts = [count_different_outputs(outputs, fresh) for outputs in (model(x), model(x.flip(0)).flip(0))]
        if max(counts) > max_odd_images(len(x)):
            return make_flag(
                "remembers",
                f"after the attacks the outputs for {max(counts)} of {len(x)} {noun_of_shape(x.shape[1:])} differ from those of "
                "a copy of the model without earlier queries",
            )
        return _flag_if_attack_works_on_copies(subset, copies) if subset.threat.eps else None


def _flag_if_attack_works_on_copies(subset: AttackedSubset, copies: FreshCopies) -> Flag | None:
    x, y, generator = subset.x, subset.y, torch.Generator(subset.x.device).manual_seed(0)
    right = correct_under_attack(copies, x, y, SWEEP_ATTACK, subset.threat, generator, subset.task)
    plain, fresh = map(mean_accuracy, (subset.correct_under_exact_attack(SWEEP_ATTACK), right))
    if plain - fresh <= accuracy_tolerance(len(y)):
        return None
    return make_flag(
        "remembers",
        f"on {len(y)} {noun_of_shape(x.shape[1:])} accuracy is {plain:.1%} under {SWEEP_ATTACK.name}, and "
        f"{fresh:.1%} if a new copy of the model answers each query",
    )
