"""U-FGSM: one step from a uniform start.

Idea: a single ascent of 1.25 eps from a random point of the ball is almost as good as many small ones, until
it collapses (catastrophic overfitting). The word is `AJ`.
Citation: Wong, Rice, Kolter, "Fast is better than free", ICLR 2020.
Settings: alpha 1.25 eps (10/255), uniform start. Cost: 2 backprops a batch.
`m+fgsm`, which the paper names without defining, is M+ over such steps, k at most 7.
"""

from deat.core.inner_attack import InnerAttack
from deat.core.plays import Craft
from deat.methods.method import Method
from deat.methods.prefixes import mplus
from deat.methods.registry import register_method
from deat.methods.rules import Rules
from deat.schedules import Fixed


@register_method("fgsm")
def fgsm(rules: Rules) -> Method:
    """U-FGSM."""
    ascent, probe = InnerAttack(noisy=rules.noisy), rules.probe(crafts=True)
    return Method("fgsm", Craft(), Fixed(k=1, alpha=1.25), ascent, probe=probe, summary="one step, uniform start")


@register_method("m+fgsm")
def m_fgsm(rules: Rules) -> Method:
    """M+ over U-FGSM's step."""
    return mplus(fgsm(rules), max_steps=7, rules=rules)
