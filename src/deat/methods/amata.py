"""Amata-A-B: from few coarse steps to many fine ones.

Idea: k grows linearly from A to B over training while the step shrinks as 2.5 eps / k. The word is `A^k J`.
Citation: Ye et al., "Amata: an annealing mechanism for adversarial training acceleration", AAAI 2021.
Settings: A 2, B 10, zero start; the released code never reaches B. Cost: k + 1 backprops a batch.
`m+amata-A-B`: k from M+, at most B, the step still 2.5 eps / k.
"""

from deat.core.inner_attack import InnerAttack
from deat.core.plays import Craft
from deat.methods.method import Method
from deat.methods.registry import register_method
from deat.methods.rules import Rules
from deat.schedules import Linear


@register_method("amata-A-B", "m+")
def amata(rules: Rules, a: int = 2, b: int = 10) -> Method:
    """Amata from a to b steps."""
    schedule = Linear(first=a, last=b, stretch=2.5, reaches_last=rules.amata_reaches_last)
    ascent, probe = InnerAttack(start="zero", noisy=rules.noisy), rules.probe(crafts=True)
    return Method("amata", Craft(), schedule, ascent, probe=probe, summary="ever more, ever finer steps")
