"""FAT: friendly adversarial training, PGD that stops early for each example.

Idea: an example that is misclassified needs few more steps: it takes tau further ones and then stops. Moves of a
batch (core/game.py): `A^k J` with a mask. Labels follow their examples, unlike in the released code.
Citation: Zhang et al., "Attacks which do not kill training make adversarial learning stronger", ICML 2020.
Settings: k 5, alpha 0.25 eps (2/255), tau 3, uniform start, eval-mode crafting; `compact` shrinks the batch
instead of masking it. Cost: k + 1 backprops a batch; `active` counts the examples that moved.
"""

from deat.methods.method import Method
from deat.methods.method_registry import register_method
from deat.methods.paper_vs_released_rules import RuleSet
from deat.methods.pgd import pgd
from deat.methods.prefixes import friendly


@register_method("fat-K")
def fat(rules: RuleSet, k: int = 5) -> Method:
    """Build FAT with at most k steps."""
    return friendly(pgd(rules, k))
