"""The paper's numbers that reports print: against its LaTeX source where that lies near, and against each other."""

import re
from pathlib import Path

import pytest

from deat.recipes.paper_numbers import MISPRINTS, PAPER_CLAIMS, PAPER_TABLES, find_paper_value

SOURCE = next(
    (p for above in Path(__file__).resolve().parents if (p := above / "shared/reference/paper.tex").is_file()), None
)
NUMBER = re.compile(r"\$?(\d+(?:\.\d+)?)(?:M\$|\\%)?")


def numbers_in(label):
    """Every cell of a table that is a number alone, in reading order."""
    body = SOURCE.read_text(encoding="utf-8").split(f"\\label{{{label}}}")[1].split("\\bottomrule")[0]
    body = body.split("\\midrule", 1)[1]
    cells = [re.sub(r"\\(textbf|cellcolor)\{(.*?)\}", lambda m: m[2] if m[1] == "textbf" else "", cell)
             for cell in re.split(r"&|\\\\", body)]  # fmt: skip
    return [float(found[1]) for cell in cells if (found := NUMBER.fullmatch(cell.strip()))]


@pytest.mark.skipif(SOURCE is None, reason="the paper's LaTeX source is not here")
@pytest.mark.parametrize("label", PAPER_TABLES)
def test_every_number_is_the_one_that_the_paper_prints(label):
    ours = [value for row in PAPER_TABLES[label].rows.values() for value in row if value is not None]
    assert ours == numbers_in(label)


def test_a_row_has_a_number_for_each_column():
    for table in PAPER_TABLES.values():
        assert {len(row) for row in table.rows.values()} == {len(table.columns)}


def test_misprints_are_marked_with_what_the_logs_say():
    for (label, row, column), logged in MISPRINTS.items():
        value = find_paper_value(label, row, column)
        assert value.logged == logged != value.printed
    assert find_paper_value("cifar10_result_std", "preact_resnet18 m+deat", "aa").logged is None


def test_what_is_not_in_the_paper_has_no_value():
    assert find_paper_value("imagenet", "resnet50 amata-2-4", "hours") is None
    assert find_paper_value("cifar10_result_std", "small m+deat", "aa") is None
    assert find_paper_value(None, None, "aa") is None


def test_claims_are_about_rows_of_the_tables_and_near_what_they_say():
    assert sorted(claim.percent for claim in PAPER_CLAIMS) == [-10, 16, 17, 20, 22, 26, 34, 35, 40, 60]
    for claim in PAPER_CLAIMS:
        assert claim.percent_from_table == pytest.approx(claim.percent, abs=5)


def test_claims_that_the_papers_own_tables_contradict_are_known():
    found = {
        claim.percent: round(claim.percent_from_table, 1)
        for claim in PAPER_CLAIMS
        if abs(claim.percent_from_table - claim.percent) > 1.15
    }
    assert found == {26: 30.4, 20: 23.1, 16: 14.8, -10: -14.0}


@pytest.mark.skipif(SOURCE is None, reason="the paper's LaTeX source is not here")
def test_every_claim_is_a_sentence_of_the_paper():
    said = SOURCE.read_text(encoding="utf-8").replace("~", " ")
    for claim in PAPER_CLAIMS:
        percent = {60: r"with 40\% time", -10: r"10\% longer"}.get(claim.percent, rf"{claim.percent}\% faster")
        assert percent in said
