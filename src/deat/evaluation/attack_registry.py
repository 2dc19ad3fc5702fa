"""Attacks by name, our own and AutoAttack's, and their settings as a record keeps them."""

from collections.abc import Iterable
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from deat.errors import UsageError, unknown_name_error
from deat.evaluation.attacks import ATTACK_FAMILIES, ATTACK_NAME_HINT, Attack, parse_attack
from deat.evaluation.autoattack import AUTOATTACK_PARTS, AutoAttack
from deat.evaluation.judge import AttackLike
from deat.threat import ThreatModel

AUTOATTACK_PASSES = {"apgd-ce": 100, "apgd-t": 500, "fab-t": 900, "square": 2500}
"""An image's passes through each part of AutoAttack, where half of the images fall early."""
ATTACK_NAMES = (*ATTACK_FAMILIES, *AUTOATTACK_PARTS, "aa")


def get_attack(name: str | AttackLike) -> AttackLike:
    """The attack of that name: natural, fgsm, pgd-N, cw-N, apgd-ce, apgd-t, fab-t, square or aa."""
    if not isinstance(name, str):
        return name
    text = name.strip().lower()
    if text == "aa":
        return AutoAttack()
    if text in AUTOATTACK_PARTS:
        return AutoAttack(text, (text,))
    try:
        return parse_attack(text)
    except UsageError:
        raise unknown_name_error(
            "attack", name, (known.replace("N", "20") for known in ATTACK_NAMES), ATTACK_NAME_HINT
        ) from None


def get_attacks(attacks: str | AttackLike | Iterable[str | AttackLike]) -> list[AttackLike]:
    """Attacks in their order; one text may name several between commas, as on the command line."""
    names = [name for name in attacks.split(",") if name.strip()] if isinstance(attacks, str) else attacks
    found = [get_attack(name) for name in (names if isinstance(names, Iterable) else [names])]
    for how in found:
        if not callable(how) or not isinstance(getattr(how, "name", None), str):
            raise UsageError(f"{how!r} is no attack; give a name, such as pgd-20, or something to call that has one.")
    return found


def describe_attack(attack: AttackLike, threat: ThreatModel, num_classes: int = 10) -> dict[str, Any]:
    """An attack's settings, its step size absolute."""
    if isinstance(attack, AutoAttack):
        return attack.describe(threat, num_classes)
    if isinstance(attack, Attack):
        own = {} if type(attack) is Attack else {"kind": type(attack).__name__}
        return {**asdict(attack), "alpha": attack.alpha * threat.eps, **own}
    held = {f.name: getattr(attack, f.name) for f in fields(attack)} if is_dataclass(attack) else {"name": attack.name}
    plain = {key: value for key, value in held.items() if isinstance(value, str | int | float | None)}
    return {**plain, "kind": type(attack).__name__}


def estimate_passes(attack: AttackLike) -> int:
    """About how many times an attack passes an image through a robust model, half of the images falling early."""
    if isinstance(attack, AutoAttack):
        return sum(AUTOATTACK_PASSES[part] for part in attack.parts)
    return attack.steps * attack.restarts if isinstance(attack, Attack) else 0
