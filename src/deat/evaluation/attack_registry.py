"""Attacks by name, deat's own and AutoAttack's, and their settings for records."""

from collections.abc import Iterable
from dataclasses import asdict, fields, is_dataclass
from typing import Any, cast

from deat.errors import UsageError, unknown_name_error
from deat.evaluation.attack_verifier import AttackLike
from deat.evaluation.attacks import (
    ATTACK_FAMILIES,
    ATTACK_NAME_HINT,
    AUTOATTACK_NAMES,
    AUTOATTACK_PARTS,
    Attack,
    as_evaluated,
    parse_attack,
)
from deat.evaluation.autoattack import AutoAttack
from deat.threat import ThreatModel
from deat.utils.plugins import load_plugins

AUTOATTACK_PASSES = {"apgd-ce": 100, "apgd-t": 500, "fab-t": 900, "square": 2500}
"""Passes of an image through each part of AutoAttack, where half of the images are fooled early."""
PLUGIN_GROUP = "deat.attacks"
_PLUGINS: dict[str, AttackLike] = {}
ATTACK_NAMES = (*ATTACK_FAMILIES, *AUTOATTACK_PARTS, "aa")


def get_attack(name: str | AttackLike) -> AttackLike:
    """Return the attack of a name.

    Args:
        name: natural, fgsm, pgd-N, cw-N, apgd-ce, apgd-t, fab-t, square or aa, which "AutoAttack" means, too. Anything
            else than text is returned as it is.

    Returns:
        The attack.

    Raises:
        UsageError: If no attack has this name.
    """
    if not isinstance(name, str):
        return name
    text = name.strip().lower()
    if text in AUTOATTACK_NAMES:
        return AutoAttack()
    if text in AUTOATTACK_PARTS:
        return AutoAttack(text, (text,))
    try:
        return parse_attack(text)
    except UsageError:
        plugins = list_attack_plugins()
        if text in plugins:
            return plugins[text]
        known_names = [known.replace("N", "20") for known in ATTACK_NAMES]
        raise unknown_name_error("attack", name, [*known_names, *plugins], ATTACK_NAME_HINT) from None


def list_attack_plugins() -> dict[str, AttackLike]:
    """Return the attacks of installed plugins by their names."""
    load_plugins(PLUGIN_GROUP, _add_plugin)
    return dict(_PLUGINS)


def _add_plugin(name: str, value: object, origin: str) -> None:
    """Register the attack of an entry point under its name; a name that is taken is refused."""
    if name != name.lower() or "," in name or name == "worst":
        raise UsageError("its name must be in lower case, without commas, and not 'worst'.")
    attack = value if hasattr(value, "name") and not isinstance(value, type) else value() if callable(value) else value
    if not callable(attack) or getattr(attack, "name", None) != name:
        raise UsageError(f"it is {attack!r}, and not an attack whose name is {name!r}.")
    if name in _PLUGINS or name in (*AUTOATTACK_PARTS, *AUTOATTACK_NAMES) or _is_own_name(name):
        raise UsageError(f"the name {name} is taken by deat or another package.")
    _PLUGINS[name] = cast(AttackLike, attack)


def _is_own_name(name: str) -> bool:
    try:
        parse_attack(name)
    except UsageError:
        return False
    return True


def get_attacks(attacks: str | AttackLike | Iterable[str | AttackLike]) -> list[AttackLike]:
    """Return several attacks in their order, as evaluations run them.

    Args:
        attacks: Names or attacks, or one text with names between commas.

    Returns:
        The attacks.

    Raises:
        UsageError: If a name is unknown, or something is no attack.
    """
    names = [name for name in attacks.split(",") if name.strip()] if isinstance(attacks, str) else attacks
    chosen = [get_attack(name) for name in (names if isinstance(names, Iterable) else [names])]
    for attack in chosen:
        if not callable(attack) or not isinstance(getattr(attack, "name", None), str):
            raise UsageError(f"{attack!r} is no attack. Give a name, such as pgd-20, or a callable that has a name.")
    return [as_evaluated(attack) for attack in chosen]


def describe_attack(attack: AttackLike, threat: ThreatModel, num_classes: int = 10) -> dict[str, Any]:
    """Describe an attack's settings for a record.

    Args:
        attack: The attack.
        threat: Threat model, which makes the step size absolute.
        num_classes: Number of the model's outputs.

    Returns:
        The settings as JSON values.
    """
    attack = as_evaluated(attack)
    if isinstance(attack, AutoAttack):
        return attack.describe(threat, num_classes)
    if isinstance(attack, Attack):
        kind = {} if type(attack) is Attack else {"kind": type(attack).__name__}
        return {**asdict(attack), "alpha": attack.alpha * threat.eps, **kind}
    settings = (
        {f.name: getattr(attack, f.name) for f in fields(attack)} if is_dataclass(attack) else {"name": attack.name}
    )
    json_values = {key: value for key, value in settings.items() if isinstance(value, str | int | float | None)}
    return {**json_values, "kind": type(attack).__name__}


def estimate_passes(attack: AttackLike) -> int:
    """Estimate how often an attack passes an image through a robust model, half of the images being fooled early.

    Args:
        attack: The attack.

    Returns:
        The number of passes; 0 where it is not known.
    """
    if isinstance(attack, AutoAttack):
        return sum(AUTOATTACK_PASSES[part] for part in attack.parts)
    return attack.steps * attack.restarts if isinstance(attack, Attack) else 0
