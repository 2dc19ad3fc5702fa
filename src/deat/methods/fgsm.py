"""U-FGSM and N-FGSM: one step from a uniform start.

Idea: one step of 1.25 eps from a random point of the ball trains almost as well as many small ones, until
it collapses (catastrophic overfitting). The word is `AJ`.
Citation: Wong, Rice, Kolter, "Fast is better than free", ICLR 2020.
Settings: alpha 1.25 eps (10/255), uniform start. Cost: 2 backprops a batch.
`m+fgsm`, which the paper names without defining it, is M+ over such steps, k at most 7.

N-FGSM draws its start from a ball of twice the radius, and projects neither start nor step onto the ball: pixels are
kept in [0, 1], and delta may be as long as 3 eps. It collapses at larger eps only.
Citation: de Jorge et al., "Make some noise: reliable and efficient single-step adversarial training", NeurIPS 2022.
Settings: start 2 eps, alpha eps. Cost: 2 backprops a batch.
"""

from dataclasses import replace

from deat.core.move_order import Craft
from deat.methods.method import Method
from deat.methods.method_registry import register_method
from deat.methods.prefixes import mplus
from deat.methods.rule_sets import RuleSet
from deat.schedules import Fixed

ALPHA_EPS = 1.25
NOISE_EPS = 2.0
"""The radius of N-FGSM's start."""


@register_method("fgsm")
def fgsm(rules: RuleSet) -> Method:
    """Build U-FGSM."""
    attack, probe = rules.make_attack(), rules.make_probe(crafts=True)
    schedule = Fixed(k=1, alpha_eps=ALPHA_EPS)
    return Method("fgsm", Craft(), schedule, attack, probe=probe, summary="one step, uniform start")


@register_method("m+fgsm")
def m_fgsm(rules: RuleSet) -> Method:
    """Build M+ over U-FGSM's step, with k at most 7."""
    seven_steps = Fixed(k=7, alpha_eps=ALPHA_EPS)
    return mplus(replace(fgsm(rules), schedule=seven_steps), rules=rules)


@register_method("n-fgsm")
def n_fgsm(rules: RuleSet) -> Method:
    """Build N-FGSM."""
    attack = rules.make_attack(leaves_ball=True, start_radius=NOISE_EPS)
    schedule, probe = Fixed(k=1, alpha_eps=1.0), rules.make_probe(crafts=True)
    return Method("n-fgsm", Craft(), schedule, attack, probe=probe, summary="one step from noise of 2 eps, unprojected")
