"""The evaluation against a union: one in every ball, and whether each image is correct in all of them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from deat.evaluation.attack_registry import describe_attack
from deat.evaluation.attack_verifier import AttackLike, combine_worst, sum_counts
from deat.evaluation.results import AttackResult, Evaluation
from deat.evaluation.sanity import Flag
from deat.threat import Union


def combine_balls(evaluations: Sequence[Evaluation], union: Union, attacks: Sequence[AttackLike]) -> Evaluation:
    """Combine the evaluations of one model in every ball of a union.

    Args:
        evaluations: One for each ball, in their order, with the same attacks on the same images.
        union: The union.
        attacks: The attacks.

    Returns:
        An evaluation whose results count an image as correct if it is correct in every ball. Times and passes are sums.
        Its `balls` has the single evaluations.
    """
    names = [ball.name for ball in union.threats]
    by_attack = zip(*(evaluation.results for evaluation in evaluations), strict=True)
    settings = {
        **evaluations[0].settings,
        "threat": union.describe(),
        "attacks": {attack.name: _describe_in_every_ball(attack, union, evaluations) for attack in attacks},
    }
    return replace(
        evaluations[0],
        results=[_combine_results(results) for results in by_attack],
        settings=settings,
        flags=_combine_flags(dict(zip(names, evaluations, strict=True))),
        check_seconds=sum(evaluation.check_seconds for evaluation in evaluations),
        balls=dict(zip(names, evaluations, strict=True)),
    )


def _combine_results(results: Sequence[AttackResult]) -> AttackResult:
    """An attack's result in all balls; of an answer with grades, that of the ball with the lowest score."""
    counts = {
        **sum_counts(results),
        "num_fooled_by_stage": {},
    }  # stages follow each other in a ball, not from ball to ball
    if results[0].scores:
        return AttackResult(name=results[0].name, **counts, **combine_worst(results))
    correct = [all(column) for column in zip(*(result.correct for result in results), strict=True)]
    return AttackResult(name=results[0].name, correct=correct, **counts)


def _combine_flags(evaluations: dict[str, Evaluation]) -> list[Flag]:
    """Every flag once; one that only some balls raised names them."""
    raised: dict[Flag, list[str]] = {}
    for name, evaluation in evaluations.items():
        for flag in evaluation.flags:
            raised.setdefault(flag, []).append(name)
    return [
        flag
        if len(names) == len(evaluations)
        else replace(flag, seen=f"in the {' and '.join(names)} ball: {flag.seen}")
        for flag, names in raised.items()
    ]


def _describe_in_every_ball(attack: AttackLike, union: Union, evaluations: Sequence[Evaluation]) -> dict[str, Any]:
    """An attack's settings; its step size in units of the radius, and what differs between balls left to these."""
    described = [evaluation.settings["attacks"][attack.name] for evaluation in evaluations]
    common = {name: value for name, value in described[0].items() if all(d.get(name) == value for d in described)}
    own = describe_attack(attack, union)
    return {name: common.get(name, own.get(name)) for name in described[0] if name in common or name == "alpha"}
