"""Which of a run's evaluations a report shows: the strongest, with those of the same images combined into it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deat.errors import DataError
from deat.evaluation.results import WORST_ONLY, AttackResult, Evaluation, load_evaluation
from deat.runs.record_files import EXTRA_EVALUATION_FILES

ATTACKS_BY_STRENGTH = ("fgsm", "square", "pgd", "apgd-ce", "cw", "fab-t", "apgd-t", "aa")
"""Prefixes of attacks' names, from weak to strong."""
EVALUATION_PATTERN = re.compile(r"evaluation(-(.+))?\.json")


@dataclass(frozen=True)
class StoredEvaluation:
    """One evaluation in a run's folder.

    Attributes:
        file: The name of its file.
        evaluation: The evaluation.
        use: What the report does with it.
    """

    file: str
    evaluation: Evaluation
    use: str = ""


@dataclass(frozen=True)
class ChosenEvaluations:
    """A run's evaluations as a report uses them.

    Attributes:
        main: The evaluation whose accuracies the report shows; several files may be combined in it.
        extra: Other evaluations by their key in `EXTRA_EVALUATION_FILES`.
        stored: Every evaluation in the folder, with what is done with it.
    """

    main: Evaluation | None
    extra: dict[str, Evaluation]
    stored: tuple[StoredEvaluation, ...]


def load_stored_evaluations(folder: Path) -> list[StoredEvaluation]:
    """Load every evaluation in a run's folder, the newest of evaluation.json and its copies first.

    Raises:
        DataError: A file is damaged, or deat did not write it.
    """
    names = [path.name for path in folder.glob("evaluation*.json") if path.is_file()]
    stored = []
    for name in sorted(filter(EVALUATION_PATTERN.fullmatch, names), key=_age):
        evaluation = load_evaluation(folder / name)
        if not evaluation.results:
            raise DataError(f"{str(folder / name)!r} holds no attack. Remove it and evaluate again.")
        stored.append(StoredEvaluation(name, evaluation))
    return stored


def choose_evaluations(stored: Sequence[StoredEvaluation], record: dict[str, Any] | None) -> ChosenEvaluations:
    """Choose the strongest evaluation of a run, and combine those of the same weights, images and radius.

    An evaluation of the run's best epoch, own radius and own data is preferred; then one with a worst case, with more
    images, with a stronger attack, the newer one. What another one has in addition is not lost: its attacks count in
    the worst case if the images are the same, and AutoAttack on fewer images and the last epoch are shown beside.

    Args:
        stored: Every evaluation, the newest first.
        record: The run's run.json, if there is one.

    Returns:
        The evaluation to show, those beside it, and what is done with each file.
    """
    extra = {key: one.evaluation for key, name in EXTRA_EVALUATION_FILES.items() for one in stored if one.file == name}
    candidates = [one for one in stored if one.file not in EXTRA_EVALUATION_FILES.values()]
    main = max(candidates, key=lambda one: _rank(one.evaluation, candidates, record), default=None)
    if main is None:
        return ChosenEvaluations(None, extra, tuple(replace(one, use=_describe_extra(one.file)) for one in stored))
    parts, uses = [main], dict[str, str]()
    for one in candidates:
        difference = _find_difference(one.evaluation, main.evaluation)
        if one is not main and not difference:
            parts.append(one)
        elif one is not main:
            key = _find_extra_key(one.evaluation, main.evaluation, difference)
            is_beside = key is not None and key not in extra
            if key is not None and is_beside:
                extra[key] = one.evaluation
            uses[one.file] = f"shown beside: {difference}" if is_beside else f"not used: {difference}"
    for one in parts:
        uses[one.file] = "shown" if len(parts) == 1 else "combined"
    described = tuple(replace(one, use=uses.get(one.file) or _describe_extra(one.file)) for one in stored)
    return ChosenEvaluations(combine_evaluations(parts), extra, described)


def combine_evaluations(parts: Sequence[StoredEvaluation]) -> Evaluation:
    """Combine evaluations of the same weights, images and radius: the worst case is over all of their attacks.

    Each attack keeps the accuracy of its own; of an attack that two of them have, or that ran in a cascade, the other
    results count in the worst case alone.

    Args:
        parts: The evaluations; the first one's settings are those of the result.

    Returns:
        One evaluation.
    """
    if len(parts) == 1:
        return parts[0].evaluation
    first = parts[0].evaluation
    results: dict[str, AttackResult] = {}
    attacks: dict[str, Any] = {}
    settings_of: dict[str, dict[str, Any]] = {}
    worst_only: list[str] = []
    for part in sorted(parts, key=lambda part: bool(part.evaluation.settings["cascade"])):
        settings = part.evaluation.settings
        for result in part.evaluation.results:
            described = settings.get("attacks", {}).get(result.name, {})
            is_partial = bool(settings["cascade"]) and result.name != "natural"
            name = result.name if not is_partial else f"{result.name} in a cascade"
            if name in results:
                name = _name_repeat(name, settings, settings_of[name])
            if name in results and results[name].correct == result.correct:
                continue
            name = _make_unique(name, results)
            if name != result.name:
                worst_only.append(name)
            results[name] = replace(result, name=name)
            attacks[name], settings_of[name] = described, {**settings, "attack": described}
    flags = list(dict.fromkeys(flag for part in parts for flag in part.evaluation.flags))
    settings = {
        **first.settings,
        "attacks": attacks,
        "cascade": False,
        "sanity": all(part.evaluation.sanity_checked for part in parts),
        WORST_ONLY: worst_only,
    }
    ordered = sorted(results.values(), key=lambda result: result.name != "natural")
    balls = {
        name: combine_evaluations([replace(part, evaluation=part.evaluation.balls[name]) for part in parts])
        for name in first.balls
    }
    return replace(first, results=ordered, settings=settings, flags=flags, balls=balls, recorded_metrics=None)


def strength_key(name: str) -> tuple[int, int, str]:
    """Return what sorts attacks by their names: natural first, then from weak to strong, worst of all last."""
    if name in ("natural", "worst"):
        return (-1 if name == "natural" else len(ATTACKS_BY_STRENGTH) + 1), 0, name
    family = max((i for i, prefix in enumerate(ATTACKS_BY_STRENGTH) if name.startswith(prefix)), default=0)
    steps = re.search(r"\d+", name)
    return family, int(steps[0]) if steps else 0, name


def _age(name: str) -> tuple[int, str]:
    """What sorts evaluation.json and its copies by their age, the newest first; a copy's number rises with time."""
    suffix = (EVALUATION_PATTERN.fullmatch(name) or [None, None, None])[2]
    if suffix is None:
        return 0, name
    number = re.search(r"(\d+)$", suffix)
    return (1_000_000_000 - int(number[1]) if number and len(number[1]) < 9 else 1_000_000_001), name


def _rank(evaluation: Evaluation, candidates: Sequence[StoredEvaluation], record: dict[str, Any] | None) -> Any:
    """What the evaluation with the largest value of is chosen by."""
    request = (record or {}).get("request") or {}
    weights = next((_weights(one.evaluation) for one in candidates if _is_of_best_epoch(one.evaluation)), None)
    data = _about(evaluation, "data")
    return (
        _is_of_best_epoch(evaluation),
        _weights(evaluation) == weights,
        _radius(evaluation) == _radius_of_record(record),
        data is None or data == request.get("data"),
        evaluation.has_worst_case,
        evaluation.num_images,
        not evaluation.settings["cascade"],
        max(strength_key(result.name)[:2] for result in evaluation.results),
        -next(n for n, one in enumerate(candidates) if one.evaluation is evaluation),
    )


def _find_difference(evaluation: Evaluation, main: Evaluation) -> str:
    """Why an evaluation cannot be combined with the main one; empty if it can."""
    if _weights(evaluation) != _weights(main):
        other_epoch, epoch = _about(evaluation, "epoch"), _about(main, "epoch")
        return f"the {other_epoch} epoch" if other_epoch and other_epoch != epoch else "other weights"
    if evaluation.settings.get("threat") != main.settings.get("threat"):
        return "another radius or norm"
    if any(_about(evaluation, key) != _about(main, key) for key in ("data", "size", "normalize")):
        return "other examples"
    if evaluation.num_images != main.num_images:
        return f"{evaluation.num_images:,} examples, not {main.num_images:,}"
    if evaluation.labels != main.labels or evaluation.settings.get("task") != main.settings.get("task"):
        return "other examples"
    return ""


def _find_extra_key(evaluation: Evaluation, main: Evaluation, difference: str) -> str | None:
    """The place beside the main evaluation that another one can take: the last epoch's, or AutoAttack's."""
    if _about(evaluation, "epoch") == "last" and _about(main, "epoch") != "last":
        is_comparable = evaluation.settings.get("threat") == main.settings.get("threat")
        return "last" if is_comparable and _about(evaluation, "data") == _about(main, "data") else None
    has_more = "aa" in evaluation.accuracy and "aa" not in main.verdicts
    return "aa" if has_more and difference.endswith(f"not {main.num_images:,}") else None


def _describe_extra(file: str) -> str:
    return "shown beside" if file in EXTRA_EVALUATION_FILES.values() else "not used"


def _name_repeat(name: str, settings: dict[str, Any], settings_before: dict[str, Any]) -> str:
    """The name of a second result of an attack, by what differs from the first."""
    described, before = settings.get("attacks", {}).get(name, {}), settings_before["attack"]
    pairs = [(key, described[key], before.get(key)) for key in described]
    pairs += [(key, settings.get(key), settings_before.get(key)) for key in ("seed", "block", "precision")]
    differences = [
        f"{key} {value}" for key, value, other in pairs if value != other and not isinstance(value, dict | list)
    ]
    return f"{name} with {', '.join(differences)}" if differences else name


def _make_unique(name: str, taken: dict[str, Any]) -> str:
    number = 1
    while (unique := name if number == 1 else f"{name} ({number})") in taken:
        number += 1
    return unique


def _weights(evaluation: Evaluation) -> Any:
    return evaluation.settings.get("model")


def _about(evaluation: Evaluation, key: str) -> Any:
    about = evaluation.settings.get("about")
    return about.get(key) if isinstance(about, dict) else None


def _is_of_best_epoch(evaluation: Evaluation) -> bool:
    return _about(evaluation, "epoch") in (None, "best")


def _radius(evaluation: Evaluation) -> Any:
    return _describe_radius(evaluation.settings.get("threat") or {})


def _radius_of_record(record: dict[str, Any] | None) -> Any:
    return _describe_radius((record or {}).get("threat") or {})


def _describe_radius(threat: dict[str, Any]) -> Any:
    """Norm and radius, or the balls of a union."""
    return threat.get("norm"), threat.get("eps"), threat.get("threats")
