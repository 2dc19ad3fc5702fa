"""Names in other people's run folders stay text in every file of a report: no markup, no spreadsheet formula."""

import csv

import pytest

from deat.cli.main import main
from deat.evaluation.sanity import Flag
from deat.report.gallery import Gallery, Tile, gallery_to_csv_rows
from deat.report.results_table import format_csv
from helpers.runs import make_bench, make_run, one_run

FORMULA = '=HYPERLINK("http://a.example";"x")'
MARKUP = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def hostile_report(tmp_path_factory):
    """The report on a bench whose names, classes, attacks, reasons and flags are formulas and HTML."""
    bench = tmp_path_factory.mktemp("hostile") / "bench"
    names = [FORMULA, "@SUM(1)", "+1+1", "-1+1", MARKUP]
    flag = Flag(FORMULA, MARKUP, MARKUP)
    rows = []
    for number, name in enumerate(names):
        shares = {"natural": 0.9, "pgd-20": 0.4 + 0.01 * number, FORMULA: 0.3}
        make_run(bench / str(number), name, model=MARKUP, shares=shares, flags=(flag,) if number == 4 else ())
        runs = [one_run(str(number)), one_run("gone", 1, "failed", FORMULA)]
        rows.append({"name": name, "method": name, "model": MARKUP, "runs": runs})
    make_bench(bench, rows, MARKUP, MARKUP, data=FORMULA, set={FORMULA: MARKUP})
    assert main(["report", str(bench)]) == 0
    return bench / "report"


@pytest.mark.promise("P62")
def test_no_cell_of_a_hostile_report_s_csv_files_is_a_formula(hostile_report):
    files = list(hostile_report.rglob("*.csv"))
    assert len(files) > 3
    for file in files:
        with file.open(newline="") as text:
            cells = [cell for row in csv.reader(text) for cell in row]
        formulas = [cell for cell in cells if cell.strip()[:1] in tuple("=+-@\t\r") and not is_number(cell)]
        assert formulas == [], file.name
    assert f"'{FORMULA}" in (hostile_report / "table.csv").read_text().replace('""', '"')


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return text == ""
    return True


@pytest.mark.promise("P62")
def test_no_file_of_a_hostile_report_holds_raw_html_from_a_record(hostile_report):
    for name in ("table.md", "table.tex", "index.html"):
        assert "<img src=x" not in (hostile_report / name).read_text(), name
    for picture in hostile_report.rglob("*.svg"):
        assert "<img" not in picture.read_text(), picture.name
    assert (hostile_report / "table.md").read_text().startswith("# &lt;img")


def test_gallery_s_csv_file_holds_no_formula():
    tile = Tile(3, FORMULA, "@a", "-b", (None, None, None))
    text = format_csv(gallery_to_csv_rows(Gallery(FORMULA, "PGD-20", (tile,))))
    (row,) = list(csv.reader(text.splitlines()))[1:]
    assert row == [f"'{FORMULA}", "PGD-20", "3", f"'{FORMULA}", "'@a", "'-b"]


@pytest.mark.parametrize("number", [-1.5, -3, 1e-9, None])
def test_numbers_in_a_csv_file_stay_numbers(number):
    assert format_csv([[number]]).strip('"\n') == ("" if number is None else str(number))
