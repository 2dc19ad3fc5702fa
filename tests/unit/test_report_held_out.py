"""Runs that were trained and not evaluated: their validation results are shown, and never taken for test results."""

import csv
import io
import json
import math

import pytest
import torch

import deat
from deat.cli.main import main
from deat.cli.report import ReportCommand, build_report, report_to_json
from deat.report.figure_data import build_trade_off_figure
from deat.report.html import render_page
from deat.report.page_data import build_held_out, build_warnings, find_front_indices, rank_rows
from deat.report.problems import list_run_problems
from deat.report.report_data import load_report_data
from deat.report.results_table import build_results_table, render_csv_table, render_markdown_table
from deat.report.row_statistics import list_attacks
from deat.report.run_results import load_run_results
from deat.report.validation_results import (
    EVALUATE_COMMANDS_INTRO,
    HELD_OUT_TITLE,
    collect_held_out_results,
    format_held_out_cells,
    get_held_out_header,
    list_evaluate_commands,
    render_held_out_markdown,
)
from deat.utils.safetensors_files import encode_tensors
from helpers.page_sections import render_section
from helpers.runs import make_bench, make_run, one_run


@pytest.fixture
def mixed(tmp_path):
    """Two evaluated runs, and a cheaper one of two seeds that is not, whose held-out accuracy is the highest."""
    make_run(tmp_path / "a", shares={"natural": 0.9, "pgd-20": 0.3}, cost=4)
    make_run(tmp_path / "b", "pgd-7", shares={"natural": 0.8, "pgd-20": 0.4}, cost=8)
    for seed in (0, 1):
        make_run(tmp_path / f"c{seed}", "free-4", seed=seed, cost=2, kept=2 + seed)
    return tmp_path


def held_out_html(rows):
    return render_section("held_out", build_held_out(rows))


def reported(folder):
    return build_results_table(load_report_data([str(path) for path in sorted(folder.iterdir())]), None)


def test_held_out_figures_are_those_of_the_epochs_whose_weights_were_kept_as_the_best(mixed):
    of = reported(mixed)
    (one,) = collect_held_out_results(of.rows)
    best = [load_run_results(mixed / f"c{seed}").history[1 + seed] for seed in (0, 1)]
    assert (one.row, one.seeds, one.attack, one.images, one.total_epochs) == ("free-4", (0, 1), "pgd-20", 64, 4)
    assert one.natural.values == tuple(b.val_natural for b in best)
    assert one.robust.values == tuple(b.val_robust for b in best)
    assert one.best_epochs == (2, 3)
    shown = format_held_out_cells(one, [one])
    assert shown[1] == f"{100 * one.robust.mean:.2f} ± {100 * one.robust.sd:.2f}"
    assert get_held_out_header([one])[:3] == ["row", "held-out natural", "held-out PGD-20"]
    assert shown[-3:] == ["80", "0.20", "0, 1"]  # backprops and minutes, which are known as well


def test_held_out_figures_stand_in_no_test_column_and_win_nothing(mixed):
    of = reported(mixed)
    assert list_attacks(of.rows) == ["natural", "pgd-20", "worst"]
    assert {row.name for _, row, *_ in rank_rows(of)} == {"m+deat", "pgd-7"}
    assert find_front_indices(of) == {0, 1}
    assert all(
        line.row != "free-4"
        for panel in build_trade_off_figure(of.rows, of.ranking_attack).panels
        for line in panel.lines
    )
    (line,) = [text for text in render_markdown_table(of).splitlines() if text.startswith("| free-4")]
    assert [part.strip() for part in line.split("|")[2:7]] == ["—"] * 5
    (row,) = [r for r in csv.DictReader(io.StringIO(render_csv_table(of))) if r["row"] == "free-4"]
    assert (row["natural"], row["pgd-20"], row["backprops"]) == ("", "", "")
    assert float(row["held_out_robust"]) == collect_held_out_results(of.rows)[0].robust.mean


def test_markdown_and_page_show_them_under_their_own_heading_with_the_command_that_fills_the_columns(mixed):
    of = reported(mixed)
    command = f"deat evaluate {mixed / 'c0'} --attacks natural,pgd-20"
    text, part = render_held_out_markdown(of.rows), held_out_html(of.rows)
    assert f"## {HELD_OUT_TITLE}" in text
    assert command in text.split("```")[1].splitlines()
    for told in (text, part):
        assert "not test results" in told
        assert EVALUATE_COMMANDS_INTRO in told
    assert command in part
    whole = render_page(build_report(of.data, ReportCommand((str(mixed),), gallery=0, no_figures=True)))
    assert "".join(part.split()) in "".join(whole.split())
    assert "Incomplete runs" not in [box["title"] for box in build_warnings(of.data)]  # nothing is wrong with them


def test_json_has_them_apart(mixed):
    of = reported(mixed)
    told = report_to_json(build_report(of.data, ReportCommand((str(mixed),), gallery=0, no_figures=True)))
    assert [row["held_out"] is None for row in told["rows"]] == [True, True, False]
    assert told["rows"][2]["accuracy"] == {}
    assert told["to_evaluate"] == list_evaluate_commands(of.rows)
    json.dumps(told, allow_nan=False)


def test_runs_are_to_be_evaluated_by_the_attacks_and_on_the_images_of_those_that_are(tmp_path):
    make_run(tmp_path / "new")
    assert list_evaluate_commands(reported(tmp_path).rows) == [f"deat evaluate {tmp_path / 'new'}"]
    make_run(tmp_path / "old", "pgd-7", shares={"natural": 0.9, "aa": 0.3}, images=50)
    path = tmp_path / "old/evaluation.json"
    held = json.loads(path.read_text())
    held.pop("checksum", None)
    path.write_text(json.dumps({**held, "settings": {**held["settings"], "sample": True, "available": 200}}))
    assert list_evaluate_commands(reported(tmp_path).rows) == [
        f"deat evaluate {tmp_path / 'new'} --attacks natural,aa --n 50"
    ]


def test_a_network_of_your_own_is_named_in_the_command_and_a_folder_s_spaces_are_quoted(tmp_path):
    make_run(tmp_path / "my run", kept=4, record={"request": {"model": "my_net.py:Net", "data": "digits"}})
    (told,) = list_evaluate_commands(reported(tmp_path).rows)
    assert told == f"deat evaluate '{tmp_path / 'my run'}' --model my_net.py:Net"


def test_where_nothing_is_evaluated_no_table_of_dashes_is_shown_and_what_is_unfinished_is_reported(tmp_path):
    from deat.cli.report import _format_markdown

    make_run(tmp_path / "a", kept=4)
    make_run(tmp_path / "b", "pgd-7", finished=2, kept=1, record={"settings": {**settings(), "val_attack": "fgsm"}})
    of = reported(tmp_path)
    story = build_report(of.data, ReportCommand((str(tmp_path),), gallery=0, no_figures=True))
    text, whole = _format_markdown(story), render_page(story)
    assert "—" not in text
    assert "No run is evaluated yet.\n\npgd-7, seed 0: 2 of 4 epochs\n" in text
    assert 'id="table"' not in whole
    found = collect_held_out_results(of.rows)
    assert get_held_out_header(found)[2] == "held-out under attack"
    assert format_held_out_cells(found[1], found)[1].endswith(" (FGSM)")
    assert format_held_out_cells(found[1], found)[2] == "1 of 4"
    assert list_evaluate_commands(of.rows) == [f"deat evaluate {tmp_path / 'a'}"]  # the other one goes on first


def settings():
    return {"epochs": 4, "seed": 0, "batch_size": 64, "lr": 0.05}


def test_held_out_values_of_a_regression_are_its_own_metric_and_not_percent(tmp_path):
    make_run(tmp_path / "a", kept=2)
    record = json.loads((tmp_path / "a" / "run.json").read_text())
    (tmp_path / "a" / "run.json").write_text(json.dumps({**record, "task": deat.tasks.Regression().describe()}))
    rows = reported(tmp_path).rows
    (result,) = collect_held_out_results(rows)
    natural = load_run_results(tmp_path / "a").history[1].val_natural
    assert format_held_out_cells(result, [result])[0] == f"{natural:.3f}"
    text = render_held_out_markdown(rows)
    assert "R2" in text
    assert "percent" not in text


def test_runs_that_failed_or_were_not_validated_have_no_held_out_figures(tmp_path):
    make_run(tmp_path / "failed", kept=4)
    make_run(tmp_path / "blind", "pgd-7", kept=2)
    lines = (tmp_path / "blind/history.jsonl").read_text().splitlines()
    blind = [json.dumps({**json.loads(line), "val_natural": None, "val_robust": None}) for line in lines]
    blind[1] = json.dumps({**json.loads(lines[1]), "val_natural": math.nan, "val_robust": math.nan})
    (tmp_path / "blind/history.jsonl").write_text("\n".join(blind) + "\n")
    rows = [{"name": "x", "method": "x", "model": "small", "runs": [one_run("failed", 0, "failed", "out of memory")]}]
    make_bench(tmp_path / ".", rows)
    failed, blind = load_report_data([str(tmp_path), str(tmp_path / "blind")]).rows
    assert collect_held_out_results([failed, blind]) == []
    assert render_held_out_markdown([failed]) == ""
    assert build_held_out([failed]) is None
    assert (list_run_problems(failed), list_run_problems(blind)) == (
        ["seed 0: out of memory"],
        ["seed 0: not evaluated"],
    )
    assert EVALUATE_COMMANDS_INTRO in held_out_html([blind])


def test_a_hostile_name_in_a_record_is_harmless(tmp_path, capsys):
    hostile = "<b>`|\x1b[31m\nx.py:Net"
    make_run(
        tmp_path / "a",
        kept=4,
        record={"request": {"model": hostile, "data": "digits"}, "settings": {**settings(), "val_attack": hostile}},
    )
    of = reported(tmp_path)
    assert main(["report", str(tmp_path / "a"), "--no-figures", "--out", str(tmp_path / "r")]) == 0
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err
    for told in (render_held_out_markdown(of.rows), held_out_html(of.rows)):
        assert "\x1b" not in told
    assert "<b>" not in held_out_html(of.rows)
    assert render_held_out_markdown(of.rows).count("```") == 2


@pytest.mark.parametrize("note", [None, "", "x", "[]", "{}", '{"epoch": 9}', '{"epoch": null}'])
def test_a_run_whose_best_weights_name_none_of_its_epochs_has_no_held_out_figures(tmp_path, note):
    folder = make_run(tmp_path / "a", kept=4)
    (folder / "best/model.safetensors").write_bytes(encode_tensors({"w": torch.zeros(1)}, note))
    assert collect_held_out_results(reported(tmp_path).rows) == []
