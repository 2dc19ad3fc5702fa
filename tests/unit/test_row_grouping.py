"""Runs of one name that were trained differently, and rows that cannot be compared."""

import json

import pytest

from deat.report.figure_data import PARETO_FRONT_NAME, build_trade_off_figure
from deat.report.page_data import build_winner_cards, find_front_indices
from deat.report.report_data import load_report_data
from deat.report.results_table import build_results_table
from deat.report.row_grouping import can_compare_rows
from deat.report.significance import select_rankable_rows
from helpers.runs import make_bench, make_run, one_run

SHARES = {"natural": 0.9, "pgd-20": 0.5}


def data(folder, digest):
    """What a record says of a folder of images that is called data wherever it lies."""
    images = {"name": "folder:data", "train": 640, "held_out": 64, "classes": ["0", "1"]}
    request = {"data": f"folder:{folder}/data", "method": "m+deat", "model": "auto"}
    return {"request": request, "data": {**images, **({"digest": digest} if digest else {})}}


def method(alpha):
    """What a record says of a method out of a file."""
    return {"method": {"name": "bold", "schedule": {"kind": "Fixed", "alpha": alpha}}}


def judged(folder, **settings):
    """The same run with other words in its evaluation."""
    found = json.loads((folder / "evaluation.json").read_text())
    found["settings"].update(settings)
    found.pop("checksum", None)
    (folder / "evaluation.json").write_text(json.dumps(found))
    return str(folder)


def bench(folder, records, name="bold"):
    """A bench of one row with a seed for each of these records, and one that was not begun."""
    for seed, record in enumerate(records):
        make_run(folder / f"s{seed}", name, seed=seed, shares=SHARES, record=record)
    runs = [*(one_run(f"s{seed}", seed) for seed in range(len(records))), one_run("later", 9, "waiting")]
    return make_bench(folder, [{"name": name, "method": "own.py:bold", "model": "small", "runs": runs}])


def test_runs_on_different_images_under_one_name_are_rows_of_their_own(tmp_path):
    for seed, (folder, digest) in enumerate({"a": "1" * 16, "b": "2" * 16}.items()):
        make_run(tmp_path / folder, seed=seed, shares=SHARES, record=data(folder, digest))
    subject = load_report_data([str(tmp_path / "a"), str(tmp_path / "b")])
    assert [row.name for row in subject.rows] == ["m+deat folder:a/data", "m+deat folder:b/data"]
    assert (
        "Rows differ in their data set (folder:a/data 11111111, folder:b/data 22222222), so not all of them can be "
        "compared."
    ) in subject.notes


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"alpha": 0.02}, "PGD-20 (alpha 0.02, 0.0375)"),
        ({"restarts": 3, "start": "zero"}, "PGD-20 (restarts 1, 3; start uniform, zero)"),
        ({"implementation": "other"}, None),
    ],
    ids=str,
)
def test_rows_whose_attacks_of_one_name_have_other_settings_are_not_ranked(change, told, tmp_path):
    pgd = {"name": "pgd-20", "steps": 20, "alpha": 0.0375, "start": "uniform", "restarts": 1, "implementation": "deat"}
    folders = []
    for method, settings in (("m+deat", pgd), ("free-4", pgd | change)):
        folder = make_run(tmp_path / method, method, shares=SHARES)
        folders.append(judged(folder, attacks={"natural": {"name": "natural"}, "pgd-20": settings}))
    found = load_report_data(folders)
    notes = [note for note in found.notes if "settings of" in note]
    assert can_compare_rows(found.rows) is (told is None)
    assert bool(select_rankable_rows(found.rows)) is (told is None)
    assert [told in note for note in notes] == ([True] if told else [])


def test_runs_before_and_after_a_val_folder_came_to_a_set_are_rows_of_their_own(tmp_path):
    digest = "1" * 16
    for seed, counts in enumerate(({"train": 576, "held_out": 64}, {"train": 640, "held_out": 100})):
        record = data("a", digest)
        make_run(
            tmp_path / str(seed), seed=seed, shares=SHARES, record={**record, "data": {**record["data"], **counts}}
        )
    names = [row.name for row in load_report_data([str(tmp_path / "0"), str(tmp_path / "1")]).rows]
    assert names == ["m+deat held_out=64", "m+deat held_out=100"]


def test_images_that_changed_in_their_place_make_another_row(tmp_path):
    for seed, digest in enumerate(("1" * 16, "2" * 16)):
        make_run(tmp_path / str(seed), seed=seed, shares=SHARES, record=data("a", digest))
    names = [row.name for row in load_report_data([str(tmp_path / "0"), str(tmp_path / "1")]).rows]
    assert names == ["m+deat images=11111111", "m+deat images=22222222"]


def test_the_same_images_from_another_place_and_of_older_records_are_of_one_row(tmp_path):
    for seed, (folder, digest) in enumerate((("a", "1" * 16), ("b", "1" * 16), ("c", None))):
        make_run(tmp_path / folder, seed=seed, shares=SHARES, record=data(folder, digest))
    (row,) = load_report_data([str(tmp_path / folder) for folder in "abc"]).rows
    assert [run.seed for run in row.finished_runs] == [0, 1, 2]


def test_seeds_of_a_bench_whose_method_was_changed_in_between_are_not_averaged(tmp_path):
    subject = load_report_data([str(bench(tmp_path, [method(0.5), method(0.25), method(0.25)]))])
    found = {row.name: [run.seed for run in row.runs] for row in subject.rows}
    assert found == {"bold schedule.alpha=0.5": [0, 9], "bold schedule.alpha=0.25": [1, 2]}


def test_seeds_by_different_versions_of_a_file_that_declare_the_same_are_noted(tmp_path):
    records = [{**method(0.5), "code": {"method": letter * 64}} for letter in "ab"]
    subject = load_report_data([str(bench(tmp_path, records))])
    assert [row.name for row in subject.rows] == ["bold"]
    (note,) = [note for note in subject.notes if "different versions" in note]
    assert note.startswith("bold ")
    assert "(method aaaaaaaa, method bbbbbbbb)" in note


def test_verdicts_on_other_images_are_not_paired_though_their_labels_agree(tmp_path):
    for name, digest in (("free-4", "1" * 16), ("pgd-7", "2" * 16), ("fgsm", "1" * 16)):
        told = data("a", digest)
        record = {**told, "request": {**told["request"], "method": name}}
        make_run(tmp_path / name, name, shares=SHARES, record=record)
    of = build_results_table(load_report_data([str(tmp_path / name) for name in ("free-4", "pgd-7", "fgsm")]), "free-4")
    assert list(of.comparisons["pgd-20"]) == ["fgsm"]


@pytest.mark.parametrize(
    "apart", [{"threat": {"norm": "linf", "eps": 0.05}}, {"about": {"data": "folder:elsewhere"}}], ids=["eps", "data"]
)
def test_of_rows_that_were_evaluated_differently_none_is_the_best(tmp_path, apart):
    names = ("pgd-7", "free-4", "fgsm")
    folders = [make_run(tmp_path / name, name, shares=SHARES) for name in names]
    alike = build_results_table(load_report_data([str(folder) for folder in folders]), None)
    assert build_winner_cards(alike)["cards"][0]["title"] == "Most robust under PGD-20"
    assert find_front_indices(alike) == {0, 1, 2}
    of = build_results_table(load_report_data([*map(str, folders[:2]), judged(folders[2], **apart)]), None)
    assert build_winner_cards(of)["cards"] == []
    assert "none of them is the best" in build_winner_cards(of)["note"]
    assert find_front_indices(of) == set()
    lines = [line for panel in build_trade_off_figure(of.rows, "pgd-20").panels for line in panel.lines]
    assert {line.row for line in lines} == set(names)
    assert PARETO_FRONT_NAME not in {line.row for line in lines}


def test_minutes_of_different_hardware_are_not_to_be_compared(tmp_path):
    cpu = {"device": "cpu", "threads": 2, "processes": 1}
    for name, record in {"a": cpu, "b": {**cpu, "device": "cuda"}, "c": cpu, "d": {}}.items():
        make_run(tmp_path / name, name, shares=SHARES, record=record)
    notes = load_report_data([str(tmp_path / name) for name in "abc"]).notes
    assert "Rows had different hardware or threads (cpu, 2 threads; cuda): compare backprops, not minutes." in notes
    assert not any("hardware" in note for note in load_report_data([str(tmp_path / name) for name in "acd"]).notes)


def test_rows_of_one_seed_are_named_where_several_rows_are_compared(tmp_path):
    said = "One seed only for {}: "
    for name, seed in (("a", 0), ("a", 1), ("b", 0), ("c", 0)):
        make_run(tmp_path / f"{name}{seed}", name, seed=seed, shares=SHARES)
    folders = {name: str(tmp_path / name) for name in ("a0", "a1", "b0", "c0")}
    assert any(note.startswith(said.format("b, c")) for note in load_report_data([*folders.values()]).notes)
    two_rows = load_report_data([folders["b0"], folders["c0"]])
    assert any(note.startswith(said.format("all rows")) for note in two_rows.notes)
    assert not any("One seed" in note for note in load_report_data([folders["b0"]]).notes), "nothing is compared"
