"""The LaTeX table: it fits `article` at 10 pt, says which values are the best, and no name in it is a command."""

import json
import re
import shutil
import subprocess

import pytest

from deat.evaluation.sanity import Flag
from deat.recipes.paper_numbers import PAPER_TABLES
from deat.report.latex import find_best_rows, measure_text, render_latex_table, wrap_text
from deat.report.report_data import load_report_data
from deat.report.results_table import build_results_table
from helpers.runs import make_bench, make_run, one_run

STANDARD = "cifar10_result_std"
HOSTILE = "\\input{x}%$&_^~|<b>#{}"
TEXT_WIDTH = 345.0
PDFLATEX = shutil.which("pdflatex")
DOCUMENT = "\\documentclass{article}\\usepackage{booktabs,xcolor}\\begin{document}\\input{table.tex}\\end{document}\n"


def table_of(*folders):
    return build_results_table(load_report_data([str(folder) for folder in folders]), None)


def wide_bench(folder):
    """Ten accuracies and rows whose names are long, hostile, foreign, flagged or of a crowded machine."""
    names = [
        "m+deat",
        "my_method.py:SmoothedConsistencyRegularisation",
        "日本 ε rather long",
        "x" * 90,
        HOSTILE,
        "pgd-7",
    ]
    attacks = ("fgsm", "square", "pgd-20", "pgd-50x10", "cw-20", "apgd-ce", "my_attack.py:a-strong-one", "aa")
    rows = []
    for n, name in enumerate(names):
        shares = {"natural": 0.9} | dict.fromkeys(attacks, 0.5 - 0.01 * n)
        flags = (Flag("masked", "x", "y"),) if n == 3 else ()
        for seed in (0, 1):
            make_run(folder / f"{n}-{seed}", name, seed=seed, cost=n + 2, shares=shares, flags=flags)
        runs = [one_run(f"{n}-{seed}", seed, jobs=2 if n == 4 else 1) for seed in (0, 1)]
        rows.append({"name": name, "method": name, "model": "m", "runs": runs})
    return make_bench(folder, rows)


def paper_bench(folder, count=20):
    """Rows of the paper's table with its numbers, more than a page holds in several parts."""
    rows = []
    for n, name in enumerate([n for n in PAPER_TABLES[STANDARD].rows if n.startswith("preact")][:count]):
        for seed in (0, 1):
            robust = (160 + 7 * n + seed) / 800
            shares = {"natural": (672 + 2 * seed) / 800, "pgd-100": robust, "cw-20": robust, "aa": robust}
            record = {"threat": {"norm": "linf", "eps": 8 / 255}}
            make_run(folder / f"{n}-{seed}", name, seed=seed, cost=n + 2, shares=shares, images=800, record=record)
        runs = [one_run(f"{n}-{seed}", seed) for seed in (0, 1)]
        paper = {"table": STANDARD, "row": name}
        rows.append({"name": name, "method": name, "model": "preact_resnet18", "runs": runs, "paper": paper})
    return make_bench(folder, rows, "cifar10-standard", "Table 3")


def single_run(folder):
    return make_run(folder / "only", shares={"natural": 0.9, "pgd-20": 0.5})


def unevaluated_run(folder):
    return make_run(folder / "only")


TABLES = [wide_bench, paper_bench, single_run, unevaluated_run]


@pytest.mark.parametrize("make", TABLES, ids=lambda make: make.__name__)
def test_the_table_compiles_and_nothing_leaves_the_text_of_article(tmp_path, make):
    if not PDFLATEX:
        pytest.skip("needs pdflatex: Debian's texlive-latex-base and texlive-latex-recommended")
    (tmp_path / "table.tex").write_text(render_latex_table(table_of(make(tmp_path / "runs"))))
    (tmp_path / "paper.tex").write_text(DOCUMENT)
    command = [PDFLATEX, "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape", "paper.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=60, check=False)
    log = (tmp_path / "paper.log").read_text(errors="replace")
    assert done.returncode == 0, log[-2000:]
    assert re.findall(r"Overfull.*|Float too large.*|Missing character.*", log) == []


def to_text(latex):
    """The characters that LaTeX sets for a cell."""
    for pattern, text in (
        (r"\\(?:quad|,)", "  "),
        (r"\\(?:textbackslash|textbar|textasciitilde|textasciicircum)\{\}", "|"),
        (r"\\(?:textless|textgreater|dag|ddag)\{\}|\$\\?[A-Za-z-]+\$", "m"),
        (r"\\[a-z]+\*?(?:\[[a-z]\])?|[{}$]", ""),
    ):
        latex = re.sub(pattern, text, latex)
    return latex.replace("\\", "")


def set_width(latex):
    """The width of a cell in points, from the widths that matplotlib's copy of Computer Modern has.

    At 8 and 7 pt its letters are wider than those at 10 pt by 6 and 14 %, bold ones by 23 %.
    """
    fonts = pytest.importorskip("matplotlib.font_manager")
    from matplotlib import get_data_path
    from matplotlib.textpath import text_to_path

    properties = fonts.FontProperties(fname=f"{get_data_path()}/fonts/ttf/cmr10.ttf", size=1000)

    def width(text):
        return text_to_path.get_text_width_height_descent(text, properties, ismath=False)[0] / 1000 if text else 0.0

    if name := re.fullmatch(r"\\parbox\[t\]\{([\d.]+)pt\}\{\\raggedright (.*)\\strut\}", latex):
        lines = [set_width(line) for line in name[2].split(" \\\\ ")]
        assert max(lines) <= float(name[1])
        return float(name[1])
    if header := re.fullmatch(r"\\shortstack\[r\]\{(.*)\}", latex):
        return max(set_width(line) for line in header[1].split("\\\\"))
    small = r"\\deat(?:sd|interval|note)\{((?:[^{}]|\\[{}]|\{[^{}]*\})*)\}"
    points = sum(7 * 1.14 * width(to_text(f"m{text}" if "sd{" in latex else text)) for text in re.findall(small, latex))
    rest = re.sub(small, "", latex)
    points += sum(8 * 1.23 * width(to_text(text)) for text in re.findall(r"\\deatbest\{([^{}]*)\}", rest))
    return points + 8 * 1.06 * width(to_text(re.sub(r"\\deatbest\{[^{}]*\}", "", rest)))


@pytest.mark.parametrize("make", TABLES, ids=lambda make: make.__name__)
def test_the_sum_of_the_widths_of_columns_fits_the_text_of_article(tmp_path, make):
    text = render_latex_table(table_of(make(tmp_path)))
    parts = re.findall(r"\\toprule\n(.*?)\\bottomrule", text, re.S)
    assert parts
    for part in parts:
        lines = [line.removesuffix(" \\\\").split(" & ") for line in part.splitlines() if " & " in line]
        columns = list(zip(*lines, strict=True))  # every line has a cell for each column
        assert sum(max(map(set_width, column)) for column in columns) + 6 * (len(columns) - 1) <= TEXT_WIDTH


@pytest.mark.parametrize(("text", "font"), [("95.50", "normal"), ("m+deat", "normal"), ("93.05", "small")])
def test_widths_are_not_less_than_those_of_the_font(text, font):
    measured = set_width(f"\\deatinterval{{{text}}}" if font == "small" else text)
    assert measured <= measure_text(text, font) <= 1.25 * measured


@pytest.mark.parametrize(
    "text", ["a name of several words", "x" * 70, "my_method.py:SmoothedConsistency", "", "日本語" * 9]
)
def test_lines_of_a_long_name_are_the_name_and_none_is_too_wide(text):
    lines = wrap_text(text, 60.0)
    assert "".join(lines) == text
    assert all(measure_text(line.rstrip()) <= 60 for line in lines)


def cells_of(text, name, column):
    """The means of a column, by row."""
    found = {}
    for part in re.findall(r"\\toprule\n(.*?)\\bottomrule", text, re.S):
        head, *lines = [line.removesuffix(" \\\\").split(" & ") for line in part.splitlines() if " & " in line]
        if column in head:
            found |= {line[0]: line[head.index(column)] for line in lines if not line[0].startswith("\\quad")}
    return found[name]


def judged(folder, name, robust, natural=0.9, **more):
    return make_run(folder / name, name, shares={"natural": natural, "pgd-20": robust}, images=1000, **more)


def test_the_highest_accuracy_of_each_column_is_bold_and_what_cannot_be_told_from_it_underlined(tmp_path):
    runs = [judged(tmp_path, "a", 0.500, 0.80), judged(tmp_path, "b", 0.495, 0.90), judged(tmp_path, "c", 0.3, 0.905)]
    of = table_of(*runs)
    text = render_latex_table(of)
    for attack, column in (("natural", "natural"), ("pgd-20", "PGD-20")):
        best, ties = find_best_rows(of.rows, attack)
        means = {row.name: row.seed_statistics(attack).mean for row in of.rows}
        assert best == [max(means, key=means.get)]
        shown = {row.name: cells_of(text, row.name, column) for row in of.rows}
        assert {name for name, cell in shown.items() if cell.startswith("\\deatbest{")} == set(best)
        assert {name for name, cell in shown.items() if cell.startswith("\\deattie{")} == set(ties)
    assert (find_best_rows(of.rows, "pgd-20")[1], find_best_rows(of.rows, "natural")[1]) == (["b"], ["b"])
    caption = re.search(r"\\caption\{(.*)\}", text)[1]
    assert "Bold: the highest accuracy" in caption
    assert re.search(r"Underlined: statistically indistinguishable .* p \$\\ge\$ 0.05", caption)


def test_equal_accuracies_are_all_bold_and_the_fewest_backprops_too(tmp_path):
    runs = [judged(tmp_path, "a", 0.5, cost=4), judged(tmp_path, "b", 0.5, cost=3), judged(tmp_path, "c", 0.4, cost=9)]
    text = render_latex_table(table_of(*runs))
    assert [cells_of(text, name, "PGD-20")[:9] for name in "abc"] == ["\\deatbest", "\\deatbest", "40.00"]
    assert [cells_of(text, name, "backprops") for name in "abc"] == ["160", "\\deatbest{120}", "360"]


def test_a_flagged_row_is_not_the_best_however_high_its_numbers_are(tmp_path):
    flag = (Flag("masked", "x", "y"),)
    runs = [judged(tmp_path, "a", 0.9, flags=flag), judged(tmp_path, "b", 0.5), judged(tmp_path, "c", 0.3)]
    text = render_latex_table(table_of(*runs))
    assert cells_of(text, "a \\textbf{!}", "PGD-20") == "90.00"
    assert cells_of(text, "b", "PGD-20") == "\\deatbest{50.00}"
    assert "of rows without a sanity flag" in text
    assert "\\textbf{!}: a sanity flag was raised" in text


def test_where_rows_cannot_be_compared_none_is_the_best_and_the_caption_says_so(tmp_path):
    runs = [judged(tmp_path, name, 0.5) for name in "ab"]
    file = runs[0] / "evaluation.json"
    found = json.loads(file.read_text())
    found["settings"]["threat"]["eps"] = 0.05
    found.pop("checksum", None)
    file.write_text(json.dumps(found))
    text = render_latex_table(table_of(*runs))
    assert "\\deatbest{" not in text.split("\\begin{table}", 1)[1]
    assert "No value is bold" in text
    only = render_latex_table(table_of(runs[1]))
    assert "old" not in re.search(r"\\caption\{(.*)\}", only)[1]  # one row needs no such sentence


def test_the_table_is_for_booktabs_and_no_name_is_a_command(tmp_path):
    make_run(tmp_path / "a", HOSTILE, shares={"natural": 0.5, "pgd-20": 0.3})
    make_run(tmp_path / "b", "[b]", shares={"natural": 0.4, "pgd-20": 0.2})
    text = render_latex_table(table_of(tmp_path / "a", tmp_path / "b"))
    parts = re.findall(r"\\midrule\n(.*?)\\bottomrule", text, re.S)
    ours = {"textbackslash", "textasciitilde", "textasciicircum", "textbar", "textless", "textgreater", "addlinespace"}
    ours |= {"quad", "deatinterval", "deatbest", "deattie", "parbox", "raggedright", "strut"}
    assert set(re.findall(r"\\([a-z]+)", "".join(parts))) <= ours
    assert "\\input" not in text
    assert not any(line.startswith("[") for part in parts for line in part.splitlines())
    assert text.count("{") - text.count("\\{") == text.count("}") - text.count("\\}")


def test_a_row_has_its_interval_the_papers_number_and_its_test_below_or_beside(tmp_path):
    names = {"a": "m+deat", "b": "mart", "c": "none of the paper's"}
    rows = []
    for folder, name in names.items():
        for seed in (0, 1):
            shares = {"natural": 0.78 + 0.01 * seed, "pgd-20": 0.5}
            make_run(tmp_path / f"{folder}{seed}", name, seed=seed, shares=shares)
        runs = [one_run(f"{folder}{seed}", seed) for seed in (0, 1)]
        paper = {"table": STANDARD, "row": f"preact_resnet18 {name}"}
        rows.append({"name": name, "method": name, "model": "small", "runs": runs, "paper": paper})
    rows[2]["runs"].append(one_run("gone", 2, "failed", "out of memory"))
    text = render_latex_table(table_of(make_bench(tmp_path, rows)))
    assert cells_of(text, "m+deat", "natural") == "\\deatbest{78.50}\\deatsd{0.71}"
    below = text[text.index("\nm+deat & ") :].splitlines()
    assert below[2].startswith("\\quad\\deatinterval{95 \\% interval} & \\deatinterval{72.3--83.6} & ")
    assert below[3].startswith("\\quad\\deatpaper{paper} & \\deatpaper{83.93}\\phantom{\\deatsd{0.71}} & ")
    assert "\\deatpaper{78.04}\\deatnote{a}" in text
    assert "\\deatnote{a}\\,A misprint of the paper: the authors' own log has 75.86." in text
    assert cells_of(text, "none of the paper's", "p") == "1.000"
    assert cells_of(text, "none of the paper's", "seeds") == "2 of 3"
    assert "out of memory" not in text


def test_an_accuracy_from_fewer_images_has_a_note_that_says_so(tmp_path):
    for seed in (0, 1):
        folder = make_run(tmp_path / f"s{seed}", seed=seed, shares={"natural": 0.9, "pgd-20": 0.5})
        make_run(tmp_path / "aside" / str(seed), shares={"natural": 0.9, "aa": 0.4}, images=50)
        found = json.loads((tmp_path / "aside" / str(seed) / "evaluation.json").read_text())
        found["settings"]["sample"] = True
        if seed:
            found.pop("checksum", None)
            (folder / "evaluation-aa.json").write_text(json.dumps(found))
    text = render_latex_table(table_of(tmp_path / "s0", tmp_path / "s1"))
    assert cells_of(text, "m+deat", "AA") == "40.00\\deatnote{a}"
    assert "\\deatnote{a}\\,From seed 1 only, 50 examples." in text


def test_the_caption_says_what_all_rows_have_in_common_with_the_radius_as_a_fraction(tmp_path):
    caption = re.search(r"\\caption\{(.*)\}", render_latex_table(table_of(paper_bench(tmp_path, 2))))[1]
    assert "linf eps 8/255" in caption
    assert "0.03" not in caption


def test_it_says_how_it_writes_what_pdflatex_cannot_set(tmp_path):
    make_run(tmp_path / "a", "日本 ε", shares={"natural": 0.5, "pgd-20": 0.3})
    make_run(tmp_path / "b", "🙂", shares={"natural": 0.4, "pgd-20": 0.2})
    text = render_latex_table(table_of(tmp_path / "a", tmp_path / "b"))
    assert text.isascii()
    assert "what its fonts lack by number, such as U+65E5" in text.split("\\begin")[0]
    assert "\\texttt{U+65E5 U+672C} $\\varepsilon$ & \\deatbest{50.00}" in text
