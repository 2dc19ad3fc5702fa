"""A report's tables: equal to recomputation, explicit about what is missing, harmless whatever a row is called."""

import csv
import io
import itertools
import json
import re
from dataclasses import asdict, replace
from datetime import date
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deat.cli import bench as bench_command
from deat.cli.report import ReportCommand, build_report
from deat.errors import DataError, UsageError
from deat.evaluation.intervals import wilson_interval
from deat.evaluation.results import unpack_bits
from deat.evaluation.sanity import Flag
from deat.report.check_paper_claims import check_claims
from deat.report.draw_figures import ROW_COLORS, _draw_panel, average_lines, draw_point_names
from deat.report.escape_latex_csv import escape_csv, escape_latex
from deat.report.figure_data import (
    Panel,
    PlotLine,
    build_alpha_gamma_figure,
    build_backprops_figure,
    build_figures,
    build_trade_off_figure,
    build_training_process_figure,
    build_validation_figure,
    figure_to_csv_rows,
    get_unit,
    get_y_label,
)
from deat.report.html import read_asset, render_page
from deat.report.latex import render_latex_table
from deat.report.page_data import (
    build_claims,
    build_scores,
    build_table,
    build_winner_cards,
    find_differing_settings,
    find_front_indices,
    flatten_record,
    rank_rows,
)
from deat.report.problems import collect_remarks, list_run_problems
from deat.report.report_data import load_report_data
from deat.report.results_table import (
    build_results_table,
    collect_table_notes,
    format_saving,
    render_claims_table,
    render_csv_table,
    render_markdown_table,
    render_scores_tables,
)
from deat.report.row_statistics import (
    choose_ranking_attack,
    find_low_outliers,
    find_pareto_front,
    format_attack_name,
    list_attacks,
    summarize_accuracy,
)
from deat.report.run_results import load_bench
from deat.runs.final_scores import ModelScore
from deat.training.epoch_records import EpochTiming, EpochWatch, append_record
from deat.utils.text import capitalize_sentence, escape_markdown, make_printable, truncate_text
from helpers.eyes import EYES, distance
from helpers.page_sections import render_section
from helpers.runs import make_bench, make_run, one_run

SHARES = [0.41, 0.43, 0.45]
JUDGED = {"shares": {"natural": 0.9, "aa": 0.4}}
HOSTILE = "<script>alert(1)</script> | \x1b[31mred\x1b[0m\n\\input{x} $a_b^c$ 100% & # ~ [y] \u202egnp"


def table_html(results):
    return render_section("results_table", build_table(results))


def paths(folder):
    return [str(p) for p in sorted(folder.iterdir())]


@pytest.fixture
def three_seeds(tmp_path):
    for seed, share in enumerate(SHARES):
        make_run(tmp_path / f"s{seed}", seed=seed, shares={"natural": 0.9, "pgd-20": share, "aa": share - 0.05})
        make_run(tmp_path / f"p{seed}", "pgd-7", seed=seed, shares={"natural": 0.8, "pgd-20": 0.5, "aa": 0.48}, cost=8)
    return tmp_path


def test_csv_equals_recomputation_from_the_run_folders(three_seeds):
    rows = {
        r["row"]: r
        for r in csv.DictReader(
            io.StringIO(render_csv_table(build_results_table(load_report_data(paths(three_seeds)), None)))
        )
    }
    row = rows["m+deat"]
    found = [json.loads((three_seeds / f"s{n}" / "evaluation.json").read_text()) for n in range(3)]
    shares = [sum(unpack_bits(e["attacks"][1]["correct"])) / e["images"] for e in found]
    assert float(row["pgd-20"]) == pytest.approx(fmean(shares))
    assert float(row["pgd-20 sd"]) == pytest.approx(stdev(shares))
    assert (float(row["pgd-20 low"]), float(row["pgd-20 high"])) == pytest.approx(wilson_interval(86, 200))
    assert row["seeds"] == "0 1 2"
    assert float(row["backprops"]) == 10 * 3 * 4
    assert float(row["minutes"]) == pytest.approx(4 * 4.5 / 60)
    assert row["minutes_crowded"] == "False"
    assert row["pgd-20 paper"] == ""


def test_csv_reads_back_as_it_was_written_whatever_a_row_is_called(tmp_path):
    name = 'a "quoted", name; with\ttab'
    make_run(tmp_path / "a", "x", shares={"natural": 0.5})
    bench = make_bench(tmp_path, [{"name": name, "method": "x", "model": "small", "runs": [one_run("a")]}])
    (row,) = csv.DictReader(io.StringIO(render_csv_table(build_results_table(load_report_data([str(bench)]), None))))
    assert row["row"] == make_printable(name)
    assert float(row["natural"]) == 0.5


def test_markdown_says_mean_deviation_interval_and_significance(three_seeds):
    of = build_results_table(load_report_data(paths(three_seeds)), "pgd-7")
    text = render_markdown_table(of)
    line = next(line for line in text.splitlines() if line.startswith("| m+deat"))
    assert "43.00 ± 2.00 (36.3 to 49.9)" in line
    assert "−10.00, p" in line
    assert "3 of 3" in line
    assert "vs pgd-7, worst" in text
    assert "McNemar" in text
    assert "Holm" in text


def test_every_line_of_a_markdown_table_has_as_many_cells(tmp_path):
    make_run(tmp_path / "a", HOSTILE, shares={"natural": 0.5, "pgd-20": 0.3})
    make_run(tmp_path / "b", "other", shares={"natural": 0.4, "pgd-20": 0.2})
    lines = [
        x
        for x in render_markdown_table(build_results_table(load_report_data(paths(tmp_path)), None)).splitlines()
        if x.startswith("|")
    ]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1
    assert len(lines) == 4
    assert not any(bad in "".join(lines) for bad in ("<script", "\x1b", "\u202e"))


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("a_b", r"a\_b"),
        ("100%", r"100\%"),
        ("\\input{x}", r"\textbackslash{}input\{x\}"),
        ("$x^2$", r"\$x\textasciicircum{}2\$"),
        ("a~b#c&d", r"a\textasciitilde{}b\#c\&d"),
        ("[1]", "{[}1{]}"),
        ("*", "{*}"),
        ("\x1b[0m", "?{[}0m"),
        ("ε=8 ± 0.1 Δ", r"$\varepsilon$=8 $\pm$ 0.1 $\Delta$"),
        ("naïve é e\u0301 Łß", r"na\"{i}ve \'{e} \'{e} \L{}\ss{}"),
        ("日本 a🙂", r"\texttt{U+65E5 U+672C} a\texttt{U+1F642}"),
        ("ǖ \u0301", r"\texttt{U+01D6} \texttt{U+0301}"),
        ("“a”–…", "``a''--..."),
    ],
)
def test_latex_specials_are_escaped(raw, shown):
    assert escape_latex(raw) == shown


@given(st.text(max_size=40))
def test_latex_is_ascii_whatever_a_row_is_called_and_its_braces_match(name):
    text = escape_latex(name)
    assert text.isascii()
    bare = re.sub(r"\\[{}]", "", text)
    assert bare.count("{") == bare.count("}")


@pytest.mark.parametrize(
    ("raw", "written"),
    [
        ("=1+1", "'=1+1"),
        ("  @SUM(1)", "'  @SUM(1)"),
        ("-dash", "'-dash"),
        ("＝1", "'＝1"),
        ("m+deat", "m+deat"),
        ("", ""),
        ("a\x1b[31m", "a?[31m"),
        (-1.5, -1.5),
        (None, None),
    ],
)
def test_a_text_that_a_spreadsheet_would_compute_begins_with_an_apostrophe(raw, written):
    assert escape_csv(raw) == written


def test_names_are_harmless_in_html_and_markdown():
    page = render_section(
        "warnings", [{"title": "t", "entries": [[(True, '<img onerror="x">\x1b[31m'), (False, "'&")]]}]
    )
    assert "<b>&lt;img onerror=&#34;x&#34;&gt;?[31m</b>&#39;&amp;" in page
    assert escape_markdown("a|b<i>") == "a\\|b&lt;i&gt;"
    assert make_printable("a\x1b[31m\u202eb\nc") == "a?[31m?b?c"
    assert truncate_text("a\x1b[31m", 6, where="middle") == "a?[31m"
    assert truncate_text("a\x1b[31mb", 6, where="middle") == "a?[…mb"


def test_a_missing_number_is_a_dash_and_never_a_number(tmp_path):
    make_run(tmp_path / "a", shares={"natural": 0.9, "pgd-20": 0.4, "aa": 0.3})
    make_run(tmp_path / "b", "pgd-7", shares={"natural": 0.8, "pgd-20": 0.5})
    make_run(tmp_path / "c", "free-4", shares=None)
    make_run(tmp_path / "d", "free-8", finished=2)
    (tmp_path / "b" / "timing.jsonl").unlink()
    of = build_results_table(load_report_data(paths(tmp_path)), None)
    lines = {line.split(" | ")[0].strip("| "): line.split(" | ") for line in render_markdown_table(of).splitlines()}
    assert lines["pgd-7"][3] == "—"
    assert lines["pgd-7"][6] == "—"  # no clock was kept
    assert lines["free-4"][1:7] == ["—"] * 6
    assert "seed 0: not evaluated" in lines["free-4"][-1]
    assert "2 of 4 epochs" in lines["free-8"][-1]
    rows = {r["row"]: r for r in csv.DictReader(io.StringIO(render_csv_table(of)))}
    assert rows["pgd-7"]["aa"] == rows["pgd-7"]["minutes"] == rows["free-4"]["natural"] == ""


def test_nan_is_never_printed(tmp_path):
    run = make_run(tmp_path / "a", shares={"natural": 0.9, "pgd-20": 0.4})
    lines = (run / "history.jsonl").read_text().splitlines()
    broken = json.loads(lines[1]) | {"loss": float("nan"), "magnitude": float("inf"), "val_robust": None}
    (run / "history.jsonl").write_text("\n".join([lines[0], json.dumps(broken), *lines[2:]]) + "\n")
    subject = load_report_data([str(run)])
    cells = [
        str(value).lower()
        for f in build_figures(subject.rows, "pgd-20")
        for row in figure_to_csv_rows(f)
        for value in row
    ]
    assert not {"nan", "inf", "none"} & set(cells)
    text = render_markdown_table(build_results_table(subject, None)) + render_csv_table(
        build_results_table(subject, None)
    )
    assert not re.search(r"\b(nan|inf)\b", text, re.I)


def test_failed_and_waiting_runs_are_in_the_table_with_the_reason(tmp_path):
    make_run(tmp_path / "a", shares={"natural": 0.9})
    runs = [one_run("a"), one_run("b", 1, "failed", "the loss became NaN"), one_run("c", 2, "waiting")]
    bench = make_bench(tmp_path, [{"name": "m+deat", "method": "m+deat", "model": "small", "runs": runs}])
    (row,) = load_report_data([str(bench)]).rows
    assert list_run_problems(row) == ["seed 1: the loss became NaN", "seed 2: not run yet"]
    assert "1 of 3" in render_markdown_table(build_results_table(load_report_data([str(bench)]), None))


@pytest.mark.parametrize(
    ("status", "finished", "said"),
    [
        ("waiting", 2, ("2 of 4 epochs", "same command")),
        ("waiting", 4, ("4 of 4 epochs, not evaluated", "same command")),
        ("waiting", 0, ("0 of 4 epochs", "same command")),
        ("running", 2, ("running", "killed", "2 of 4 epochs")),
    ],
)
def test_an_interrupted_run_of_a_bench_says_how_far_it_got(tmp_path, status, finished, said):
    make_run(tmp_path / "a", finished=finished)
    rows = [{"name": "m+deat", "method": "m+deat", "model": "small", "runs": [one_run("a", 0, status)]}]
    (row,) = load_report_data([str(make_bench(tmp_path, rows))]).rows
    (problem,) = list_run_problems(row)
    assert problem.startswith("seed 0: ")
    assert all(words in problem for words in said)


def test_a_table_says_that_warm_up_is_not_in_its_minutes_where_there_was_some(tmp_path):
    make_run(tmp_path / "a", shares={"natural": 0.9})
    of = build_results_table(load_report_data([str(tmp_path / "a")]), None)
    assert not [note for note in collect_table_notes(of) if "warm-up" in note]
    append_record(tmp_path / "a" / "timing.jsonl", EpochTiming(9, 30.0, 0.0, 1.0, warm_up_seconds=11.6))
    of = build_results_table(load_report_data([str(tmp_path / "a")]), None)
    for text in (render_markdown_table(of), render_latex_table(of)):
        assert re.search(r"Minutes exclude warm-up.*: up to 12 s a run\.", text)


def test_minutes_of_a_crowded_machine_and_flagged_rows_are_marked(tmp_path):
    flag = Flag("one_step_wins", "fgsm leaves less", "use restarts")
    make_run(tmp_path / "a", shares={"natural": 0.9}, flags=(flag,))
    bench = make_bench(tmp_path, [{"name": "x", "method": "x", "model": "small", "runs": [one_run("a", jobs=3)]}])
    of = build_results_table(load_report_data([str(bench)]), None)
    assert "| 0.30* |" in render_markdown_table(of)
    assert "\n\\* minutes measured while" in render_markdown_table(of)
    assert "⚑ one_step_wins" in render_markdown_table(of)
    assert any(note.startswith("*") for note in collect_table_notes(of))
    assert any(note.startswith("⚑") for note in collect_table_notes(of))


def test_the_page_s_settings_show_radii_and_steps_as_people_write_them_but_for_those_in_units_of_eps():
    told = {"threat": {"eps": 8 / 255}, "method": {"schedule": {"alpha": 1 / 3}}, "attacks": {"x": {"alpha": 2 / 255}}}
    shown = {"threat.eps": "8/255", "method.schedule.alpha": "0.333333", "attacks.x.alpha": "2/255"}
    assert flatten_record(told) == shown


def test_a_row_evaluated_as_a_cascade_is_labelled_and_has_no_value_in_an_attack_s_column(tmp_path):
    for name, eps, cascade in (("a", 8 / 255, False), ("b", 4 / 255, True)):
        threat = {"threat": {"norm": "linf", "eps": eps}}
        make_run(tmp_path / name, shares={"natural": 0.9, "pgd-20": 0.5}, record=threat)
        file = tmp_path / name / "evaluation.json"
        told = json.loads(file.read_text())
        told.pop("checksum", None)
        file.write_text(json.dumps({**told, "settings": {**told["settings"], "cascade": cascade}}))
    subject = load_report_data([str(tmp_path / "a"), str(tmp_path / "b")])
    lines = [line.split("|") for line in render_markdown_table(build_results_table(subject, None)).splitlines()]
    pgd = {cells[1].strip(): cells[3].strip() for cells in lines if len(cells) > 3}
    assert (pgd["m+deat eps=8/255"][:5], pgd["m+deat eps=4/255"]) == ("50.00", "—")
    (note,) = [note for note in subject.notes if "cascade" in note]
    assert note.endswith(": m+deat eps=4/255 seed 0.")


def test_a_row_evaluated_without_sanity_checks_says_so(tmp_path):
    make_run(tmp_path / "a", shares={"natural": 0.9})
    make_run(tmp_path / "b", "pgd-7", seed=3, shares={"natural": 0.9})
    file = tmp_path / "b/evaluation.json"
    told = json.loads(file.read_text())
    told.pop("checksum", None)
    file.write_text(json.dumps({**told, "settings": {**told["settings"], "sanity": False}}))
    named = (("x", one_run("a")), ("y", one_run("b", 3)))
    rows = [{"name": name, "method": name, "model": "m", "runs": [run]} for name, run in named]
    bench = make_bench(tmp_path, rows)
    of = build_results_table(load_report_data([str(bench)]), None)
    lines = {
        line.split("|")[1].strip(): line for line in render_markdown_table(of).splitlines() if line.startswith("|")
    }
    assert ("sanity not checked" in lines["y"], "sanity not checked" in lines["x"]) == (True, False)
    (note,) = [note for note in collect_table_notes(of) if "checked" in note]
    assert note.startswith("Sanity not checked: y seed 3.")
    assert "sanity not checked</span>" in table_html(of)
    assert "sanity not checked: y, seed 3" in bench_command.collect_notes(load_bench(bench))


def paper_bench(tmp_path, jobs=1, **settings):
    """Three rows of the paper's standard table whose costs are 4, 8 and 6."""
    rows = []
    for name, cost in (("m+deat", 4), ("pgd-7", 8), ("mart", 6)):
        request = {"request": {"gamma": settings.get("set", {}).get("gamma") if "m+" in name else None}}
        make_run(tmp_path / name, name, cost=cost, shares={"natural": 0.9, "cw-20": 0.4}, record=request)
        paper = {"table": "cifar10_result_std", "row": f"preact_resnet18 {name}"}
        rows.append({"name": name, "method": name, "model": "m", "paper": paper, "runs": [one_run(name, jobs=jobs)]})
    return load_report_data([str(make_bench(tmp_path, rows, "cifar10-standard", "Table 3", **settings))])


def test_the_papers_value_stands_beside_ours_and_misprints_are_marked(tmp_path):
    text = render_markdown_table(build_results_table(paper_bench(tmp_path), None))
    assert "paper 83.93 |" in text
    assert "paper 78.04† (75.86)" in text
    assert "paper 102.1" in text
    assert "† a misprint" in text
    assert "\\dag{}" in render_latex_table(build_results_table(load_report_data([str(tmp_path)]), None))


def test_claims_are_computed_where_both_rows_are_there_and_say_what_lacks_where_one_is(tmp_path):
    found = check_claims(paper_bench(tmp_path, jobs=2).rows)
    first = found[0]
    assert first.claim.percent == 35
    assert first.backprops == pytest.approx(50)
    assert first.seconds == pytest.approx(50)
    assert first.ran_concurrently
    assert "free-6" in found[1].missing
    assert found[1].backprops is None
    text = render_claims_table(found)
    assert "| 35 % | 35.1 % | 50 % | 50 %* |" in text
    assert "| no finished run of preact_resnet18 free-6 of Table 3 (CIFAR-10 under the standard" in text
    assert [c.claim.percent for c in found] == [35, 17, 40]


def test_claims_that_no_run_is_about_are_left_out(tmp_path):
    make_run(tmp_path / "a", shares={"natural": 0.9, "pgd-20": 0.4})
    assert check_claims(load_report_data(paths(tmp_path)).rows) == []


GIVEN = {"data": "folder:tiny", "set": {"epochs": "1", "engine": "eager", "aa_n": "10"}, "budget_bp": 150}


def test_the_papers_numbers_beside_other_settings_are_marked_and_the_settings_told(tmp_path):
    subject = paper_bench(tmp_path, **GIVEN)
    of, claims = build_results_table(subject, None), check_claims(subject.rows)
    told = "data folder:tiny (the paper's images only if the folder holds them), a budget of 150 backprops, epochs=1"
    assert subject.notes[0].startswith(f"All rows: with {told} instead of the recipe's settings. ‡ marks")
    assert subject.notes[0] in collect_table_notes(of)
    assert "paper 83.93‡ |" in render_markdown_table(of)
    assert "paper 78.04† (75.86)‡" in render_markdown_table(of)
    assert "paper 102.1‡" in render_markdown_table(of)
    assert "<small>paper 83.93‡</small>" in table_html(of)
    assert "\\deatpaper{paper\\ddag{}} & \\deatpaper{83.93}" in render_latex_table(of)
    assert next(csv.DictReader(io.StringIO(render_csv_table(of))))["given"] == told.replace(", ", "; ")
    for text in (render_claims_table(claims), render_section("claims", build_claims(claims))):
        assert "50 %‡" in text
        assert f"‡ From runs with {told}" in text.replace("&#39;", "'")


@pytest.mark.parametrize("settings", [{}, {"data": "cifar10", "set": {"workers": "2", "block": "100"}}])
def test_settings_that_change_neither_training_nor_judging_mark_nothing(tmp_path, settings):
    subject = paper_bench(tmp_path, **settings)
    assert not any("recipe" in note for note in subject.notes)
    assert "‡" not in render_markdown_table(build_results_table(subject, None)) + render_claims_table(
        check_claims(subject.rows)
    )


def test_a_methods_own_setting_marks_the_rows_that_it_reached(tmp_path):
    subject = paper_bench(tmp_path, data="cifar10", set={"gamma": "1.2"})
    assert [row.deviations for row in subject.rows] == [("gamma=1.2",), (), ()]
    assert subject.notes[0].startswith("m+deat: with gamma=1.2 instead")


def test_a_claim_is_held_against_finished_runs_in_the_papers_setup_first(tmp_path):
    rows = [*paper_bench(tmp_path / "a", **GIVEN).rows, *paper_bench(tmp_path / "b").rows]
    assert check_claims(rows)[0].deviations == ()
    assert check_claims([replace(row, runs=()) if not row.deviations else row for row in rows])[0].deviations != ()


def test_what_a_budget_left_over_is_remarked(tmp_path):
    of = build_results_table(paper_bench(tmp_path, budget_bp=330), None)
    (first, second, third) = (collect_remarks(row) for row in of.rows)
    assert (first, second, third) == (
        ["170 of 330 backprops not spent"],
        ["10 of 330 backprops not spent"],
        ["90 of 330 backprops not spent"],
    )
    assert "170 of 330 backprops not spent" in render_markdown_table(of)
    assert "170 of 330 backprops not spent" in table_html(of)


def test_the_report_says_which_tables_the_papers_numbers_are_from(tmp_path):
    subject = paper_bench(tmp_path)
    assert subject.paper_tables == ("Table 3",)
    assert "The paper's numbers are from its Table 3." in collect_table_notes(build_results_table(subject, None))


def test_a_row_that_costs_more_is_reported():
    assert format_saving(-12.4) == "12 % more"
    assert format_saving(None) == "—"


def test_runs_that_differ_in_their_seed_alone_make_one_row_and_others_are_distinguished(tmp_path):
    make_run(tmp_path / "a", seed=0, shares={"natural": 0.9})
    make_run(tmp_path / "b", seed=1, shares={"natural": 0.8})
    make_run(tmp_path / "c", seed=0, epochs=5, shares={"natural": 0.7})
    rows = load_report_data(paths(tmp_path)).rows
    assert [(row.name, len(row.runs)) for row in rows] == [("m+deat epochs=4", 2), ("m+deat epochs=5", 1)]


def test_rows_are_distinguished_by_no_more_settings_than_that_needs(tmp_path):
    def run(data, eps, batch_size=64):
        about = {"data": {"name": data, "train": 640, "held_out": 64, "classes": ["0", "1"]}}
        settings = {"epochs": 4, "seed": 0, "batch_size": batch_size, "val_attack": "pgd-20", "lr": batch_size / 1000}
        record = {**about, "threat": {"norm": "linf", "eps": eps}, "settings": settings}
        return str(make_run(tmp_path / f"{data} {eps:.3f} {batch_size}", shares={"natural": 0.9}, record=record))

    digits, photos = run("digits", 0.15), run("cifar10", 8 / 255, 128)
    assert [row.name for row in load_report_data([digits, photos]).rows] == ["m+deat digits", "m+deat cifar10"]
    near, often = run("cifar10", 4 / 255, 128), run("cifar10", 4 / 255, 32)
    names = [row.name for row in load_report_data([digits, photos, near]).rows]
    assert names == ["m+deat digits eps=0.15", "m+deat cifar10 eps=8/255", "m+deat cifar10 eps=4/255"]
    assert [row.name for row in load_report_data([near, often]).rows] == [
        "m+deat batch_size=128",
        "m+deat batch_size=32",
    ]


def test_a_run_that_the_watch_stopped_is_whole_and_one_that_was_cut_off_is_not(tmp_path):
    shares = {"natural": 0.9}
    cut = make_run(tmp_path / "a", shares=shares, finished=3, record={"watch": "warn"})
    ended = make_run(tmp_path / "b", shares=shares, finished=3, record={"watch": "stop"})
    for run, action in ((cut, "warn"), (ended, "stop")):
        append_record(run / "watch.jsonl", EpochWatch(3, 2, 0.15, 0.9, 0.1, 900.0, "it fell", action))
    first, second = load_report_data(paths(tmp_path)).rows
    assert (first.name, second.name) == ("m+deat watch=warn", "m+deat watch=stop")
    assert summarize_accuracy(first, "natural") is None
    assert list_run_problems(first) == ["seed 0: 3 of 4 epochs"]
    assert summarize_accuracy(second, "natural").mean == 0.9
    (problem,) = list_run_problems(second)
    assert "stopped by the overfit watch" in problem
    assert "epoch 3 of 4" in problem


def test_rows_that_cannot_be_compared_are_reported(tmp_path):
    make_run(tmp_path / "a", shares={"natural": 0.9})
    make_run(tmp_path / "b", "pgd-7", shares={"natural": 0.9}, images=100)
    assert "number of test examples (100, 200)" in load_report_data(paths(tmp_path)).notes[0]


def test_a_folder_named_twice_counts_once_and_a_seed_that_ran_twice_is_reported(tmp_path):
    make_run(tmp_path / "a", shares={"natural": 0.9})
    (row,) = load_report_data([str(tmp_path / "a"), str(tmp_path / "a" / ".." / "a")]).rows
    assert len(row.runs) == 1
    make_run(tmp_path / "c", shares={"natural": 0.8})
    assert any("several runs of seed 0" in note for note in load_report_data(paths(tmp_path)).notes)


def test_the_front_is_what_no_other_row_beats():
    points = [(1, 0.3), (2, 0.5), (3, 0.4), (2, 0.6), (4, 0.6), (1, 0.3)]
    assert find_pareto_front(points) == [True, False, False, True, False, True]


@pytest.mark.parametrize(
    ("shares", "below"),
    [
        ([0.12, 0.75, 0.83], [True, False, False]),
        ([0.1, 0.2, 0.3, 0.4, 0.5], [False] * 5),  # evenly apart: each is as far from the next
        ([0.1, 0.8], [False] * 2),  # nothing is squeezed
        ([0.0, 0.02, 0.4, 0.45], [True, True, False, False]),
        ([0.0, 0.0], [False] * 2),
        ([], []),
    ],
)
def test_only_what_squeezes_the_others_together_is_far_below(shares, below):
    assert find_low_outliers(shares) == below


def test_the_picture_of_cost_names_its_points_and_leaves_room_for_the_robust_ones(tmp_path):
    plt = pytest.importorskip("matplotlib.pyplot")
    flag = Flag("masked", "x", "y")
    for n, (name, share) in enumerate((("natural", 0.1), ("free-4", 0.8), ("pgd-7", 0.78), ("fgsm", 0.9))):
        flags = (flag,) if name == "fgsm" else ()
        make_run(tmp_path / name, name, cost=n + 2, shares={"natural": 0.9, "pgd-20": share}, flags=flags)
    rows = load_report_data(paths(tmp_path)).rows
    panel = build_trade_off_figure(rows, "pgd-20").panels[0]
    assert {line.row for line in panel.lines if line.on_front} == {"natural", "free-4"}
    assert [line.row for line in panel.lines if line.is_low_outlier] == ["natural"]
    canvas, ax = plt.subplots()
    _draw_panel(ax, panel, {})
    canvas.draw_without_rendering()
    draw_point_names(ax, panel, str, lambda name: "black")
    low, high = ax.get_ylim()
    filled = {line.get_label() for line in ax.lines if line.get_markerfacecolor() not in ("white", "#8a8f98")}
    names = [text.get_text() for text in ax.texts]
    plt.close(canvas)
    assert 60 < low < 78 < 90 < high < 100
    assert filled == {"natural", "free-4"}
    assert names == ["natural ↓ 10.00 %", "free-4", "fgsm ⚑", "pgd-7"]


def test_a_row_that_should_not_be_believed_neither_wins_nor_is_on_the_front(tmp_path):
    flag = Flag("at_chance", "one answer for all", "train again")
    make_run(tmp_path / "a", "free-4", shares={"natural": 0.6, "pgd-20": 0.6}, flags=(flag,))
    make_run(tmp_path / "b", "pgd-7", shares={"natural": 0.9, "pgd-20": 0.4})
    subject = load_report_data(paths(tmp_path))
    of = build_results_table(subject, None)
    assert [item[1].name for item in rank_rows(of)] == ["pgd-7"]
    assert find_front_indices(of) == {1}
    for panel in build_trade_off_figure(subject.rows, "pgd-20").panels:
        (line,) = [line for line in panel.lines if line.row == "Pareto front"]
        assert line.y == [0.4]


def test_where_every_row_is_flagged_they_are_compared_all_the_same(tmp_path):
    flag = Flag("at_chance", "one answer for all", "train again")
    make_run(tmp_path / "a", "free-4", shares={"natural": 0.6, "pgd-20": 0.6}, flags=(flag,))
    make_run(tmp_path / "b", "pgd-7", shares={"natural": 0.9, "pgd-20": 0.4}, flags=(flag,))
    assert len(rank_rows(build_results_table(load_report_data(paths(tmp_path)), None))) == 2


def test_the_headline_is_the_strongest_attack_that_most_rows_have(tmp_path):
    make_run(tmp_path / "a", shares={"natural": 0.9, "pgd-20": 0.4, "cw-20": 0.3, "aa": 0.2})
    make_run(tmp_path / "b", "pgd-7", shares={"natural": 0.9, "cw-20": 0.3, "pgd-20": 0.4})
    rows = load_report_data(paths(tmp_path)).rows
    assert choose_ranking_attack(rows) == "cw-20"
    assert list_attacks(rows) == ["natural", "pgd-20", "cw-20", "aa", "worst"]
    assert [format_attack_name(a) for a in ("pgd-50x10", "cw-20-last", "aa")] == [
        "PGD-50×10",
        "CW-20, last iterate",
        "AA",
    ]
    assert summarize_accuracy(rows[1], "aa") is None


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ({"natural": 0.9, "cw-20": 0.3, "pgd-20": 0.4}, "worst"),
        ({"natural": 0.9, "pgd-20": 0.4}, "pgd-20"),
        ({"natural": 0.9, "pgd-20": 0.4, "fgsm": 0.5}, "pgd-20"),
    ],
    ids=["the same attacks", "fewer", "others"],
)
def test_the_headline_is_the_worst_of_all_where_all_rows_were_evaluated_by_the_same_attacks(tmp_path, shares, expected):
    make_run(tmp_path / "a", shares={"natural": 0.9, "pgd-20": 0.4, "cw-20": 0.3})
    make_run(tmp_path / "b", "pgd-7", shares=shares)
    subject = load_report_data(paths(tmp_path))
    assert choose_ranking_attack(subject.rows) == expected
    title = build_winner_cards(build_results_table(subject, None))["cards"][0]["title"]
    assert (title == "Most robust under the worst of all attacks") == (expected == "worst")


def test_folders_and_rows_that_are_not_there_are_refused_by_name(tmp_path):
    with pytest.raises(DataError, match=r"neither run\.json nor bench\.json"):
        load_report_data([str(tmp_path)])
    run = make_run(tmp_path / "a", shares={"natural": 0.9})
    with pytest.raises(UsageError, match=r"unknown row 'm\+deta'.*'m\+deat'"):
        build_results_table(load_report_data([str(run)]), "m+deta")
    (run / "evaluation.json").write_text("{}")
    with pytest.raises(DataError, match=r"evaluation\.json that deat wrote"):
        load_report_data([str(run)])


def test_a_curve_over_seeds_is_the_mean_of_those_that_got_as_far():
    lines = [PlotLine("a", 0, [1.0, 2.0, 3.0], [0.2, None, 0.6]), PlotLine("a", 1, [1.0, 2.0], [0.4, None])]
    found = average_lines(lines)
    assert found.x == [1.0, 2.0, 3.0]
    assert found.y == [pytest.approx(0.3), None, 0.6]


def test_step_size_and_gamma_are_compared_within_a_method_only(tmp_path):
    for name, alpha in (("m+deat", 1.25), ("m+deat", 1.0), ("m+pgd", 0.25)):
        schedule = {"method": {"name": name, "schedule": {"alpha": alpha, "gamma": 1.01}}}
        make_run(tmp_path / f"{name} {alpha}", name, shares={"natural": 0.9, "pgd-20": 0.5}, record=schedule)
    rows = load_report_data(paths(tmp_path)).rows
    assert [panel.title for panel in build_alpha_gamma_figure(rows, "pgd-20").panels] == ["m+deat, gamma 1.01"]
    assert "of one method" in build_alpha_gamma_figure(rows, None).missing


def test_step_size_and_gamma_are_not_requested_where_no_run_varies_them(tmp_path):
    schedule = {"method": {"name": "m+deat", "schedule": {"alpha": 1.25, "gamma": 1.01}}}
    make_run(tmp_path / "a", shares={"pgd-20": 0.5}, record=schedule)
    make_run(tmp_path / "b", "pgd-7", shares={"pgd-20": 0.5})
    other = {"method": {"name": "m+pgd", "schedule": {"alpha": 0.25, "gamma": 1.01}}}  # its own, not another choice
    make_run(tmp_path / "c", "m+pgd", shares={"pgd-20": 0.5}, record=other)
    figure = build_alpha_gamma_figure(load_report_data(paths(tmp_path)).rows, "pgd-20")
    assert (figure.panels, figure.missing) == ([], "")


def test_accuracies_on_a_sample_are_reported_to_be_also_those_of_autoattack_alone(tmp_path):
    folder = make_run(tmp_path / "a", shares={"natural": 0.9, "pgd-20": 0.5})
    make_run(tmp_path / "b", shares={"natural": 0.9, "aa": 0.4}, images=50)
    found = json.loads((tmp_path / "b" / "evaluation.json").read_text())
    found["settings"]["sample"] = True
    found.pop("checksum", None)
    (folder / "evaluation-aa.json").write_text(json.dumps(found))
    (note,) = [note for note in load_report_data([str(folder)]).notes if "sample" in note]
    assert note.endswith("the first 50 test examples: AA of seed 0 of m+deat.")


def test_the_last_epoch_stands_beside_a_chosen_one(tmp_path):
    folder = make_run(tmp_path / "a", shares={"natural": 0.9})
    make_run(tmp_path / "b", shares={"natural": 0.8})
    (tmp_path / "b" / "evaluation.json").rename(folder / "evaluation-last.json")
    assert "90.00 (85.1 to 93.4); last epoch 80.00 |" in render_markdown_table(
        build_results_table(load_report_data([str(folder)]), None)
    )


def test_a_last_epoch_that_is_as_good_looks_other_than_one_that_was_not_evaluated(tmp_path):
    both, best = (
        make_run(tmp_path / "a", shares={"natural": 0.9, "aa": 0.4}),
        make_run(tmp_path / "b", "pgd-7", **JUDGED),
    )
    for share in (0.9, 0.8):
        late = make_run(tmp_path / f"last {share}", shares={"natural": share})
        (late / "evaluation.json").rename(both / "evaluation-last.json")
        of = build_results_table(load_report_data([str(both), str(best)]), None)
        mine, other = (
            line for line in render_markdown_table(of).splitlines() if line.startswith(("| m+deat", "| pgd-7"))
        )
        said = "the same" if share == 0.9 else "80.00"
        assert f"90.00 (85.1 to 93.4); last epoch {said} |" in mine
        assert "90.00 (85.1 to 93.4); last epoch — |" in other
        assert "40.00 (33.5 to 46.9) |" in mine  # a note says that no last epoch was judged by it
        assert all(f"<small>last epoch {text}</small>" in table_html(of) for text in (said, "—"))


@pytest.mark.parametrize("aside", [False, True])
def test_the_worst_of_other_attacks_is_not_set_beside_and_what_it_covers_is_reported(tmp_path, aside):
    main = {"natural": 0.9, "pgd-20": 0.5} | ({} if aside else {"aa": 0.4})
    folder = make_run(tmp_path / "a", shares=main)
    make_run(tmp_path / "b", shares={"natural": 0.8, "pgd-20": 0.5})
    (tmp_path / "b" / "evaluation.json").rename(folder / "evaluation-last.json")
    if aside:
        make_run(tmp_path / "c", shares={"natural": 0.9, "aa": 0.4}, images=50)
        (tmp_path / "c" / "evaluation.json").rename(folder / "evaluation-aa.json")
    of = build_results_table(load_report_data([str(folder)]), None)
    assert ("worst" in of.attacks) is not aside
    assert "last worst" not in of.rows[0].columns
    told = " ".join(collect_table_notes(of))
    assert ("AA was run separately" if aside else "under all of natural, PGD-20, AA.") in told
    assert "The last epoch was not evaluated with AA" in told
    assert ("its worst is not comparable" in told) is not aside


def test_the_interval_of_a_mean_over_seeds_is_not_that_of_whole_images(tmp_path):
    for seed, share in enumerate((0.10, 0.15)):
        make_run(tmp_path / f"s{seed}", seed=seed, shares={"natural": share}, images=20)
    found = summarize_accuracy(load_report_data(paths(tmp_path)).rows[0], "natural")
    low, high = wilson_interval(125, 1000)
    assert found.low < low < 0.125 < high < found.high
    assert wilson_interval(2, 20)[0] < found.low < wilson_interval(3, 20)[0]
    assert wilson_interval(2, 20)[1] < found.high < wilson_interval(3, 20)[1]


@pytest.mark.parametrize(
    ("jobs", "said"), [((1, 1), ""), ((2, 1), ", some taken with several"), ((2, 2), ", taken with")]
)
def test_the_figure_of_minutes_says_when_several_jobs_ran_at_once(tmp_path, jobs, said):
    rows = []
    for name, many in zip("ab", jobs, strict=True):
        make_run(tmp_path / name, name, shares={"natural": 0.9, "pgd-20": 0.4})
        rows.append({"name": name, "method": name, "model": "m", "runs": [one_run(name, jobs=many)]})
    figure = build_trade_off_figure(load_report_data([str(make_bench(tmp_path, rows))]).rows, "pgd-20")
    panels = list(dict.fromkeys(row[0] for row in figure_to_csv_rows(figure)[1:]))
    assert panels[0] == "PGD-20 accuracy against backprops"
    assert panels[1].startswith(f"PGD-20 accuracy against minutes{said}")
    assert ("several jobs at once" in panels[1]) is bool(said)


def test_what_training_showed_beside_a_run_is_reported_but_makes_no_row(tmp_path):
    folder = make_run(tmp_path / "a", shares={"natural": 0.9})
    scores = [
        ModelScore(name, {"natural": share}, 80, 20, 1.5) for name, share in (("m+deat", 0.9), ("<natural>", 0.95))
    ]
    (folder / "scores.json").write_text(json.dumps([asdict(score) for score in scores]))
    rows = load_report_data([str(folder)]).rows
    assert len(rows) == 1
    assert "| &lt;natural&gt; | 95.0% | 20 | 1.5 |" in render_scores_tables(rows)
    page = render_section("scores", build_scores(rows))
    assert "<td>95.0%</td>" in page
    assert "<natural>" not in page
    (folder / "scores.json").unlink()
    rows = load_report_data([str(folder)]).rows
    assert (render_scores_tables(rows), build_scores(rows)) == ("", [])


def test_a_setting_in_which_rows_differ_is_reported_once_and_with_its_unit():
    held = [
        {"request.method": name, "request.alpha": asked, "settings.lr": "0.05", "schedule": f"Fixed(alpha={alpha})"}
        | {"method.name": name, "method.schedule.alpha": alpha}
        for name, alpha, asked in (("pgd-7", "0.25", "—"), ("free-4", "1", "1"))
    ]
    assert find_differing_settings(["a", "b"], held) == ["method.name", "method.schedule.alpha", "request.alpha"]
    assert find_differing_settings(["pgd-7", "free-4"], held) == ["method.schedule.alpha", "request.alpha"]


def test_what_a_run_found_is_not_among_the_settings_in_which_rows_differ():
    held = [{"settings.lr": lr, "best_epoch.natural": lr + "1", "best_epoch.reason": lr + "2"} for lr in ("1", "2")]
    assert find_differing_settings(["a", "b"], held) == ["settings.lr"]


def test_the_title_of_a_bench_has_the_names_of_methods_and_no_paths_and_the_page_its_date(tmp_path):
    specs = {"m+deat": "m+deat", "free-4": "free-4", "bold": "/home/me/own.py:BOLD"}
    rows = [
        {"name": name, "method": spec, "model": "small", "runs": [one_run(f"{name}/s0", 0)]}
        for name, spec in specs.items()
    ]
    for name in specs:
        make_run(tmp_path / name / "s0", name, shares={"natural": 0.9, "pgd-20": 0.5})
    (tmp_path / "bold" / "s0" / "run.json").unlink()
    args = ReportCommand((str(make_bench(tmp_path, rows)),), no_figures=True, gallery=0)
    story = build_report(load_report_data(args.runs), args)
    assert story.heading.startswith("m+deat, free-4 and bold")
    assert "own.py" not in story.heading
    assert f"{date.today():%Y-%m-%d}" in render_page(story)
    titled = replace(args, title="Ours")
    assert build_report(load_report_data(args.runs), titled).heading == "Ours"


@pytest.mark.parametrize(
    ("y", "percent", "shown", "kind"),
    [
        ("accuracy", True, "accuracy, %", "%"),
        ("change, points", True, "change, points", "points"),
        ("k", False, "k", ""),
    ],
)
def test_an_axis_says_its_unit_and_a_difference_of_shares_is_in_points(y, percent, shown, kind):
    panel = Panel("gain", "epoch", y, [], percent=percent)
    assert (get_y_label(panel), get_unit(panel)) == (shown, kind)


def test_an_axis_says_that_equal_staircases_are_set_apart():
    lines = [PlotLine(name, 0, [1.0, 2.0], [1.0, 2.0]) for name in "ab"]
    shown = [get_y_label(Panel("k", "epoch", "k", held, "step")) for held in (lines, lines[:1])]
    assert "shifted" in shown[0]
    assert shown[1] == "k"


def test_runs_that_were_never_validated_have_no_figure_of_that_name(tmp_path):
    folder = make_run(tmp_path / "a")
    assert build_validation_figure(load_report_data([str(folder)]).rows).title == "Validation accuracy and loss"
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    silent = dict.fromkeys(("val_natural", "val_robust", "val_loss"))
    (folder / "history.jsonl").write_text("".join(json.dumps(line | silent) + "\n" for line in lines))
    figure = build_validation_figure(load_report_data([str(folder)]).rows)
    assert (figure.title, [panel.title for panel in figure.panels]) == ("Training loss", ["train loss (as minimised)"])


@pytest.mark.parametrize(
    ("silent", "title", "heads"),
    [
        ((), "Validation accuracy and loss", "Validation and training loss"),
        (("val_loss",), "Validation accuracy and training loss", "Training loss"),
        (("val_natural", "val_robust"), "Validation and training loss", "Validation and training loss"),
        (("val_natural", "val_robust", "val_loss"), "Training loss", "Training loss"),
    ],
)
def test_a_heading_promises_no_panel_that_is_not_below_it(tmp_path, silent, title, heads):
    folder = make_run(tmp_path / "a")
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    (folder / "history.jsonl").write_text("".join(json.dumps(line | dict.fromkeys(silent)) + "\n" for line in lines))
    subject = load_report_data([str(folder)])
    assert build_validation_figure(subject.rows).title == title
    text = render_page(
        build_report(subject, ReportCommand((str(folder),), gallery=0, no_figures=True))
    )  # whose accuracies stand further up
    (section,) = re.findall(r'<section aria-labelledby="validation">.*?</section>', text, re.S)
    assert f">{heads}</h2>" in section
    assert "accuracy" not in section


def test_the_figure_of_cost_has_the_tables_intervals(three_seeds):
    rows = load_report_data(paths(three_seeds)).rows
    head, *body = figure_to_csv_rows(build_trade_off_figure(rows, "aa"))
    drawn = {row[1]: row[head.index("low") :] for row in body if row[0] == "AA accuracy against backprops"}
    assert drawn == {
        row.name: [summarize_accuracy(row, "aa").low, summarize_accuracy(row, "aa").high] for row in rows
    } | {"Pareto front": ["", ""]}


def test_gains_are_drawn_as_bars_in_a_lane_for_each_row(tmp_path):
    plt = pytest.importorskip("matplotlib.pyplot")
    for n, name in enumerate(("a rather long name", "b", "c", "d", "e")):
        for seed in (0, 1):
            make_run(tmp_path / f"{n}{seed}", name, seed=seed)
    (panel,) = [
        p
        for p in build_training_process_figure(load_report_data(paths(tmp_path)).rows).panels
        if p.title == "robustness gain"
    ]
    canvas, ax = plt.subplots()
    _draw_panel(ax, panel, {})
    canvas.draw_without_rendering()
    names = [text.get_text() for text in ax.get_yticklabels()]
    bars = [[(bar.get_y(), bar.get_y() + bar.get_height()) for bar in lane] for lane in ax.containers]
    said = ax.get_title(loc="left")
    plt.close(canvas)
    assert names == ["a rather long name", "b", "c", "d", "e"]
    assert [len(lane) for lane in bars] == [3] * 5
    for above, below in itertools.pairwise(bars):
        assert min(map(min, above)) >= max(map(max, below))
    assert re.fullmatch(r"robustness gain, means over seeds; a lane is \d+ points high", said)


def test_epochs_and_steps_are_counted_in_whole_numbers_on_every_axis(tmp_path):
    plt = pytest.importorskip("matplotlib.pyplot")
    rows = load_report_data([str(make_run(tmp_path / "a", epochs=3, cost=2))]).rows
    canvas, ax = plt.subplots()
    _draw_panel(ax, build_backprops_figure(rows).panels[0], {})
    canvas.canvas.draw()
    ticks = [*ax.get_xticks(), *ax.get_yticks()]
    plt.close(canvas)
    assert all(tick == int(tick) for tick in ticks)


@pytest.mark.parametrize("scheme", ["color-scheme: light", "color-scheme: dark"])
def test_rows_of_one_shape_have_colours_that_every_kind_of_eye_distinguishes(scheme):
    block = read_asset("page.css").split(scheme)[1].split("}")[0]
    hues = re.findall(r"--c\d: #([0-9a-f]{6});", block)
    assert len(hues) == len(ROW_COLORS)
    pairs = [(a, b) for n, a in enumerate(hues) for b in hues[n + 3 :: 3]]
    assert min(distance(a, b, eye) for a, b in pairs for eye in EYES.values()) > 15


def test_pictures_and_page_give_a_row_the_same_colour():
    light = read_asset("page.css").split("}")[0]
    assert tuple(re.findall(r"--c\d: (#[0-9a-f]{6});", light)) == ROW_COLORS


def test_rows_that_were_evaluated_of_another_epoch_or_on_other_images_are_reported(tmp_path):
    for name, about in (("a", {"epoch": "best", "data": "digits"}), ("b", {"epoch": "last", "data": "folder:x"})):
        file = make_run(tmp_path / name, name, shares={"natural": 0.9, "pgd-20": 0.5}) / "evaluation.json"
        held = json.loads(file.read_text())
        held["settings"]["about"] = about
        held.pop("checksum", None)
        file.write_text(json.dumps(held))
    found = load_report_data([str(tmp_path / name) for name in ("a", "b")])
    assert any("Rows differ in their evaluated epoch (best, last)" in note for note in found.notes)
    assert any("b seed 0 was trained on digits but evaluated on examples of folder:x" in note for note in found.notes)


@pytest.mark.parametrize(
    ("text", "shown"), [("accuracy", "Accuracy"), ("exact match, mAP", "Exact match, mAP"), ("mIoU in percent",) * 2]
)
def test_a_metric_with_capitals_of_its_own_keeps_its_name_at_the_beginning_of_a_sentence(text, shown):
    assert capitalize_sentence(text) == shown
