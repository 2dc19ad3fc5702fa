"""Whether a difference is real: McNemar's test against a slow reference, and how seeds and rows are put together."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deat.report.report_data import load_report_data
from deat.report.results_table import build_results_table, render_markdown_table
from deat.report.significance import combine_p_values, compare_rows, holm, mcnemar, one_sided_p_value
from helpers.runs import make_run


def slow(gained: int, lost: int) -> float:
    """Every way in which the verdicts that differ could have fallen, counted one by one."""
    n, away = gained + lost, abs(gained - lost)
    sums = [abs(sum(signs)) for signs in itertools.product((-1, 1), repeat=n)]
    return sum(total >= away for total in sums) / len(sums)


@pytest.mark.parametrize("gained", range(7))
@pytest.mark.parametrize("lost", range(7))
def test_mcnemar_equals_counting_every_outcome(gained, lost):
    assert mcnemar([(gained, lost)]) == pytest.approx(slow(gained, lost), rel=1e-12)


def test_mcnemar_stays_exact_where_floats_would_overflow():
    assert mcnemar([(2600, 2400)]) == pytest.approx(0.00489, rel=0.01)
    assert 0 < mcnemar([(5000, 4000)]) < 1e-24
    assert mcnemar([(0, 0)]) == 1


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9))
def test_combined_p_is_never_below_the_best_seed_by_more_than_its_share(values):
    assert 0 <= combine_p_values(values) <= 1
    assert combine_p_values(values) >= min(values)


def test_seeds_that_contradict_each_other_show_nothing():
    assert mcnemar([(620, 520)]) == pytest.approx(0.00336, rel=0.01)
    assert mcnemar([(620, 520), (520, 620)]) == 1
    assert mcnemar([(620, 520), (560, 580), (520, 620)]) == 1


def test_seeds_that_agree_are_twice_the_mean_of_their_tests():
    one, other = mcnemar([(620, 520)]), mcnemar([(640, 500)])
    assert mcnemar([(620, 520), (640, 500)]) == pytest.approx(one + other)
    assert mcnemar([(520, 620), (500, 640)]) == pytest.approx(one + other)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=5))
def test_the_p_value_of_seeds_does_not_depend_on_who_is_first_and_is_below_no_seed(tables):
    assert mcnemar(tables) == mcnemar([(lost, gained) for gained, lost in tables])
    assert mcnemar(tables) >= min(mcnemar([t]) for t in tables) - 1e-12


@given(st.lists(st.tuples(st.integers(1, 12), st.booleans()), min_size=2, max_size=4))
@settings(max_examples=25)
def test_fair_coins_are_called_different_no_more_often_than_p_says(seeds):
    """Seeds of so many verdicts that differ, each a copy of the first one's coins or its mirror: all outcomes."""
    n = seeds[0][0]
    chances = {}
    for won in range(n + 1):
        p = mcnemar([(won, n - won) if same else (n - won, won) for _, same in seeds])
        chances[p] = chances.get(p, 0) + math.comb(n, won) / 2**n
    for p in chances:
        assert sum(share for value, share in chances.items() if value <= p) <= p + 1e-12


def test_a_tail_is_the_share_of_outcomes_at_least_as_good():
    assert one_sided_p_value(3, 1) == 5 / 16
    assert one_sided_p_value(1, 3) == 15 / 16
    assert one_sided_p_value(0, 0) == 1


def test_holm_is_the_textbooks():
    found = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert found == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})
    assert list(found) == ["a", "b", "c", "d"]


def test_rows_are_compared_on_the_images_both_were_evaluated_on(tmp_path):
    for seed in range(2):
        make_run(tmp_path / f"a{seed}", "pgd-7", seed=seed, shares={"pgd-20": 0.5})
        make_run(tmp_path / f"b{seed}", "free-4", seed=seed, shares={"pgd-20": 0.4})
    subject = load_report_data([str(p) for p in sorted(tmp_path.iterdir())])
    (found,) = compare_rows(subject.rows, subject.get_row("pgd-7"), "pgd-20").values()
    tables = []
    for ours, theirs in zip(subject.get_row("free-4").runs, subject.get_row("pgd-7").runs, strict=True):
        pairs = list(zip(ours.evaluation.verdicts["pgd-20"], theirs.evaluation.verdicts["pgd-20"], strict=True))
        tables.append((pairs.count((True, False)), pairs.count((False, True))))
    assert (
        found.uncorrected_p
        == mcnemar(tables)
        == min(1, 2 * sum(one_sided_p_value(lost, gained) for gained, lost in tables))
    )
    assert found.difference == pytest.approx(-0.1)
    assert (found.gained, found.lost) == tuple(map(sum, zip(*tables, strict=True)))
    assert found.seeds == 2
    assert found.images == 200


def test_rows_evaluated_on_other_images_or_by_other_settings_are_not_compared(tmp_path):
    make_run(tmp_path / "a", "pgd-7", shares={"pgd-20": 0.5})
    make_run(tmp_path / "b", "free-4", shares={"pgd-20": 0.4}, classes=("0", "1", "2"))
    make_run(tmp_path / "c", "free-8", seed=5, shares={"pgd-20": 0.4})
    subject = load_report_data([str(p) for p in sorted(tmp_path.iterdir())])
    assert compare_rows(subject.rows, subject.get_row("pgd-7"), "pgd-20") == {}


def test_a_difference_over_fewer_seeds_or_images_than_the_rows_have_says_so(tmp_path):
    for seed in range(3):
        make_run(tmp_path / f"a{seed}", "a", seed=seed, shares={"natural": 0.9, "pgd-20": 0.5})
    make_run(tmp_path / "b0", "b", shares={"natural": 0.9, "pgd-20": 0.4})
    make_run(tmp_path / "c0", "c", shares={"natural": 0.9, "pgd-20": 0.4}, images=100)
    of = build_results_table(load_report_data([str(tmp_path / name) for name in ("a0", "a1", "a2", "b0", "c0")]), "a")
    shared = {name: versus.shared_note for name, versus in of.comparisons["pgd-20"].items()}
    assert shared == {"b": "1 shared seed", "c": "1 shared seed, 100 shared examples"}
    assert ", 1 shared seed |" in render_markdown_table(of)
    alike = build_results_table(load_report_data([str(tmp_path / name) for name in ("a0", "b0")]), "a")
    assert alike.comparisons["pgd-20"]["b"].shared_note == ""
