"""Change single settings of a method; a setting that the method does not have is refused."""

from dataclasses import fields, is_dataclass, replace
from typing import Any, cast, get_args, get_type_hints

from deat.core.example_stopping import StopWhenFooled
from deat.core.gradient_penalty import GradientPenalty
from deat.core.magnitude_probe import MagnitudeProbe
from deat.core.move_order import PenaliseGradient, PerturbWeights, find_play, replace_play
from deat.errors import UsageError, unknown_name_error
from deat.methods.method import Method
from deat.methods.method_registry import get_method
from deat.methods.prefixes import DEFAULT_PENALTIES
from deat.threat import START_KINDS, Linf, ThreatModel, parse_threat
from deat.utils.numbers import check_int, check_number, to_python_number

PROBE_SPACES = get_args(get_type_hints(MagnitudeProbe)["space"])
MAX_ALPHA = 1e6
"""A step size that is larger than any image."""


def configure_method(
    method: str | Method,
    threat: str | ThreatModel | None = None,
    *,
    gamma: float | None = None,
    max_steps: int | None = None,
    alpha: float | None = None,
    beta: float | None = None,
    tau: int | None = None,
    start: str | None = None,
    persistent: bool | None = None,
    compact: bool | None = None,
    space: str | None = None,
    g_weight: float | None = None,
    g_step: float | None = None,
    g_form: str | None = None,
    awp_gamma: float | None = None,
    awp_warmup: int | None = None,
) -> Method:
    """Return a method with some of its settings changed. None leaves a setting as it is.

    Args:
        method: A Method, or a name of one.
        threat: Threat model, such as Linf(8 / 255) or "l2:0.5". Needed for alpha.
        gamma: M+: k grows when l_X exceeds gamma times its value at the last growth.
        max_steps: M+, AUTO+, DEAT-d and DEAT-p%: largest k.
        alpha: Step size, absolute as the eps of the threat is, the same at every k.
        beta: TRADES and MART: weight of the robust term; FGSM-PGI: of the difference to the outputs at the start.
        tau: FAT and F+: steps granted after an example is misclassified.
        start: Where the perturbation starts: zero, uniform, normal, bernoulli or jitter.
        persistent: Carry the perturbation from batch to batch, as FREE originally does.
        compact: FAT and F+: shrink the batch to the examples that still move, instead of masking the others.
        space: Where l_X is measured: "pixel" or "normalised".
        g_weight: G+ and GradAlign: weight of the gradient penalty.
        g_step: G+: step of its finite difference, in units of eps.
        g_form: G+: "gradient" or "curvature", with the other settings at the defaults of the form.
        awp_gamma: AWP+: length of the weights' step, relative to the norm of each tensor.
        awp_warmup: AWP+: epochs at the beginning without it.

    Returns:
        The changed method.

    Raises:
        UsageError: If the method does not have a setting, or a value is not accepted.

    Example:
        >>> deat.configure_method("m+deat", "linf:8/255", gamma=1.1, alpha=12 / 255)
    """
    method = get_method(method)
    _check_values(method, beta, tau, start, space)
    schedule = {
        "gamma": gamma,
        "max_steps": max_steps,
        "alpha_eps": None if alpha is None else _to_units_of_eps(alpha, threat),
        "stretch_eps": None if alpha is None else 0.0,
        "stop_threshold": None if tau is None else float(tau),
    }
    method = _replace_settings(
        method, "schedule", schedule, "gamma belongs to m+ methods, max_steps to those that change k, such as m+deat"
    )
    method = _replace_penalty(method, g_form, {"weight": g_weight, "step": g_step})
    method = _replace_perturbation(method, {"gamma": awp_gamma, "warmup": awp_warmup})
    method = _replace_settings(method, "probe", {"space": space}, "")
    method = _replace_settings(method, "objective", {"beta": beta}, "beta belongs to trades, mart and fgsm-pgi")
    return _replace_settings(method, "attack", {"start": start, "persistent": persistent, "compact": compact}, "")


def _check_values(method: Method, beta: float | None, tau: int | None, start: str | None, space: str | None) -> None:
    """Refuse values that no method takes. The part that a setting belongs to checks the others."""
    if beta is not None:
        check_number("beta", beta, lambda v: v >= 0, ">= 0")
    if tau is not None:
        check_int("tau", tau, 0)
        if not isinstance(method.attack.freeze, StopWhenFooled):
            raise UsageError(f"tau belongs to methods that stop early, such as fat-K and f+trades, not {method.name}.")
    if start is not None and start not in START_KINDS:
        raise unknown_name_error("start", start, START_KINDS)
    if space is not None and space not in PROBE_SPACES:
        raise unknown_name_error("space", space, PROBE_SPACES)


def _replace_settings(method: Method, part_name: str, values: dict[str, Any], hint: str) -> Method:
    changes = {name: to_python_number(value) for name, value in values.items() if value is not None}
    if not changes:
        return method
    part = getattr(method, part_name)
    known = {f.name for f in fields(part)} if is_dataclass(part) else set()
    for name in changes:
        if name not in known:
            raise UsageError(f"{method.name} has no setting {name!r}: {hint}.")
    return replace(method, **{part_name: replace(part, **changes)})


def _replace_penalty(method: Method, form: str | None, values: dict[str, Any]) -> Method:
    changes = {name: to_python_number(value) for name, value in values.items() if value is not None}
    if form is None and not changes:
        return method
    part = find_play(method.play, PenaliseGradient)
    if part is None:
        raise UsageError(
            f"{method.name} has no gradient penalty: g_form, g_weight and g_step belong to g+ methods, such as g+{method.name}."
        )
    if not isinstance(part.penalty, GradientPenalty) and (form is not None or changes.keys() - {"weight"}):
        raise UsageError(
            f"the penalty of {method.name} has a weight (g_weight) alone: g_form and g_step belong to g+ methods."
        )
    if form is not None and form not in DEFAULT_PENALTIES:
        raise unknown_name_error("g_form", form, DEFAULT_PENALTIES)
    penalty: Any = replace(DEFAULT_PENALTIES[form] if form else cast(Any, part.penalty), **changes)
    return replace(method, play=replace_play(method.play, part, replace(part, penalty=penalty)))


def _replace_perturbation(method: Method, values: dict[str, Any]) -> Method:
    changes = {name: to_python_number(value) for name, value in values.items() if value is not None}
    if not changes:
        return method
    part = find_play(method.play, PerturbWeights)
    if part is None:
        raise UsageError(
            f"{method.name} does not perturb its weights: awp_gamma and awp_warmup belong to awp+ methods, such as "
            f"awp+{method.name}."
        )
    perturbation = replace(part.perturbation, **changes)
    return replace(method, play=replace_play(method.play, part, replace(part, perturbation=perturbation)))


def check_alpha(alpha: float, threat: ThreatModel) -> None:
    """Refuse an Linf step size above 1, which is most likely meant in units of 1/255.

    Args:
        alpha: Absolute step size.
        threat: Threat model.

    Raises:
        UsageError: If the step crosses a whole image.
    """
    if isinstance(threat, Linf) and alpha > 1:
        suggestion = f"{alpha:g}/255" if alpha <= 255 else "2/255"
        raise UsageError(
            f"alpha {alpha:g} is a step across all of an image, whose pixels are in [0, 1]: write {suggestion}."
        )


def _to_units_of_eps(alpha: float, threat_spec: str | ThreatModel | None) -> float:
    if threat_spec is None:
        raise UsageError(
            f"alpha {alpha!r} is absolute and needs the threat: deat.configure_method(method, threat, alpha=...)."
        )
    threat = parse_threat(threat_spec)
    if len(threat.balls) > 1:
        raise UsageError(
            f"alpha {alpha!r} is one length, and the balls of a union have radii of their own: the method's step size is a "
            "share of each of them. Leave alpha out, or change the method's schedule: alpha_eps, in units of the radius."
        )
    check_alpha(alpha, threat)
    if not 0 <= alpha <= MAX_ALPHA or threat.eps == 0:
        raise UsageError(
            f"alpha must be a step size from 0 to {MAX_ALPHA:g}, such as 2/255, in a ball of radius > 0, not {alpha!r} "
            f"at eps {threat.eps}."
        )
    return alpha / threat.eps
