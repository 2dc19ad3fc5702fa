"""Amata-A-B: from few coarse steps to many fine ones.

Idea: k grows linearly from A to B over training while the step shrinks as 2.5 eps / k. Moves of a batch
(core/game.py): `A^k J`.
Citation: Ye et al., "Amata: an annealing mechanism for adversarial training acceleration", AAAI 2021.
Settings: A 2, B 10, zero start; the released code never reaches B. Cost: k + 1 backprops a batch.
`m+amata-A-B`: M+ chooses k, from 0 to B, and the step is still 2.5 eps / k. A is not used.
"""

import warnings

from deat.attack_schedules import LinearRamp
from deat.core.move_order import Craft
from deat.methods.method import Method
from deat.methods.method_registry import register_method
from deat.methods.paper_vs_released_rules import RuleSet
from deat.methods.prefixes import mplus

FIRST_K = 2


@register_method("amata-A-B")
def amata(rules: RuleSet, a: int = FIRST_K, b: int = 10) -> Method:
    """Build Amata, with a steps in the first epoch and b in the last one."""
    schedule = LinearRamp(first=a, last=b, stretch_eps=2.5, reaches_last=rules.amata_reaches_last)
    attack, probe = rules.make_attack(start="zero"), rules.make_probe(crafts=True)
    return Method("amata", Craft(), schedule, attack, probe=probe, summary="ever more, ever finer steps")


@register_method("m+amata-A-B")
def m_amata(rules: RuleSet, a: int = FIRST_K, b: int = 10) -> Method:
    """Build M+Amata, with k at most b; warn where a is not the default, since M+ does not use it."""
    if a != FIRST_K:
        warnings.warn(
            f"m+amata-{a}-{b} is the same method as m+amata-{FIRST_K}-{b}: M+ starts at k = 0, so that A = {a} is not "
            f"used. Write m+amata-{FIRST_K}-{b}.",
            stacklevel=2,
        )
    return mplus(amata(rules, a, b), rules=rules)
