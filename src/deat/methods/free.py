"""FREE-m: replay each batch m times, updating delta and theta in every pass.

Idea: the pass that updates the weights yields delta's gradient for free. Moves of a batch (core/game.py): `J^m`.
Citation: Shafahi et al., "Adversarial training for free!", NeurIPS 2019.
Settings: alpha eps (8/255), zero start, new for every batch as in the paper's benchmark; `persistent` carries
delta over batches, as the original does. Cost: m backprops a batch.
"""

from deat.attack_schedules import Fixed
from deat.core.move_order import Replay
from deat.errors import UsageError
from deat.methods.method import Method
from deat.methods.method_registry import register_method
from deat.methods.paper_vs_released_rules import RuleSet


@register_method("free-M")
def free(rules: RuleSet, m: int = 8) -> Method:
    """Build FREE with m replays of each batch."""
    if m < 1:
        raise UsageError(f"free-{m}: a batch is played at least once. Use free-1 or more.")
    attack, probe = rules.make_attack(start="zero"), rules.make_probe(crafts=False)
    schedule = Fixed(k=m - 1, alpha_eps=1.0)
    return Method("free", Replay(), schedule, attack, probe=probe, summary="m replays of a batch")
