"""PGD-AT: craft with k projected gradient steps, then update.

Idea: train on the worst point that k small steps reach. Moves of a batch (core/game.py): `A^k J`.
Citation: Madry et al., "Towards deep learning models resistant to adversarial attacks", ICLR 2018.
Settings: alpha 0.25 eps (2/255), uniform start. Cost: k + 1 backprops a batch.
"""

from deat.attack_schedules import Fixed
from deat.core.move_order import Craft
from deat.methods.method import Method
from deat.methods.method_registry import register_method
from deat.methods.paper_vs_released_rules import RuleSet
from deat.methods.prefixes import mplus


@register_method("pgd-K")
def pgd(rules: RuleSet, k: int = 7) -> Method:
    """Build PGD-AT.

    Args:
        rules: Rule set.
        k: Number of steps.

    Returns:
        The method, which DAT and FAT build on.
    """
    attack, probe = rules.make_attack(), rules.make_probe(crafts=True)
    schedule = Fixed(k=k, alpha_eps=0.25)
    return Method("pgd", Craft(), schedule, attack, probe=probe, summary="k steps, then an update")


@register_method("m+pgd")
def m_pgd(rules: RuleSet) -> Method:
    """Build M+PGD, with k at most 7."""
    return mplus(pgd(rules), rules=rules)
