"""DAT: dynamic adversarial training by first-order stationarity.

Idea: each example moves until its FOSC value falls to a threshold c_t that shrinks over training, so that the adversary
converges better as epochs pass. Moves of a batch (core/game.py): `A^k J` with a mask. It motivates M+ in the paper.
Citation: Wang et al., "On the convergence and robustness of adversarial training", ICML 2019.
Settings: 10 steps of 0.25 eps, c_t = 0.5 (1 - t / (5/6 T)), uniform start. The authors' code also re-weights the
loss from the second epoch on. The paper does not describe this, and it is not done here. Cost: 11 backprops a batch;
`active` counts the examples that moved.
"""

from dataclasses import replace

from deat.attack_schedules import LinearRamp
from deat.core.example_stopping import StopWhenConverged
from deat.methods.method import Method
from deat.methods.method_registry import register_method
from deat.methods.paper_vs_released_rules import RuleSet
from deat.methods.pgd import pgd


@register_method("dat")
def dat(rules: RuleSet) -> Method:
    """Build DAT with at most 10 steps."""
    base = pgd(rules)
    schedule = LinearRamp(first=10, last=10, alpha_eps=0.25, stop_threshold=0.5, stop_threshold_until=5 / 6)
    attack = replace(base.attack, freeze=StopWhenConverged())
    return replace(base, name="dat", schedule=schedule, attack=attack, summary="steps until converged")
