"""What the attacks left, held side by side: what is stronger by its making must not leave more."""

from itertools import permutations
from typing import TYPE_CHECKING, Any

from deat.evaluation.sanity.flags import Flag, raised, slack

if TYPE_CHECKING:
    from deat.evaluation.results import Evaluation


def compare(found: "Evaluation") -> list[Flag]:
    """Flags about the attacks' results, from the results alone."""
    checks = (_invalid, _one_sided_sample, _one_step_wins, _one_start_wins, _ensemble_loses, _black_box_wins)
    return [flag for check in checks if (flag := check(found)) is not None]


def _invalid(found: "Evaluation") -> Flag | None:
    bad = {r.name: r.invalid for r in found.results if r.invalid}
    if not bad:
        return None
    listed = ", ".join(f"{name}: {count}" for name, count in bad.items())
    return raised("invalid_examples", f"examples outside the ball or the box, or not finite ({listed})")


def _one_sided_sample(found: "Evaluation") -> Flag | None:
    shown, classes = len(set(found.labels)), len(found.classes)
    if not found.settings.get("sample") or len(found.labels) < 10 * classes or 2 * shown > classes:
        return None
    return raised("one_sided_sample", f"the first {len(found.labels):,} images show {shown} of {classes} classes")


def _one_step_wins(found: "Evaluation") -> Flag | None:
    """One step against several on the same loss, since an attack on another may hide that they fail."""
    settings = _settings(found)
    one = [name for name, s in settings.items() if s.get("steps") == 1]
    several = [name for name, s in settings.items() if s.get("steps", 0) > 1]
    same_loss = [name for name in several if settings[name].get("loss") == "ce"]
    return _beats(found, one, same_loss or several, "one_step_wins")


def _one_start_wins(found: "Evaluation") -> Flag | None:
    """An attack against the same one with more restarts."""
    settings = {name: s for name, s in _settings(found).items() if "restarts" in s}
    for few, many in permutations(settings, 2):
        alike = _but_for_restarts(settings[few]) == _but_for_restarts(settings[many])
        if alike and settings[few]["restarts"] < settings[many]["restarts"]:
            flag = _beats(found, [few], [many], "one_start_wins")
            if flag:
                return flag
    return None


def _but_for_restarts(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in ("name", "restarts")}


def _ensemble_loses(found: "Evaluation") -> Flag | None:
    """An ensemble against attacks by the gradient, which several of its parts are, and against its parts alone."""
    settings = _settings(found)
    ours = [name for name, s in settings.items() if s.get("steps", 0) > 0 and "kind" not in s]
    for whole, parts in ((name, _parts(s)) for name, s in settings.items() if len(_parts(s)) > 1):
        alone = [name for name, s in settings.items() if len(_parts(s)) == 1 and _parts(s)[0] in parts]
        flag = _beats(found, [*ours, *alone], [whole], "ensemble_loses")
        if flag:
            return flag
    return None


def _black_box_wins(found: "Evaluation") -> Flag | None:
    settings = _settings(found)
    black = [name for name, s in settings.items() if _parts(s) == ["square"]]
    white = [name for name, s in settings.items() if "square" not in _parts(s) and s.get("steps", 2) > 1]
    return _beats(found, black, white, "black_box_wins") or _last_part_wins(found)


def _last_part_wins(found: "Evaluation") -> Flag | None:
    """Within an ensemble Square comes last, so that what it fells, parts that follow the gradient have left."""
    allowed = slack(len(found.labels))
    for r in found.results:
        fell = r.felled.get("square", 0) if list(r.felled)[-1:] == ["square"] else 0
        if fell / len(found.labels) > allowed:
            return raised("black_box_wins", f"square felled {fell} images that {r.name}'s other parts had left")
    return None


def _beats(found: "Evaluation", weak: list[str], strong: list[str], name: str) -> Flag | None:
    if not weak or not strong or found.settings["cascade"]:
        return None
    share = {key: found.accuracy[key] for key in (*weak, *strong)}
    one, other = min(weak, key=share.__getitem__), min(strong, key=share.__getitem__)
    if share[one] + slack(len(found.labels)) >= share[other]:
        return None
    return raised(name, f"{one} leaves {share[one]:.1%}, less than the {share[other]:.1%} that {other} leaves")


def _settings(found: "Evaluation") -> dict[str, dict[str, Any]]:
    """The settings of every attack but the one that is none."""
    held = {r.name: found.settings["attacks"][r.name] for r in found.results}
    return {name: s for name, s in held.items() if not _is_natural(s)}


def _is_natural(settings: dict[str, Any]) -> bool:
    return "kind" not in settings and settings.get("steps") == 0 and settings.get("start") == "zero"


def _parts(settings: dict[str, Any]) -> list[str]:
    return list(settings.get("parts", ()))
