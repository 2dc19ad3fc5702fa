"""What `deat evaluate` prints about the time that sanity checks took."""

from pathlib import Path

import pytest

from deat.cli.evaluate import print_evaluation
from deat.evaluation.results import AttackResult, Evaluation

SETTINGS = {
    "about": {"epoch": "best", "weights": "w", "data": "digits"},
    "threat": {"norm": "linf", "eps": 0.1},
    "attacks": {"natural": {}},
    "seed": 0,
    "sample": False,
    "cascade": False,
}


def found(check_seconds: float, seconds: float = 2.0, images: int = 60) -> Evaluation:
    results = [AttackResult("natural", [True] * images, 0, seconds, 1, 1)]
    return Evaluation(results, [0] * images, ["a"], SETTINGS, [], check_seconds)


def test_checks_that_took_more_than_the_attacks_are_reported_with_both_times(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_evaluation(found(36.0), Path("e.json"))
    said = capsys.readouterr().out
    assert "sanity checks took 36.0 s and the attacks 2.0 s: the checks use all 60 images" in said
    print_evaluation(found(36.0, images=500), Path("e.json"))
    said = capsys.readouterr().out
    assert "128 evenly spaced images, and never more than 128" in said


def test_checks_that_took_less_are_not_mentioned(capsys: pytest.CaptureFixture[str]) -> None:
    print_evaluation(found(1.9), Path("e.json"))
    assert "sanity" not in capsys.readouterr().out
