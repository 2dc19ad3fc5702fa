"""The paper's prefixes as functions from method to method.

M+ lets the gradient magnitude decide how many steps the adversary takes. F+ (friendly) lets each example
stop tau steps after it is first misclassified (Zhang et al. 2020).
"""

from dataclasses import replace

from deat.core.inner_attack import Friendly
from deat.errors import UsageError
from deat.methods.method import Method
from deat.methods.rules import Rules, get_rules
from deat.utils.numbers import check_int


def mplus(base: Method, gamma: float = 1.01, max_steps: int | None = None, *, rules: str | Rules = "paper") -> Method:
    """M+base: k starts at 0 and grows with l_X, up to max_steps (by default the base's own k)."""
    _check_is_method(base, "m+")
    chosen = get_rules(rules)
    stretch, ramp = (chosen.stretch, chosen.ramp) if base.play.crafts_first else (0.0, 0.0)
    schedule = base.schedule.to_mplus(gamma, max_steps, stretch, ramp)
    return replace(base, name=f"m+{base.name}", schedule=schedule, summary=f"{base.summary}, k guided by l_X")


def friendly(base: Method, tau: int = 3) -> Method:
    """F+base: crafting in eval mode, with each example stopped tau steps after it is first misclassified."""
    _check_is_method(base, "f+")
    check_int("tau", tau, 0)
    if not base.play.crafts_first:
        raise UsageError(f"f+ needs a method that crafts before it updates; {base.name} moves both at once. Use fat-K.")
    if base.attack.freeze is not None:
        raise UsageError(f"f+ cannot be put before {base.name}: it already has a rule that stops single examples.")
    if not base.schedule.has_adversary:
        raise UsageError("f+ needs a method with an adversary: natural training takes no steps to stop.")
    ascent = replace(base.attack, freeze=Friendly(), batch_norm="eval")
    schedule = replace(base.schedule, level=float(tau))
    summary = f"{base.summary}, friendly"
    return replace(base, name=f"f+{base.name}", attack=ascent, schedule=schedule, summary=summary)


def _check_is_method(base: object, prefix: str) -> None:
    """Refuse a name, which the prefix can be written before."""
    if not isinstance(base, Method):
        raise UsageError(
            f"{prefix} is put before a deat.Method, not {base!r}; of a name, deat.get_method('{prefix}NAME')."
        )
