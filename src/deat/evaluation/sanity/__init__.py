"""Whether to believe a robust accuracy: checks of the model before the attacks, of what they left, and after them.

They follow "On Evaluating Adversarial Robustness" (Carlini et al. 2019) and AutoAttack's own flags. A difference
between two accuracies counts beyond max(0.5 points, 2 images).
"""

from deat.evaluation.sanity.after_attack import check_after_attacks, estimate_check_passes
from deat.evaluation.sanity.before_attack import are_probabilities, check_before_attacks
from deat.evaluation.sanity.consistency import check_consistency
from deat.evaluation.sanity.flags import FLAG_ADVICE, Flag, accuracy_tolerance

SANITY_IMAGES = 128
"""How many images, from all over those that are judged, the checks before and after the attacks look at."""

__all__ = [
    "FLAG_ADVICE",
    "SANITY_IMAGES",
    "Flag",
    "accuracy_tolerance",
    "are_probabilities",
    "check_after_attacks",
    "check_before_attacks",
    "check_consistency",
    "estimate_check_passes",
]
