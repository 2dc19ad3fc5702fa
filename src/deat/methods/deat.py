"""DEAT: batch replay whose number of replays grows during training.

Idea: early epochs need no strong adversary, so training starts naturally and adds replays when a criterion is met:
every d epochs (DEAT-d), when training accuracy exceeds p % (DEAT-p%), or when the gradient magnitude l_X grows
(M+DEAT; `GradientMagnitude` in attack_schedules.py). Moves of a batch (core/game.py): `J^(k+1)`.
Citation: Wang et al., "Dynamic efficient adversarial training guided by gradient magnitude", 2022.
Settings: alpha 1.25 eps (10/255), uniform start; M+DEAT gamma 1.01, k at most 7. Cost: k + 1 backprops a batch.

AUTO+DEAT, `auto` for short, is our own: the same replays, with k chosen by how far the adversary converges. k is 0 or 1 in
the first half of training and at most 7. It ties with plain ramps and FREE at equal backprops, and needs no number.
"""

from deat.attack_schedules import AccuracyAbove, EveryEpochs, Fixed, Schedule
from deat.core.move_order import Replay
from deat.methods.method import Method
from deat.methods.method_registry import register_method
from deat.methods.paper_vs_released_rules import RuleSet
from deat.methods.prefixes import auto_steps, mplus

ALPHA_EPS = 1.25


def _replay_method(rules: RuleSet, schedule: Schedule, summary: str) -> Method:
    attack = rules.make_attack()
    return Method("deat", Replay(), schedule, attack, probe=rules.make_probe(crafts=False), summary=summary)


@register_method("deat-D")
def deat_d(rules: RuleSet, d: int = 3) -> Method:
    """Build DEAT-d: one more replay every d epochs."""
    schedule = EveryEpochs(period=d, alpha_eps=ALPHA_EPS, max_steps=rules.deat_d_max_steps)
    return _replay_method(rules, schedule, "one replay more every d epochs")


@register_method("deat-P%")
def deat_p(rules: RuleSet, p: int = 40) -> Method:
    """Build DEAT-p%: one more replay after each epoch with a training accuracy above p %."""
    schedule = AccuracyAbove(percent=p, alpha_eps=ALPHA_EPS, max_steps=rules.deat_p_max_steps)
    return _replay_method(rules, schedule, "one replay more above p % accuracy")


@register_method("m+deat")
def m_deat(rules: RuleSet) -> Method:
    """Build M+DEAT, with k at most 7."""
    return mplus(_seven_replays(rules), rules=rules)


@register_method("auto+deat")
def auto_deat(rules: RuleSet) -> Method:
    """Build AUTO+DEAT, with k at most 7."""
    return auto_steps(_seven_replays(rules))


def _seven_replays(rules: RuleSet) -> Method:
    return _replay_method(rules, Fixed(k=7, alpha_eps=ALPHA_EPS), "replays")
