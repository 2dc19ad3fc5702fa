"""TRADES: trade natural accuracy against a smooth neighbourhood.

Idea: minimise CE(x) + beta * KL(p(x) || p(x + delta)), with delta crafted to maximise that KL (`Trades` in
core/training_losses.py). Moves of a batch (core/game.py): `A^k J`, its J with two branches.
Citation: Zhang et al., "Theoretically principled trade-off between robustness and accuracy", ICML 2019.
Settings: beta 6, 10 steps of 0.25 eps (2/255), start 0.001 N(0,1). Cost: 11 backprops a batch (24 passes,
forward or backward, and one forward pass for the clean logits). M+TRADES: k at most 10; F+TRADES: tau 3. In half
precision, where rounding would hide so small a start, the first gradient is taken at 16 times its distance
(`core/inner_attack.py`).
"""

from deat.attack_schedules import Fixed
from deat.core.move_order import Craft
from deat.core.training_losses import Trades
from deat.methods.method import Method
from deat.methods.method_registry import register_method
from deat.methods.paper_vs_released_rules import RuleSet


@register_method("trades[-K]", "m+", "f+")
def trades(rules: RuleSet, k: int = 10) -> Method:
    """Build TRADES with k steps."""
    return Method(
        "trades",
        Craft(),
        Fixed(k=k, alpha_eps=0.25),
        rules.make_attack(loss="kl", start="jitter"),
        Trades(beta=6.0),
        rules.make_probe(crafts=True, clean_branch=True),
        "CE plus beta times KL to the neighbourhood",
    )
