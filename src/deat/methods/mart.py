"""MART: misclassification-aware adversarial training.

Idea: minimise a boosted cross-entropy at x + delta and a KL whose weight is larger for examples that are
misclassified without an attack. Moves of a batch (core/game.py): `A^k J`, its J with two branches.
Citation: Wang et al., "Improving adversarial robustness requires revisiting misclassified examples", ICLR 2020.
Settings: beta 6, 10 steps of 0.25 eps (2/255), start 0.001 N(0,1), crafted with CE (F+MART too). Cost: 11
backprops a batch. M+MART: k at most 10; F+MART: tau 3.
"""

from deat.attack_schedules import Fixed
from deat.core.move_order import Craft
from deat.core.training_losses import Mart
from deat.methods.method import Method
from deat.methods.method_registry import register_method
from deat.methods.paper_vs_released_rules import RuleSet


@register_method("mart[-K]", "m+", "f+")
def mart(rules: RuleSet, k: int = 10) -> Method:
    """Build MART with k steps."""
    return Method(
        "mart",
        Craft(),
        Fixed(k=k, alpha_eps=0.25),
        rules.make_attack(start="jitter"),
        Mart(beta=6.0),
        rules.make_probe(crafts=True, clean_branch=True),
        "boosted CE plus a weighted KL",
    )
