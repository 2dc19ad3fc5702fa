"""The paper's prefixes as functions from method to method.

M+ lets the gradient magnitude decide how many steps the adversary takes. F+ (friendly) lets each example
stop tau steps after it is first misclassified (Zhang et al. 2020).
"""

from collections.abc import Callable
from dataclasses import replace

from deat.core.inner_attack_settings import FreezeWhenFooled
from deat.errors import UsageError
from deat.methods.method import Method
from deat.methods.rule_sets import RuleSet, get_rule_set
from deat.utils.numbers import check_int


def mplus(
    base: Method, gamma: float = 1.01, max_steps: int | None = None, *, rules: str | RuleSet = "default"
) -> Method:
    """Return M+base: k starts at 0 and grows with the gradient magnitude l_X.

    Args:
        base: Method with a fixed number of steps.
        gamma: k grows when l_X exceeds gamma times its value at the last growth.
        max_steps: Largest k; by default the base's own k, and none under the rule set "literal".
        rules: Rule set, "default", "literal" or "released".

    Returns:
        The method, named m+base.

    Raises:
        UsageError: If base is no Method, has no adversary, or already changes k by itself.

    Example:
        >>> deat.mplus(deat.get_method("pgd-7"), gamma=1.1).name
        'm+pgd-7'
    """
    _check_is_method(base, "m+")
    rule_set = get_rule_set(rules)
    stretch, ramp = (rule_set.stretch_eps, rule_set.ramp_eps) if base.play.crafts_first else (0.0, 0.0)
    schedule = base.schedule.to_mplus(gamma, stretch, ramp)
    if max_steps is not None or not rule_set.caps_mplus:
        schedule = replace(schedule, max_steps=max_steps)
    return replace(base, name=f"m+{base.name}", schedule=schedule, summary=_join(base.summary, "k guided by l_X"))


def friendly(base: Method, tau: int = 3) -> Method:
    """Return F+base: crafting in eval mode, with each example stopped tau steps after it is first misclassified.

    Args:
        base: Method that crafts before it updates, such as PGD, TRADES or MART.
        tau: Steps granted after an example is misclassified.

    Returns:
        The method, named f+base.

    Raises:
        UsageError: If base is no Method, does not craft, has no adversary, or already has a freeze rule.

    Example:
        >>> deat.friendly(deat.get_method("trades"), tau=1).name
        'f+trades'
    """
    _check_is_method(base, "f+")
    check_int("tau", tau, 0)
    if not base.play.crafts_first:
        raise UsageError(f"f+ needs a method that crafts before it updates; {base.name} moves both at once. Use fat-K.")
    if base.attack.freeze is not None:
        raise UsageError(f"f+ cannot be put before {base.name}: it already has a rule that stops single examples.")
    if not base.schedule.has_adversary:
        raise UsageError("f+ needs a method with an adversary: natural training takes no steps to stop.")
    attack = replace(base.attack, freeze=FreezeWhenFooled(), batch_norm="eval")
    schedule = replace(base.schedule, level=float(tau))
    summary = _join(base.summary, "friendly")
    return replace(base, name=f"f+{base.name}", attack=attack, schedule=schedule, summary=summary)


PREFIXES: dict[str, Callable[[Method, RuleSet], Method]] = {
    "m+": lambda base, rules: mplus(base, rules=rules),
    "f+": lambda base, rules: friendly(base),
}
"""The prefixes of names."""


def _join(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


def _check_is_method(base: object, prefix: str) -> None:
    if not isinstance(base, Method):
        raise UsageError(
            f"{prefix} needs a deat.Method, not {base!r}. For a method of that name: deat.get_method('{prefix}NAME')."
        )
