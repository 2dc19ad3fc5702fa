"""Collapses that the overfit watch logged are in every table of a report."""

import json

import pytest

from deat.cli.main import main
from deat.errors import DataError
from deat.report.latex import render_latex_table
from deat.report.page_data import build_table, build_warnings
from deat.report.problems import describe_noted_jumps, list_run_problems, list_watch_alarms
from deat.report.report_data import load_report_data
from deat.report.results_table import build_results_table, render_csv_table, render_markdown_table
from deat.training.epoch_records import EpochWatch, append_record
from helpers.page_sections import render_section
from helpers.runs import make_bench, make_run, one_run

FELL = "pgd-10 accuracy fell from 65.5% to 43.2%, with fgsm accuracy at 63.3%"
SAID = "catastrophic overfitting in epoch 3 (warning only)"


def epoch(n, single=0.6, multi=0.55, reason=None, action=None):
    return EpochWatch(n, 1, 0.15, single, multi, 300.0, reason, action)


@pytest.fixture
def subject(tmp_path):
    """A bench of a row that collapsed in its second seed, and of one whose l_X jumped twice."""
    rows = []
    for name in ("m+deat", "fgsm"):
        for seed in (0, 1):
            make_run(tmp_path / f"{name}{seed}", name, seed=seed, shares={"natural": 0.9, "pgd-20": 0.5})
        runs = [one_run(f"{name}{seed}", seed) for seed in (0, 1)]
        rows.append({"name": name, "method": name, "model": "small", "runs": runs})
    for event in (epoch(0), epoch(1), epoch(2, 0.633, 0.432, FELL, "warn"), epoch(3)):
        append_record(tmp_path / "m+deat1/watch.jsonl", event)
    for event in (epoch(0), epoch(1, reason="l_X rose", action="note"), epoch(2, reason="l_X rose", action="note")):
        append_record(tmp_path / "fgsm0/watch.jsonl", event)
    return load_report_data([str(make_bench(tmp_path, rows))])


def test_every_table_has_a_collapse_with_its_epoch_and_the_watch_s_action(subject):
    of = build_results_table(subject, None)
    assert [list_watch_alarms(row) for row in subject.rows] == [[f"seed 1: {SAID}: {FELL}"], []]
    assert f"seed 1: {SAID}: {FELL} |" in render_markdown_table(of)
    assert f"seed 1: {SAID}: {FELL}" in render_csv_table(of)
    assert f"<b>m+deat</b>, seed 1: {SAID}: {FELL}" in render_section("warnings", build_warnings(subject))
    assert f'<small class="why">seed 1: {SAID}</small>' in render_section("results_table", build_table(of))
    assert list_run_problems(subject.rows[0]) == []  # the run is complete all the same


def test_jumps_that_were_only_logged_are_one_line_below_the_table_and_no_warning(subject):
    of = build_results_table(subject, None)
    (line,) = describe_noted_jumps(subject.rows)
    assert line.endswith(": fgsm seed 0 in epochs 2, 3.")
    for text in (render_markdown_table(of), render_section("results_table", build_table(of))):
        assert line in text
    assert "fgsm seed 0 in epochs 2, 3" in render_latex_table(of)
    assert "l_X" not in str(build_warnings(subject))


@pytest.mark.parametrize(
    ("single", "action", "said"),
    [
        (0.9, "stop", "catastrophic overfitting in epoch 2 (training stopped)"),
        (0.9, "rollback", "catastrophic overfitting in epoch 2 (rolled back and continued)"),
        (0.1, "warn", "a collapse of the whole network in epoch 2 (warning only)"),
    ],
)
def test_each_kind_of_collapse_and_each_action_has_its_words(tmp_path, single, action, said):
    folder = make_run(tmp_path / "a", finished=1, shares={"natural": 0.9})
    append_record(folder / "watch.jsonl", epoch(0))
    append_record(folder / "watch.jsonl", epoch(1, single, 0.05, FELL, action))
    (row,) = load_report_data([str(folder)]).rows
    assert list_watch_alarms(row, short=True) == [f"seed 0: {said}"]
    (problem,) = list_run_problems(row)
    assert "epoch 1 of 4" in problem if action == "stop" else problem == "seed 0: 1 of 4 epochs"


def test_a_report_prints_collapses_on_the_terminal_and_in_its_json(tmp_path, capsys):
    folder = make_run(tmp_path / "a", shares={"natural": 0.9})
    append_record(folder / "watch.jsonl", epoch(2, 0.633, 0.432, FELL, "warn"))
    call = ["report", str(folder), "--no-figures", "--gallery", "0"]
    assert main(call) == 0
    assert f"watch: m+deat, seed 0: {SAID}: {FELL}" in capsys.readouterr().out
    assert main([*call, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["alarms"] == [f"seed 0: {SAID}: {FELL}"]


def test_a_log_that_the_watch_did_not_write_is_refused_by_name(tmp_path):
    folder = make_run(tmp_path / "a", shares={"natural": 0.9})
    (folder / "watch.jsonl").write_text('{"epoch": 1}\n')
    with pytest.raises(DataError, match=r"watch\.jsonl' is not what deat wrote"):
        load_report_data([str(folder)])
