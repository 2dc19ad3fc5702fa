"""Checks of the attacks' results against each other: the accuracy under a stronger attack must not be higher."""

from itertools import permutations
from typing import TYPE_CHECKING, Any

from deat.evaluation.sanity.flag_advice import Flag, accuracy_tolerance, make_flag

if TYPE_CHECKING:
    from deat.evaluation.results import Evaluation


def check_consistency(evaluation: "Evaluation") -> list[Flag]:
    """Check the results of an evaluation without running anything.

    Args:
        evaluation: The results. Accuracies of a cascade are not compared, because its attacks did not see all images.

    Returns:
        The flags raised.
    """
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
    counts = [f"{result.name}: {result.invalid}" for result in evaluation.results if result.invalid]
    if not counts:
        return None
    return make_flag("invalid_examples", f"examples outside the ball or the box, or not finite ({', '.join(counts)})")


def _flag_one_sided_sample(evaluation: "Evaluation") -> Flag | None:
    n, num_shown, num_classes = evaluation.num_images, len(set(evaluation.labels)), len(evaluation.classes)
    if (
        not evaluation.labels
        or not evaluation.settings.get("sample")
        or n < 10 * num_classes
        or 2 * num_shown > num_classes
    ):
        return None
    return make_flag(
        "one_sided_sample", f"the first {n:,} {evaluation.inputs_noun} show {num_shown} of {num_classes} classes"
    )


def _flag_one_step_wins(evaluation: "Evaluation") -> Flag | None:
    """Compare attacks of one step with those of several steps on cross-entropy, or on any loss if there are none.

    An attack on another loss may be strong even where steps along the gradient of cross-entropy fail.
    """
    settings = _attack_settings(evaluation)
    one_step = [name for name, s in settings.items() if s.get("steps") == 1]
    several_steps = [name for name, s in settings.items() if s.get("steps", 0) > 1]
    same_loss = [name for name in several_steps if settings[name].get("loss") == "ce"]
    return _flag_if_weaker_wins(evaluation, one_step, same_loss or several_steps, "one_step_wins")


def _flag_one_start_wins(evaluation: "Evaluation") -> Flag | None:
    """Compare each attack with the same attack with more restarts."""
    settings = {name: s for name, s in _attack_settings(evaluation).items() if "restarts" in s}
    for fewer, more in permutations(settings, 2):
        same_attack = _without_restarts(settings[fewer]) == _without_restarts(settings[more])
        if same_attack and settings[fewer]["restarts"] < settings[more]["restarts"]:
            flag = _flag_if_weaker_wins(evaluation, [fewer], [more], "one_start_wins")
            if flag:
                return flag
    return None


def _without_restarts(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in ("name", "restarts")}


def _flag_ensemble_loses(evaluation: "Evaluation") -> Flag | None:
    """Compare an ensemble with deat's own gradient attacks, which several of its parts resemble, and with its parts."""
    settings = _attack_settings(evaluation)
    parts = {name: _autoattack_parts(s) for name, s in settings.items()}
    own_attacks = [name for name, s in settings.items() if s.get("steps", 0) > 0 and "kind" not in s]
    for ensemble in (name for name in parts if len(parts[name]) > 1):
        single_parts = [name for name in parts if len(parts[name]) == 1 and parts[name][0] in parts[ensemble]]
        flag = _flag_if_weaker_wins(evaluation, [*own_attacks, *single_parts], [ensemble], "ensemble_loses")
        if flag:
            return flag
    return None


def _flag_black_box_wins(evaluation: "Evaluation") -> Flag | None:
    settings = _attack_settings(evaluation)
    parts = {name: _autoattack_parts(s) for name, s in settings.items()}
    black_box = [name for name in settings if parts[name] == ["square"]]
    white_box = [name for name, s in settings.items() if "square" not in parts[name] and s.get("steps", 2) > 1]
    return _flag_if_weaker_wins(evaluation, black_box, white_box, "black_box_wins") or _flag_square_wins_last(
        evaluation
    )


def _flag_square_wins_last(evaluation: "Evaluation") -> Flag | None:
    """Check how many images only Square fools, which comes last in an ensemble, after the parts with gradients."""
    n = evaluation.num_images
    for result in evaluation.results:
        fooled = result.num_fooled_by_stage["square"] if list(result.num_fooled_by_stage)[-1:] == ["square"] else 0
        if fooled / n > accuracy_tolerance(n):
            return make_flag(
                "black_box_wins",
                f"square fooled {fooled} {evaluation.inputs_noun} that {result.name}'s other parts did not",
            )
    return None


def _flag_if_weaker_wins(evaluation: "Evaluation", weaker: list[str], stronger: list[str], name: str) -> Flag | None:
    """The flag of that name if the best weaker attack leaves a lower accuracy than the best stronger one."""
    if not weaker or not stronger or evaluation.settings["cascade"]:
        return None
    accuracy = _comparable_accuracies(evaluation)
    weak, strong = min(weaker, key=accuracy.__getitem__), min(stronger, key=accuracy.__getitem__)
    if accuracy[weak] + accuracy_tolerance(evaluation.num_images) >= accuracy[strong]:
        return None
    return make_flag(
        name, f"accuracy is {accuracy[weak]:.1%} under {weak}, below {accuracy[strong]:.1%} under {strong}"
    )


def _comparable_accuracies(evaluation: "Evaluation") -> dict[str, float]:
    """The accuracies that attacks lower, as shares: for answers with grades the mean score or, where that has no bound,
    the share of right answers."""
    task = evaluation.task
    if not task.is_graded:
        return evaluation.accuracy
    values = evaluation.scores if task.worst_score == 0 else evaluation.verdicts
    return {name: sum(column) / len(column) for name, column in values.items()}


def _attack_settings(evaluation: "Evaluation") -> dict[str, dict[str, Any]]:
    """The settings of every attack but the one that does nothing, by its name."""
    settings = {result.name: evaluation.settings["attacks"][result.name] for result in evaluation.results}
    return {name: s for name, s in settings.items() if not _is_natural_settings(s)}


def _is_natural_settings(settings: dict[str, Any]) -> bool:
    return "kind" not in settings and settings.get("steps") == 0 and settings.get("start") == "zero"


def _autoattack_parts(settings: dict[str, Any]) -> list[str]:
    return list(settings.get("parts", ()))
