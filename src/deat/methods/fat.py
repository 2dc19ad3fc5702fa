"""FAT: friendly adversarial training, PGD that stops early for each example.

Idea: once an example is misclassified it needs little more; it moves tau steps further and stays. The word is
`A^k J` with a mask. Implemented correctly: labels follow their examples.
Citation: Zhang et al., "Attacks which do not kill training make adversarial learning stronger", ICML 2020.
Settings: k 5, alpha 0.25 eps (2/255), tau 3, uniform start, eval-mode crafting; `compact` shrinks the batch
instead of masking it. Cost: k + 1 backprops a batch, of which `active` examples really moved.
"""

from deat.methods.method import Method
from deat.methods.pgd import pgd
from deat.methods.prefixes import friendly
from deat.methods.registry import register_method
from deat.methods.rules import Rules


@register_method("fat-K")
def fat(rules: Rules, k: int = 5) -> Method:
    """FAT with at most k steps."""
    return friendly(pgd(rules, k))
