"""The prefixes as functions from method to method.

M+ lets the gradient magnitude decide how many steps the adversary takes. AUTO+ lets it be decided by how far the
adversary converges: by the mean over an epoch of its first-order stationarity condition (Wang et al. 2019), relative to
the largest value that it can have. F+ (friendly) lets each example stop tau steps after it is first misclassified (Zhang
et al. 2020). G+ adds a penalty on the input gradient of the loss to the last update of each batch (Finlay and Oberman
2021; Moosavi-Dezfooli et al. 2019). AWP+ takes the gradient of that update at the worst weights nearby (Wu, Xia, Wang
2020).
"""

from collections.abc import Callable
from dataclasses import replace

from deat.core.example_stopping import StopWhenFooled
from deat.core.gradient_penalty import GradientPenalty
from deat.core.measurements import LARGEST_RISE, REACHED_RISE
from deat.core.move_order import PenaliseGradient, PerturbWeights, Relay, find_play
from deat.core.weight_perturbation import WeightPerturbation
from deat.errors import UsageError, unknown_name_error
from deat.methods.method import Method
from deat.methods.paper_vs_released_rules import RuleSet, get_rule_set
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


def auto_steps(base: Method, max_steps: int | None = None) -> Method:
    """Return AUTO+base: k is small in the first half of training, and then follows how far the adversary converges.

    k may grow and fall, and needs no threshold from an early epoch, so that it also works for fine-tuning and on few
    images. See `deat.attack_schedules.AdversaryGap`. Its signals cost no pass. Methods that craft make steps of
    max(eps / k, alpha), as under m+.

    Args:
        base: Method with a fixed number of steps.
        max_steps: Largest k; by default the base's own k.

    Returns:
        The method, named auto+base.

    Raises:
        UsageError: If base is no Method, has no adversary, or already changes k by itself.

    Example:
        >>> deat.auto_steps(deat.get_method("pgd-7")).name
        'auto+pgd-7'
    """
    _check_is_method(base, "auto+")
    schedule = base.schedule.to_auto(stretch_eps=float(base.play.crafts_first))
    if max_steps is not None:
        schedule = replace(schedule, max_steps=max_steps)
    declared = {measurement.name: measurement for measurement in (*base.measurements, REACHED_RISE, LARGEST_RISE)}
    return replace(
        base,
        name=f"auto+{base.name}",
        schedule=schedule,
        summary=_join(base.summary, "k by how far the adversary converges"),
        measurements=tuple(declared.values()),
    )


def friendly(base: Method, tau: int = 3) -> Method:
    """Return F+base: crafting in eval mode, with each example stopped tau steps after it is first misclassified.

    Args:
        base: Method that crafts before it updates, such as PGD, TRADES or MART.
        tau: Steps granted after an example is misclassified.

    Returns:
        The method, named f+base.

    Raises:
        UsageError: If base is no Method, does not craft, has no adversary, or already has a stop rule.

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
    attack = replace(base.attack, freeze=StopWhenFooled(), batch_norm="eval")
    schedule = replace(base.schedule, stop_threshold=float(tau))
    summary = _join(base.summary, "friendly")
    return replace(base, name=f"f+{base.name}", attack=attack, schedule=schedule, summary=summary)


DEFAULT_PENALTIES = {
    "gradient": GradientPenalty("gradient", weight=0.1, step=0.25),
    "curvature": GradientPenalty("curvature", weight=0.1, step=1.0),
}
"""The penalty of g+ by its form."""


def gplus(base: Method, form: str = "gradient", weight: float | None = None, step: float | None = None) -> Method:
    """Return G+base: the last update of each batch also lowers the gradient of the loss with respect to the input.

    The word `A^k J` becomes `A^k G`, and `J^(k+1)` becomes `J^k G`. G costs one backprop more than J, two in the
    curvature form, in every epoch. Delta's steps and l_X are those of the loss without the penalty. See
    `GradientPenalty`.

    Args:
        base: Any method, also with other prefixes, and natural training.
        form: "gradient", the finite difference of the loss (Finlay and Oberman), or "curvature" (Moosavi-Dezfooli et
            al.).
        weight: The weight of the penalty; by default 0.1.
        step: The step of the finite difference in units of eps; by default 0.25, and 1 for the curvature.

    Returns:
        The method, named g+base.

    Raises:
        UsageError: If base is no Method or has a penalty already, or a setting is not accepted.

    Example:
        >>> deat.gplus(deat.get_method("m+deat"), weight=0.3).name
        'g+m+deat'
    """
    _check_is_method(base, "g+")
    if find_play(base.play, PenaliseGradient):
        raise UsageError(
            f"g+ cannot be put before {base.name}, which has a penalty on the input gradient already: write g+ once, and "
            "not before gradalign."
        )
    if form not in DEFAULT_PENALTIES:
        raise unknown_name_error("form of the gradient penalty", form, DEFAULT_PENALTIES)
    penalty = DEFAULT_PENALTIES[form]
    penalty = penalty if weight is None else replace(penalty, weight=weight)
    penalty = penalty if step is None else replace(penalty, step=step)
    play = PenaliseGradient(base.play, penalty)
    summary = _join(base.summary, "a penalty on the gradient with respect to the input")
    return replace(base, name=f"g+{base.name}", play=play, summary=summary)


def awp(base: Method, gamma: float = 0.005, warmup: int = 0) -> Method:
    """Return AWP+base: the gradient of the last update of each batch is taken at adversarially perturbed weights.

    After the perturbation of the images is made, one more pass gives the gradient of the training loss with respect to
    the weights, and each weight tensor W of two or more dimensions moves by gamma |W| along it. The update's gradient
    is that at these weights. Then the weights are put back bit for bit, and stepped. It costs one backprop a batch.
    Delta's gradient, l_X, loss, accuracy and batch-norm statistics are those of the pass at the weights themselves.
    Replaying methods perturb in the last update of a batch alone.

    Args:
        base: Any method but YOPO, also with other prefixes.
        gamma: The length of the step relative to the norm of each tensor. The authors take 0.01 with PGD and 0.005 with
            TRADES.
        warmup: Epochs at the beginning without it.

    Returns:
        The method, named awp+base.

    Raises:
        UsageError: If base is no Method, sums the gradients of several passes, or is perturbed already, or a setting is
            not accepted.

    Example:
        >>> deat.awp(deat.get_method("pgd-7"), gamma=0.01).name
        'awp+pgd-7'
    """
    _check_is_method(base, "awp+")
    if find_play(base.play, PerturbWeights):
        raise UsageError(f"awp+ is in {base.name} already. Write it once.")
    if find_play(base.play, Relay):
        raise UsageError(
            f"awp+ cannot be put before {base.name}: its update sums the gradients of several passes, which are taken at "
            "the same weights. Use a method such as pgd-7 or free-4."
        )
    play = PerturbWeights(base.play, WeightPerturbation(gamma, warmup))
    return replace(base, name=f"awp+{base.name}", play=play, summary=_join(base.summary, "at perturbed weights"))


PREFIXES: dict[str, Callable[[Method, RuleSet], Method]] = {
    "m+": lambda base, rules: mplus(base, rules=rules),
    "auto+": lambda base, rules: auto_steps(base),
    "f+": lambda base, rules: friendly(base),
    "g+": lambda base, rules: gplus(base),
    "awp+": lambda base, rules: awp(base),
}
"""The prefixes of names."""
UPDATE_PREFIXES = ("g+", "awp+")
"""Those that change how weights are updated and nothing else, so that they fit before and after the others."""


def _join(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


def _check_is_method(base: object, prefix: str) -> None:
    if not isinstance(base, Method):
        raise UsageError(
            f"{prefix} needs a deat.Method, not {base!r}. For a method of that name: deat.get_method('{prefix}NAME')."
        )
