"""Who is called the best, whom it is not told apart from, and whom rows are tested against."""

import re

import pytest

from deat.evaluation.sanity import Flag
from deat.report.grouping import load_report_data
from deat.report.html import render_winner_cards
from deat.report.significance import choose_baseline, describe_ties, find_most_robust
from deat.report.tables import build_results_table, render_markdown_table
from helpers.runs import make_bench, make_run, one_run

FLAG = Flag("one_step_wins", "fgsm leaves less", "use restarts")


def runs(folder, shares, **more):
    """The rows of runs with these accuracies under PGD-20, in this order."""
    for name, share in shares.items():
        make_run(folder / name, name, shares={"natural": 0.9, "pgd-20": share}, **more.get(name, {}))
    return load_report_data([str(folder / name) for name in shares])


def card(of, what):
    """What a card of the page says below its row's name."""
    (text,) = re.findall(rf'<div class="what">{what}</div>.*?<div class="how">(.*?)</div>', render_winner_cards(of))
    return text


def test_a_best_row_inside_the_noise_names_those_it_is_not_told_apart_from(tmp_path):
    of = build_results_table(runs(tmp_path, {"m+deat": 0.50, "free-4": 0.51, "natural": 0.02}), None)
    said = "51.00 % for 120 backprops<br>not told apart from m+deat (p ≥ 0.05)"
    assert card(of, "Most robust under PGD-20") == said
    assert "90.00 %; " in card(of, "Best on clean images")
    assert "not told apart from free-4, natural (p ≥ 0.05)" in card(of, "Best on clean images")


def test_a_best_row_that_the_test_tells_from_all_others_is_simply_the_best(tmp_path):
    of = build_results_table(runs(tmp_path, {"m+deat": 0.75, "free-4": 0.25, "natural": 0.02}), None)
    assert card(of, "Most robust under PGD-20") == "75.00 % for 120 backprops"


def test_the_most_robust_of_the_cheaper_ones_is_tested_among_those(tmp_path):
    cheap = {"cost": 2}
    of = build_results_table(runs(tmp_path, {"pgd-7": 0.75, "a": 0.50, "b": 0.49}, a=cheap, b=cheap), None)
    assert card(of, "Most robust of those that cost less").endswith("<br>not told apart from b (p ≥ 0.05)")


def test_where_rows_have_no_images_in_common_the_interval_speaks(tmp_path):
    subject = runs(tmp_path, {"a": 0.5, "b": 0.4}, b={"classes": ("0", "1", "2")})
    assert describe_ties(subject.row("a"), subject.rows, "pgd-20") == "95 % interval 43.1 to 56.9"


def test_many_rows_that_are_not_told_apart_are_counted(tmp_path):
    subject = runs(tmp_path, dict.fromkeys("abcdef", 0.5))
    assert (
        describe_ties(subject.row("a"), subject.rows, "pgd-20") == "not told apart from b, c, d and 2 others (p ≥ 0.05)"
    )


@pytest.mark.parametrize(
    ("shares", "flagged", "expected"),
    [
        ({"natural": 0.1, "pgd-7": 0.5, "m+deat": 0.4}, None, "m+deat"),
        ({"natural": 0.1, "pgd-7": 0.5, "free-4": 0.4}, None, "pgd-7"),
        ({"natural": 0.1, "pgd-7": 0.5, "m+deat": 0.9}, "m+deat", "pgd-7"),
        ({"natural": 0.1, "pgd-7": 0.5, "free-4": 0.9}, "free-4", "pgd-7"),
    ],
)
def test_rows_stand_against_m_deat_or_else_the_most_robust_one_that_may_be_believed(
    tmp_path, shares, flagged, expected
):
    more = {flagged: {"flags": (FLAG,)}} if flagged else {}
    subject = runs(tmp_path, shares, **more)
    assert build_results_table(subject, None).against.name == expected
    assert f"vs {expected}, PGD-20" in render_markdown_table(build_results_table(subject, None))
    assert build_results_table(subject, "natural").against.name == "natural"


def test_an_unfinished_m_deat_and_several_of_it_are_nobodys_measure(tmp_path):
    rows = []
    shares = {"m+deat": None, "m+deat fast": 0.3, "m+deat standard": 0.5, "fgsm": 0.4}
    for n, (name, share) in enumerate(shares.items()):
        make_run(tmp_path / str(n), "m+deat", shares=None if share is None else {"natural": 0.9, "pgd-20": share})
        method = name.split()[0]
        rows.append({"name": name, "method": method, "model": "m", "runs": [one_run(str(n))]})
    subject = load_report_data([str(make_bench(tmp_path, rows))])
    assert choose_baseline(subject.rows, "pgd-20").name == "m+deat standard"
    assert choose_baseline(subject.rows[:2], "pgd-20").name == "m+deat fast"


def test_of_equal_rows_the_cheaper_one_is_the_most_robust(tmp_path):
    subject = runs(tmp_path, {"a": 0.5, "b": 0.5, "c": 0.4}, a={"cost": 8})
    assert find_most_robust(subject.rows, "pgd-20").name == "b"
    assert find_most_robust([], "pgd-20") is None
