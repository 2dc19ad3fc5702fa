"""One cell: what is trained is what its row says, and every epoch that it asks for is judged once."""

import json
from dataclasses import replace

import pytest

from deat import recipes
from deat.bench import workers as cells
from deat.bench.grid import GridCell
from deat.errors import BusyError, DataError
from deat.evaluation.results import AttackResult, Evaluation
from deat.recipes import apply_overrides
from deat.runs.run_dir import lock_evaluation


@pytest.fixture
def judged(monkeypatch):
    """Evaluations that were asked for, as (file, attacks, images); none is made."""
    found = []

    def evaluate(model, data, *, attacks, n, save, **_):
        found.append((save.name, attacks, n))
        Evaluation([AttackResult("natural", [True], 0, 0.1, 1, 1)], [0], ["a"], {"cascade": False}).save(save)

    monkeypatch.setattr(cells, "evaluate", evaluate)
    return found


def cell_of(seed=3, **settings):
    given = {"epochs": "1", "held_out": "20", "n": "30", **settings}
    (row,) = apply_overrides(recipes.get_recipe("quick").make_rows(["m+deat"]), given)
    return GridCell(row, seed)


def test_the_rows_run_is_trained(tmp_path, judged):
    cells.run_cell(cell_of(lr="0.01", gamma="1.2", rules="released"), tmp_path / "run")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["settings"]["seed"] == 3
    assert (record["settings"]["lr"], record["request"]["gamma"], record["data"]["held_out"]) == (0.01, 1.2, 20)
    assert record["method"]["probe"]["space"] == "normalised"


def test_best_and_last_epoch_are_judged_and_autoattack_on_its_own_number_of_images(tmp_path, judged):
    cells.run_cell(cell_of(attacks="natural,pgd-2,aa", aa_n="5"), tmp_path / "run")
    assert judged == [
        ("evaluation.json", ("natural", "pgd-2"), 30),
        ("evaluation-last.json", ("natural", "pgd-2"), 30),
        ("evaluation-aa.json", ("natural", "aa"), 5),
    ]
    cells.run_cell(cell_of(attacks="natural,pgd-2,aa", aa_n="5"), tmp_path / "run")
    assert len(judged) == 3  # nothing is judged twice


def test_chosen_seeds_are_judged_by_autoattack_on_all_images(tmp_path, judged):
    for seed in (0, 1):
        cells.run_cell(cell_of(seed=seed, attacks="natural,aa", aa_n="5", aa_whole="1,2"), tmp_path / str(seed))
    assert [n for name, _, n in judged if name == "evaluation-aa.json"] == [5, 30]


def test_a_damaged_evaluation_is_made_again_and_said(tmp_path, judged, capsys):
    cells.run_cell(cell_of(), tmp_path / "run")
    trained = (tmp_path / "run/last/model.safetensors").stat().st_mtime_ns
    judged.clear()
    (tmp_path / "run/evaluation-last.json").write_text('{"schema": 1, "accu')
    cells.run_cell(cell_of(), tmp_path / "run")
    assert [name for name, _, _ in judged] == ["evaluation-last.json"]
    assert "evaluation-last.json is damaged, so this run is judged again" in capsys.readouterr().err
    assert (tmp_path / "run/last/model.safetensors").stat().st_mtime_ns == trained


@pytest.mark.promise("P3")
def test_a_run_whose_history_is_damaged_is_begun_again_and_said(tmp_path, judged, capsys):
    cells.run_cell(cell_of(), tmp_path / "run")
    before = (tmp_path / "run/history.jsonl").read_bytes()
    (tmp_path / "run/history.jsonl").write_bytes(b"{}\n")
    cells.run_cell(cell_of(), tmp_path / "run")
    assert "begun again" in capsys.readouterr().err
    assert (tmp_path / "run/history.jsonl").read_bytes() == before


def test_the_last_model_alone_is_judged_where_the_recipe_says_so(tmp_path, judged):
    cells.run_cell(cell_of(attacks="natural,aa", epoch="last"), tmp_path / "run")
    assert judged == [("evaluation.json", ("natural", "aa"), 30)]


def test_training_that_was_killed_goes_on_to_the_bytes_of_one_that_was_not(tmp_path, judged, monkeypatch):
    cells.run_cell(cell_of(epochs="3"), tmp_path / "whole")

    class Killed(Exception):
        pass

    def on_epoch(self, trainer, stats, timing):
        if stats.epoch == 1:
            raise Killed
        told(self, trainer, stats, timing)

    told = cells.RunFolder.on_epoch
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(cells.RunFolder, "on_epoch", on_epoch)
        cells.run_cell(cell_of(epochs="3"), tmp_path / "run")
    assert (tmp_path / "run" / "history.jsonl").read_bytes().count(b"\n") == 1
    cells.run_cell(cell_of(epochs="3"), tmp_path / "run")
    for name in ("history.jsonl", "last/model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not list((tmp_path / "run").glob("ckpt-*"))


def test_a_folder_torn_before_its_record_is_begun_again(tmp_path, judged):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".run.json.1234.tmp").write_text("{")
    cells.run_cell(cell_of(), tmp_path / "run")
    assert (tmp_path / "run" / "history.jsonl").is_file()


def test_data_without_a_test_part_are_refused_before_training(tmp_path, judged, monkeypatch):
    cell = cell_of()
    run = cell.row.resolve(0)
    bare = replace(run, splits=replace(run.splits, test=None))
    monkeypatch.setattr(type(cell.row), "resolve", lambda *_: bare)
    with pytest.raises(DataError, match="test part"):
        cells.run_cell(cell, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.promise("P8")
def test_a_run_that_somebody_else_evaluates_is_not_judged_beside_it(tmp_path, judged):
    cells.run_cell(cell_of(), tmp_path / "run")
    (tmp_path / "run/evaluation.json").unlink()
    judged.clear()
    with lock_evaluation(tmp_path / "run/evaluation.json"), pytest.raises(BusyError, match="is working on"):
        cells.run_cell(cell_of(), tmp_path / "run")
    assert judged == []
    cells.run_cell(cell_of(), tmp_path / "run")
    assert [name for name, _, _ in judged] == ["evaluation.json"]


@pytest.mark.promise("P8")
def test_nobody_evaluates_a_run_while_it_is_judged_here(tmp_path, monkeypatch):
    refused = []

    def evaluate(model, data, *, save, **_):
        with pytest.raises(BusyError), lock_evaluation(save):
            pass
        refused.append(save.name)
        Evaluation([AttackResult("natural", [True], 0, 0.1, 1, 1)], [0], ["a"], {"cascade": False}).save(save)

    monkeypatch.setattr(cells, "evaluate", evaluate)
    cells.run_cell(cell_of(), tmp_path / "run")
    assert refused == ["evaluation.json", "evaluation-last.json"]
    with lock_evaluation(tmp_path / "run/evaluation.json"):
        pass  # and it is free again


def test_what_somebody_evaluated_while_the_run_was_trained_stays(tmp_path, judged, monkeypatch):
    def train(run, path):
        real(run, path)
        Evaluation([AttackResult("fgsm", [True], 0, 0.1, 1, 1)], [0], ["a"], {"cascade": False}).save(
            path / "evaluation.json"
        )

    real = cells.train_cell
    monkeypatch.setattr(cells, "train_cell", train)
    cells.run_cell(cell_of(), tmp_path / "run")
    assert [name for name, _, _ in judged] == ["evaluation-last.json"]
