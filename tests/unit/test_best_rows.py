"""Which row is called the best, which rows are indistinguishable from it, and which one rows are compared with."""

import pytest

from deat.evaluation.sanity import Flag
from deat.report.page_data import build_winner_cards
from deat.report.report_data import load_report_data
from deat.report.results_table import build_results_table, render_markdown_table
from deat.report.significance import choose_baseline, describe_ties, find_most_robust
from helpers.page_sections import render_section
from helpers.runs import make_bench, make_run, one_run

FLAG = Flag("one_step_wins", "fgsm leaves less", "use restarts")


def runs(folder, shares, **more):
    """The rows of runs with these accuracies under PGD-20, in this order."""
    for name, share in shares.items():
        make_run(folder / name, name, shares={"natural": 0.9, "pgd-20": share}, **more.get(name, {}))
    return load_report_data([str(folder / name) for name in shares])


TIES = "statistically indistinguishable from {} (p ≥ 0.05)"


def card(of, title):
    """The text and the ties of the page's card of this title."""
    (found,) = [card for card in build_winner_cards(of)["cards"] if card["title"] == title]
    return found["text"], found["ties"]


def test_a_best_row_names_the_rows_that_are_statistically_indistinguishable_from_it(tmp_path):
    of = build_results_table(runs(tmp_path, {"m+deat": 0.50, "free-4": 0.51, "natural": 0.02}), None)
    assert card(of, "Most robust under PGD-20") == ("51.00 % for 120 backprops", TIES.format("m+deat"))
    text, ties = card(of, "Best on clean examples")
    assert "90.00 %; " in text
    assert ties == TIES.format("free-4, natural")
    page = render_section("winner_cards", build_winner_cards(of))
    assert f"51.00 % for 120 backprops<br>{TIES.format('m+deat')}" in page


def test_a_best_row_that_differs_significantly_from_all_others_names_none(tmp_path):
    of = build_results_table(runs(tmp_path, {"m+deat": 0.75, "free-4": 0.25, "natural": 0.02}), None)
    assert card(of, "Most robust under PGD-20") == ("75.00 % for 120 backprops", "")


def test_the_most_robust_of_the_cheaper_ones_is_tested_among_those(tmp_path):
    cheap = {"cost": 2}
    of = build_results_table(runs(tmp_path, {"pgd-7": 0.75, "a": 0.50, "b": 0.49}, a=cheap, b=cheap), None)
    assert card(of, "Most robust of those that cost less")[1] == TIES.format("b")


def test_where_rows_have_no_images_in_common_the_interval_is_given(tmp_path):
    subject = runs(tmp_path, {"a": 0.5, "b": 0.4}, b={"classes": ("0", "1", "2")})
    assert describe_ties(subject.get_row("a"), subject.rows, "pgd-20") == "95 % interval 43.1 to 56.9"


def test_many_indistinguishable_rows_are_counted(tmp_path):
    subject = runs(tmp_path, dict.fromkeys("abcdef", 0.5))
    assert describe_ties(subject.get_row("a"), subject.rows, "pgd-20") == TIES.format("b, c, d and 2 others")


@pytest.mark.parametrize(
    ("shares", "flagged", "expected"),
    [
        ({"natural": 0.1, "pgd-7": 0.5, "m+deat": 0.4}, None, "m+deat"),
        ({"natural": 0.1, "pgd-7": 0.5, "free-4": 0.4}, None, "pgd-7"),
        ({"natural": 0.1, "pgd-7": 0.5, "m+deat": 0.9}, "m+deat", "pgd-7"),
        ({"natural": 0.1, "pgd-7": 0.5, "free-4": 0.9}, "free-4", "pgd-7"),
    ],
)
def test_rows_are_compared_with_m_deat_or_else_the_most_robust_row_without_a_flag(tmp_path, shares, flagged, expected):
    more = {flagged: {"flags": (FLAG,)}} if flagged else {}
    subject = runs(tmp_path, shares, **more)
    assert build_results_table(subject, None).baseline.name == expected
    assert f"vs {expected}, PGD-20" in render_markdown_table(build_results_table(subject, None))
    assert build_results_table(subject, "natural").baseline.name == "natural"


def test_an_unfinished_m_deat_or_one_of_several_is_not_the_baseline(tmp_path):
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
