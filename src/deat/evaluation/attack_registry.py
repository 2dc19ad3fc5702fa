"""Attacks by name, our own and AutoAttack's, and their settings as a record keeps them."""

from collections.abc import Iterable
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from deat.errors import UsageError, unknown
from deat.evaluation.attacks import FAMILIES, HINT, Attack, attack
from deat.evaluation.autoattack import PARTS, AutoAttack
from deat.evaluation.judge import Attacker
from deat.threat import ThreatModel

PASSES = {"apgd-ce": 100, "apgd-t": 500, "fab-t": 900, "square": 2500}
"""An image's passes through each part of AutoAttack, where half of the images fall early."""
KNOWN = (*FAMILIES, *PARTS, "aa")


def attacker(name: str | Attacker) -> Attacker:
    """The attack of that name: natural, fgsm, pgd-N, cw-N, apgd-ce, apgd-t, fab-t, square or aa."""
    if not isinstance(name, str):
        return name
    text = name.strip().lower()
    if text == "aa":
        return AutoAttack()
    if text in PARTS:
        return AutoAttack(text, (text,))
    try:
        return attack(text)
    except UsageError:
        raise unknown("attack", name, (known.replace("N", "20") for known in KNOWN), HINT) from None


def attackers(asked: str | Attacker | Iterable[str | Attacker]) -> list[Attacker]:
    """Attacks in their order; one text may name several between commas, as on the command line."""
    names = [name for name in asked.split(",") if name.strip()] if isinstance(asked, str) else asked
    found = [attacker(name) for name in (names if isinstance(names, Iterable) else [names])]
    for how in found:
        if not callable(how) or not isinstance(getattr(how, "name", None), str):
            raise UsageError(f"{how!r} is no attack; give a name, such as pgd-20, or something to call that has one.")
    return found


def describe(how: Attacker, threat: ThreatModel, num_classes: int = 10) -> dict[str, Any]:
    """An attack's settings, its step size absolute."""
    if isinstance(how, AutoAttack):
        return how.describe(threat, num_classes)
    if isinstance(how, Attack):
        own = {} if type(how) is Attack else {"kind": type(how).__name__}
        return {**asdict(how), "alpha": how.alpha * threat.eps, **own}
    held = {f.name: getattr(how, f.name) for f in fields(how)} if is_dataclass(how) else {"name": how.name}
    plain = {key: value for key, value in held.items() if isinstance(value, str | int | float | None)}
    return {**plain, "kind": type(how).__name__}


def passes(how: Attacker) -> int:
    """About how many times an attack passes an image through a robust model, half of the images falling early."""
    if isinstance(how, AutoAttack):
        return sum(PASSES[part] for part in how.parts)
    return how.steps * how.restarts if isinstance(how, Attack) else 0
