"""What a run's own table says of itself."""

from deat.runs.final_scores import ModelScore
from deat.runs.run_report import list_gradient_masking_warnings


def score(fgsm: float, pgd: float, images: int = 400) -> ModelScore:
    return ModelScore("mine", {"natural": 0.9, "fgsm": fgsm, "pgd-20": pgd}, images, 10, 1.0)


def test_a_longer_attack_that_leaves_more_is_reported_to_be_masked() -> None:
    (line,) = list_gradient_masking_warnings([score(0.3, 0.5), score(0.5, 0.3)], "deat evaluate run")
    assert "mine" in line
    assert "masked" in line
    assert line.endswith(": deat evaluate run --attacks natural,pgd-20,aa")


def test_a_difference_within_chance_is_no_doubt() -> None:
    assert list_gradient_masking_warnings([score(0.400, 0.404)], "") == []
