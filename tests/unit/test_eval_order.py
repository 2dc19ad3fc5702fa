"""Attacks held side by side: what is stronger by its making must not leave more, and what leaves more is flagged."""

import pytest

from deat.evaluation.attack_registry import describe_attack, get_attack
from deat.evaluation.results import AttackResult, Evaluation
from deat.evaluation.sanity import check_consistency
from helpers.eval_nets import THREAT

N = 1000


def left(cascade=False, felled=None, **percent: float) -> list[str]:
    """The flags of an evaluation whose attacks leave so many percent; _ in a name stands for -."""
    standing = {name.replace("_", "-"): round(N * share / 100) for name, share in percent.items()}
    results = [
        AttackResult(name, [i < k for i in range(N)], 0, 1.0, N, N, (felled or {}).get(name, {}))
        for name, k in standing.items()
    ]
    attacks = {name: describe_attack(get_attack(name), THREAT) for name in standing}
    found = Evaluation(results, [0] * N, ["a"], {"cascade": cascade, "attacks": attacks})
    return [flag.name for flag in check_consistency(found)]


@pytest.mark.parametrize(
    ("percent", "expected"),
    [
        ({"fgsm": 30, "pgd_20": 50, "cw_20": 25}, ["one_step_wins"]),
        ({"fgsm": 30, "pgd_20": 25, "cw_20": 50}, []),
        ({"fgsm": 30, "pgd_2": 50, "pgd_20": 25}, []),
        ({"fgsm": 30, "cw_20": 50}, ["one_step_wins"]),
        ({"pgd_20": 30, "pgd_20x10": 50}, ["one_start_wins"]),
        ({"pgd_20x5": 30, "pgd_20": 50, "pgd_20x10": 35}, ["one_start_wins"]),
        ({"pgd_20": 30, "pgd_20x10": 30.5}, []),
        ({"pgd_20": 30, "pgd_20x10": 20}, []),
        ({"pgd_20": 30, "pgd_10x10": 50, "pgd_20x10_last": 50}, []),
        ({"pgd_20": 30, "aa": 50}, ["ensemble_loses"]),
        ({"cw_20": 30, "aa": 50}, ["ensemble_loses"]),
        ({"apgd_ce": 30, "aa": 50}, ["ensemble_loses"]),
        ({"pgd_20": 30, "aa": 30.5}, []),
        ({"pgd_20": 30, "cw_20": 28, "aa": 25}, []),
        ({"natural": 20, "aa": 50}, []),
        ({"pgd_20": 50, "square": 30}, ["black_box_wins"]),
        ({"pgd_20": 50, "aa": 30, "square": 30}, ["black_box_wins"]),
        ({"pgd_20": 30, "aa": 25, "square": 40}, []),
        ({"apgd_t": 50, "square": 30}, ["black_box_wins"]),
        ({"fgsm": 50, "square": 30}, []),
    ],
    ids=str,
)
def test_what_is_stronger_must_not_leave_more(percent, expected):
    assert left(**percent) == expected
    assert left(cascade=True, **percent) == []


def test_an_attack_is_left_out_of_the_order_for_its_settings_not_for_its_name():
    results = [
        AttackResult(name, [i < k for i in range(N)], 0, 1.0, N, N) for name, k in (("natural", 300), ("pgd", 500))
    ]
    attacks = {
        "natural": describe_attack(get_attack("fgsm"), THREAT),
        "pgd": describe_attack(get_attack("pgd-20"), THREAT),
    }
    found = Evaluation(results, [0] * N, ["a"], {"cascade": False, "attacks": attacks})
    assert [flag.name for flag in check_consistency(found)] == ["one_step_wins"]


@pytest.mark.parametrize(("fell", "expected"), [(0, []), (5, []), (6, ["black_box_wins"])])
@pytest.mark.parametrize("cascade", [False, True])
def test_images_that_only_square_fells_show_masked_gradients(fell, expected, cascade):
    felled = {"aa": {"apgd-ce": 400, "apgd-t": 50, "fab-t": 0, "square": fell}}
    assert left(cascade, felled, aa=50) == expected
    assert left(cascade, {"aa": {"square": fell, "apgd-ce": 400}}, aa=50) == []
