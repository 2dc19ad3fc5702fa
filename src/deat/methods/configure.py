"""Single settings of a method changed by hand; a setting that the method does not have is refused."""

from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args, get_type_hints

from deat.core.inner_attack import Friendly
from deat.core.moves import MagnitudeProbe
from deat.errors import UsageError, unknown_name_error
from deat.methods.method import Method
from deat.methods.registry import get_method
from deat.threat import START_KINDS, Linf, ThreatModel, parse_threat
from deat.utils.numbers import check_int, check_number, to_python_number

PROBE_SPACES = get_args(get_type_hints(MagnitudeProbe)["space"])
MAX_ALPHA = 1e6
"""A step no image is large enough for."""


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
) -> Method:
    """The method, or that of a name, with these settings; None leaves one as it is.

    alpha is absolute, as the eps of the threat is, which it needs, and then the same at every k. space is where l_X is
    measured.
    """
    method = get_method(method)
    _check_values(method, beta, tau, start, space)
    schedule = {
        "gamma": gamma,
        "max_steps": max_steps,
        "alpha": None if alpha is None else _to_units_of_eps(alpha, threat),
        "stretch": None if alpha is None else 0.0,
        "level": None if tau is None else float(tau),
    }
    method = _replace_settings(method, "schedule", schedule, "gamma and max_steps belong to m+ methods, such as m+deat")
    method = _replace_settings(method, "probe", {"space": space}, "")
    method = _replace_settings(method, "objective", {"beta": beta}, "beta belongs to trades and mart")
    return _replace_settings(method, "attack", {"start": start, "persistent": persistent, "compact": compact}, "")


def _check_values(method: Method, beta: float | None, tau: int | None, start: str | None, space: str | None) -> None:
    """Refuse values that no method takes; the others are checked by the part that they belong to."""
    if beta is not None:
        check_number("beta", beta, lambda v: v >= 0, ">= 0")
    if tau is not None:
        check_int("tau", tau, 0)
        if not isinstance(method.attack.freeze, Friendly):
            raise UsageError(f"tau belongs to methods that stop early, such as fat-K and f+trades, not {method.name}.")
    if start is not None and start not in START_KINDS:
        raise unknown_name_error("start", start, START_KINDS)
    if space is not None and space not in PROBE_SPACES:
        raise unknown_name_error("space", space, PROBE_SPACES)


def _replace_settings(method: Method, part: str, values: dict[str, Any], hint: str) -> Method:
    given = {name: to_python_number(value) for name, value in values.items() if value is not None}
    if not given:
        return method
    held = getattr(method, part)
    known = {f.name for f in fields(held)} if is_dataclass(held) else set()
    for name in given:
        if name not in known:
            raise UsageError(f"{method.name} has no setting {name!r}: {hint}.")
    return replace(method, **{part: replace(held, **given)})


def check_alpha(alpha: float, threat: ThreatModel) -> None:
    """Refuse a step that crosses a whole image, as whoever counts pixels from 0 to 255 would write it."""
    if isinstance(threat, Linf) and alpha > 1:
        meant = f"{alpha:g}/255" if alpha <= 255 else "2/255"
        raise UsageError(
            f"alpha {alpha:g} is a step across all of an image, whose pixels are in [0, 1]: write {meant}."
        )


def _to_units_of_eps(alpha: float, threat_spec: str | ThreatModel | None) -> float:
    if threat_spec is None:
        raise UsageError(
            f"alpha {alpha!r} needs the threat that it is a step in: deat.configure_method(method, threat, alpha=...)."
        )
    threat = parse_threat(threat_spec)
    check_alpha(alpha, threat)
    if not 0 <= alpha <= MAX_ALPHA or threat.eps == 0:
        raise UsageError(
            f"alpha must be a step size from 0 to {MAX_ALPHA:g}, such as 2/255, in a ball of radius > 0, not {alpha!r} "
            f"at eps {threat.eps}."
        )
    return alpha / threat.eps
