"""What the attacks left, held side by side: what is stronger by its making must not leave more."""

from itertools import permutations
from typing import TYPE_CHECKING, Any

from deat.evaluation.sanity.flags import Flag, accuracy_tolerance, make_flag

if TYPE_CHECKING:
    from deat.evaluation.results import Evaluation


def check_consistency(evaluation: "Evaluation") -> list[Flag]:
    """Flags about the attacks' results, from the results alone."""
    checks = (
        _flag_invalid_examples,
        _flag_one_sided_sample,
        _flag_one_step_wins,
        _flag_one_start_wins,
        _flag_ensemble_loses,
        _flag_black_box_wins,
    )
    return [flag for check in checks if (flag := check(evaluation)) is not None]


def _flag_invalid_examples(evaluation: "Evaluation") -> Flag | None:
    bad = {r.name: r.invalid for r in evaluation.results if r.invalid}
    if not bad:
        return None
    listed = ", ".join(f"{name}: {count}" for name, count in bad.items())
    return make_flag("invalid_examples", f"examples outside the ball or the box, or not finite ({listed})")


def _flag_one_sided_sample(evaluation: "Evaluation") -> Flag | None:
    shown, classes = len(set(evaluation.labels)), len(evaluation.classes)
    if not evaluation.settings.get("sample") or len(evaluation.labels) < 10 * classes or 2 * shown > classes:
        return None
    return make_flag(
        "one_sided_sample", f"the first {len(evaluation.labels):,} images show {shown} of {classes} classes"
    )


def _flag_one_step_wins(evaluation: "Evaluation") -> Flag | None:
    """One step against several on the same loss, since an attack on another may hide that they fail."""
    settings = _attack_settings(evaluation)
    one = [name for name, s in settings.items() if s.get("steps") == 1]
    several = [name for name, s in settings.items() if s.get("steps", 0) > 1]
    same_loss = [name for name in several if settings[name].get("loss") == "ce"]
    return _flag_if_weaker_wins(evaluation, one, same_loss or several, "one_step_wins")


def _flag_one_start_wins(evaluation: "Evaluation") -> Flag | None:
    """An attack against the same one with more restarts."""
    settings = {name: s for name, s in _attack_settings(evaluation).items() if "restarts" in s}
    for few, many in permutations(settings, 2):
        alike = _without_restarts(settings[few]) == _without_restarts(settings[many])
        if alike and settings[few]["restarts"] < settings[many]["restarts"]:
            flag = _flag_if_weaker_wins(evaluation, [few], [many], "one_start_wins")
            if flag:
                return flag
    return None


def _without_restarts(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in ("name", "restarts")}


def _flag_ensemble_loses(evaluation: "Evaluation") -> Flag | None:
    """An ensemble against attacks by the gradient, which several of its parts are, and against its parts alone."""
    settings = _attack_settings(evaluation)
    ours = [name for name, s in settings.items() if s.get("steps", 0) > 0 and "kind" not in s]
    for whole, parts in ((name, _autoattack_parts(s)) for name, s in settings.items() if len(_autoattack_parts(s)) > 1):
        alone = [
            name for name, s in settings.items() if len(_autoattack_parts(s)) == 1 and _autoattack_parts(s)[0] in parts
        ]
        flag = _flag_if_weaker_wins(evaluation, [*ours, *alone], [whole], "ensemble_loses")
        if flag:
            return flag
    return None


def _flag_black_box_wins(evaluation: "Evaluation") -> Flag | None:
    settings = _attack_settings(evaluation)
    black = [name for name, s in settings.items() if _autoattack_parts(s) == ["square"]]
    white = [name for name, s in settings.items() if "square" not in _autoattack_parts(s) and s.get("steps", 2) > 1]
    return _flag_if_weaker_wins(evaluation, black, white, "black_box_wins") or _flag_square_wins_last(evaluation)


def _flag_square_wins_last(evaluation: "Evaluation") -> Flag | None:
    """Within an ensemble Square comes last, so that what it fells, parts that follow the gradient have left."""
    allowed = accuracy_tolerance(len(evaluation.labels))
    for r in evaluation.results:
        fell = r.felled.get("square", 0) if list(r.felled)[-1:] == ["square"] else 0
        if fell / len(evaluation.labels) > allowed:
            return make_flag("black_box_wins", f"square felled {fell} images that {r.name}'s other parts had left")
    return None


def _flag_if_weaker_wins(evaluation: "Evaluation", weak: list[str], strong: list[str], name: str) -> Flag | None:
    if not weak or not strong or evaluation.settings["cascade"]:
        return None
    share = {key: evaluation.accuracy[key] for key in (*weak, *strong)}
    one, other = min(weak, key=share.__getitem__), min(strong, key=share.__getitem__)
    if share[one] + accuracy_tolerance(len(evaluation.labels)) >= share[other]:
        return None
    return make_flag(name, f"{one} leaves {share[one]:.1%}, less than the {share[other]:.1%} that {other} leaves")


def _attack_settings(evaluation: "Evaluation") -> dict[str, dict[str, Any]]:
    """The settings of every attack but the one that is none."""
    held = {r.name: evaluation.settings["attacks"][r.name] for r in evaluation.results}
    return {name: s for name, s in held.items() if not _is_natural_settings(s)}


def _is_natural_settings(settings: dict[str, Any]) -> bool:
    return "kind" not in settings and settings.get("steps") == 0 and settings.get("start") == "zero"


def _autoattack_parts(settings: dict[str, Any]) -> list[str]:
    return list(settings.get("parts", ()))
