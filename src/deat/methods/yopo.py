"""YOPO-m-n: propagate once, step often through the first layer.

Idea: delta reaches the network only through its first layer, so each of m full passes serves n cheap steps along the
stored gradient of that layer's output. Moves of a batch (core/game.py): `(J0 a^n)^(m-1) J`; theta steps once, at its
end. The first layer is detected automatically, on any network.
Citation: Zhang et al., "You only propagate once", NeurIPS 2019.
Settings: m 5, n 3, alpha 0.25 eps (2/255), uniform start; gradients of the m passes are summed, so the learning rate
acts m times (the original divides it). Cost: m backprops a batch. `m+yopo-M-N`: M+ sets the full passes.
"""

from deat.attack_schedules import Fixed
from deat.core.move_order import Relay
from deat.errors import UsageError
from deat.methods.method import Method
from deat.methods.method_registry import register_method
from deat.methods.paper_vs_released_rules import RuleSet


@register_method("yopo-M-N")
def yopo(rules: RuleSet, m: int = 5, n: int = 3) -> Method:
    """Build YOPO with m full passes of n first-layer steps each."""
    if m < 1 or n < 1:
        raise UsageError(f"yopo-{m}-{n}: at least one full pass and one first-layer step are needed, such as yopo-5-3.")
    attack, probe = rules.make_attack(), rules.make_probe(crafts=False)
    schedule = Fixed(k=m - 1, alpha_eps=0.25)
    return Method("yopo", Relay(n), schedule, attack, probe=probe, summary="first-layer steps")
