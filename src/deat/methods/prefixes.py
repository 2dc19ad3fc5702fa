"""The paper's prefixes as functions from method to method.

M+ lets the gradient magnitude decide how many steps the adversary takes. F+ (friendly) lets each example
stop tau steps after it is first misclassified (Zhang et al. 2020).
"""

from dataclasses import replace

from deat.core.inner_attack import Friendly
from deat.errors import UsageError
from deat.methods.method import Method
from deat.methods.rules import Rules, rules_named
from deat.utils.numbers import check_whole


def mplus(base: Method, gamma: float = 1.01, max_steps: int | None = None, *, rules: str | Rules = "paper") -> Method:
    """M+base: k starts at 0 and grows with l_X, up to max_steps (by default the base's own k)."""
    _check(base, "m+")
    chosen = rules_named(rules)
    stretch, ramp = (chosen.stretch, chosen.ramp) if base.play.crafts else (0.0, 0.0)
    schedule = base.schedule.guided(gamma, max_steps, stretch, ramp)
    return replace(base, name=f"m+{base.name}", schedule=schedule, summary=f"{base.summary}, k guided by l_X")


def friendly(base: Method, tau: int = 3) -> Method:
    """F+base: crafting in eval mode, with each example stopped tau steps after it is first misclassified."""
    _check(base, "f+")
    check_whole("tau", tau, 0)
    if not base.play.crafts:
        raise UsageError(f"f+ needs a method that crafts before it updates; {base.name} moves both at once. Use fat-K.")
    if base.ascent.freeze is not None:
        raise UsageError(f"f+ cannot be put before {base.name}: it already has a rule that stops single examples.")
    if not base.schedule.attacks:
        raise UsageError("f+ needs a method with an adversary: natural training takes no steps to stop.")
    ascent = replace(base.ascent, freeze=Friendly(), batch_norm="eval")
    schedule = replace(base.schedule, level=float(tau))
    summary = f"{base.summary}, friendly"
    return replace(base, name=f"f+{base.name}", ascent=ascent, schedule=schedule, summary=summary)


def _check(base: object, prefix: str) -> None:
    """Refuse a name, which the prefix can be written before."""
    if not isinstance(base, Method):
        raise UsageError(f"{prefix} is put before a deat.Method, not {base!r}; of a name, deat.method('{prefix}NAME').")
