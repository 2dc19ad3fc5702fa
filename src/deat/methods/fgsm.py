"""U-FGSM, N-FGSM, FGSM-PGI and GradAlign: one step of the attack, and what keeps it from collapsing.

Idea: one step of 1.25 eps from a random point of the ball trains almost as well as many small ones, until it
collapses (catastrophic overfitting). Moves of a batch (core/game.py): `AJ`.
Citation: Wong, Rice, Kolter, "Fast is better than free", ICLR 2020.
Settings: alpha 1.25 eps (10/255), uniform start. Cost: 2 backprops a batch.
`m+fgsm`, which the paper names without defining it, is M+ over such steps, k at most 7.

N-FGSM draws its start from a ball of twice the radius, and projects neither start nor step onto the ball: pixels are
kept in [0, 1], and delta may be as long as 3 eps. It collapses at larger eps only.
Citation: de Jorge et al., "Make some noise: reliable and efficient single-step adversarial training", NeurIPS 2022.
Settings: start 2 eps, alpha eps. Cost: 2 backprops a batch.

FGSM-PGI remembers a start for each image, which a momentum of its gradients moves from epoch to epoch, and asks the
network for the same outputs at the start and after the step. This is its variant FGSM-MEP.
Citation: Jia et al., "Prior-guided adversarial initialization for fast adversarial training", ECCV 2022.
Settings: alpha eps, momentum m = g / |g|_1 + 0.3 m of each image (the authors' code divides by the norm of the whole
batch), next start clip(start + alpha sign(m)), random signs of size eps at first and every 40 epochs; 10 times the mean
squared difference of outputs. Starts belong to images as they were cropped and flipped then, as in the authors' code.
Cost: 2 backprops a batch (6 forwards and backwards), and 4 bytes of memory for each value of each training image.

GradAlign is U-FGSM with a penalty: the gradient with respect to the input at x + noise is to point where that at x
does.
Citation: Andriushchenko, Flammarion, "Understanding and improving fast adversarial training", NeurIPS 2020.
Settings: 0.2 (1 - cos), with noise uniform in the ball; the gradient at x is a constant, as in the authors' code. Cost:
4 backprops a batch (10 forwards and backwards).
"""

from dataclasses import replace

from deat.attack_schedules import Fixed
from deat.core.gradient_penalty import GradientAlignment
from deat.core.move_order import Craft, PenaliseGradient
from deat.core.remembered_starts import RememberStarts
from deat.core.training_losses import StartConsistency
from deat.methods.method import Method
from deat.methods.method_registry import register_method
from deat.methods.paper_vs_released_rules import RuleSet
from deat.methods.prefixes import mplus

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


@register_method("fgsm-pgi")
def fgsm_pgi(rules: RuleSet) -> Method:
    """Build FGSM-PGI."""
    attack = rules.make_attack(start="bernoulli", remember=RememberStarts(decay=0.3, reset_every=40))
    return Method(
        "fgsm-pgi",
        Craft(),
        Fixed(k=1, alpha_eps=1.0),
        attack,
        StartConsistency(beta=10.0),
        rules.make_probe(crafts=True),
        "one step from a start remembered for each image",
    )


@register_method("gradalign")
def gradalign(rules: RuleSet) -> Method:
    """Build GradAlign."""
    play = PenaliseGradient(Craft(), GradientAlignment(weight=0.2))
    return replace(fgsm(rules), name="gradalign", play=play, summary="one step, gradients aligned by a penalty")
