"""Sanity checks of an evaluation: of the model before the attacks, of the attacks' results, and by more attacks after them.

They follow "On Evaluating Adversarial Robustness" (Carlini et al. 2019) and AutoAttack's own flags. Two accuracies
differ only if they are more than 0.5 points and more than 2 images apart.
"""

from deat.evaluation.sanity.before_attack import MIN_IMAGES_FOR_CHANCE, check_before_attacks
from deat.evaluation.sanity.consistency import check_consistency
from deat.evaluation.sanity.extra_attacks import AttackedSubset, estimate_check_passes, run_extra_attacks
from deat.evaluation.sanity.flag_advice import FLAG_ADVICE, Flag, accuracy_tolerance
from deat.evaluation.sanity.remembers_queries import FreshCopies, check_statefulness, copy_before_queries

SANITY_IMAGES = 128
"""How many images, from all over the evaluated ones, the checks before and after the attacks use."""

__all__ = [
    "FLAG_ADVICE",
    "MIN_IMAGES_FOR_CHANCE",
    "SANITY_IMAGES",
    "AttackedSubset",
    "Flag",
    "FreshCopies",
    "accuracy_tolerance",
    "check_before_attacks",
    "check_consistency",
    "check_statefulness",
    "copy_before_queries",
    "estimate_check_passes",
    "run_extra_attacks",
]
