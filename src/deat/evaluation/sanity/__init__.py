"""Whether to believe a robust accuracy: checks of the model before the attacks, of what they left, and after them.

They follow "On Evaluating Adversarial Robustness" (Carlini et al. 2019) and AutoAttack's own flags. A difference
between two accuracies counts beyond max(0.5 points, 2 images).
"""

from deat.evaluation.sanity.after_attack import after, passes_after
from deat.evaluation.sanity.before_attack import are_probabilities, before
from deat.evaluation.sanity.consistency import compare
from deat.evaluation.sanity.flags import ADVICE, Flag, slack

SLICE = 128
"""How many images, from all over those that are judged, the checks before and after the attacks look at."""

__all__ = ["ADVICE", "SLICE", "Flag", "after", "are_probabilities", "before", "compare", "passes_after", "slack"]
