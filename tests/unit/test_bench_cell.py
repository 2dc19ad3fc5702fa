"""One cell: what is trained is what its row says, and every epoch that it asks for is judged once."""

import errno
import json
import shutil
from dataclasses import replace

import pytest
from torch import nn

from deat import recipes
from deat.bench import workers as cells
from deat.bench.run_claims import GridCell
from deat.checkpoint import store
from deat.errors import BusyError, CheckpointError, DataError
from deat.evaluation.results import AttackResult, Evaluation, load_evaluation
from deat.evaluation.resume_log import lock_evaluation
from deat.recipes import apply_overrides
from deat.runs.record_files import WEIGHTS_FILE
from deat.runs.run_dir import RunFolder
from deat.runs.trained_run import get_test_split, load_run_model
from deat.utils.file_locks import lock_run_folder
from deat.utils.fingerprints import fingerprint_model
from deat.utils.safe_write import link_atomic
from deat.utils.safetensors_files import read_note


@pytest.fixture
def judged(monkeypatch):
    """Evaluations that are requested, as (file, attacks, images); each is saved with every image right."""
    requests = []

    def evaluate(model, data, *, threat, attacks, n, seed, block, save, **_):
        requests.append((save.name, attacks, n))
        right = [True] * (len(data) if n is None else n)
        settings = {"threat": threat.describe(), "seed": seed, "block": block, "model": fingerprint_model(model)}
        settings |= {"attacks": {name: {} for name in attacks}, "sample": len(right) < len(data), "cascade": False}
        results = [AttackResult(name, right, 0, 0.1, 1, 1) for name in attacks]
        Evaluation(results, [0] * len(right), ["a"], settings).save(save)

    monkeypatch.setattr(cells, "evaluate", evaluate)
    return requests


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


def test_best_and_last_epoch_are_evaluated_and_autoattack_on_its_own_number_of_images(tmp_path, judged):
    cells.run_cell(cell_of(attacks="natural,pgd-2,aa", aa_n="5"), tmp_path / "run")
    assert judged == [
        ("evaluation.json", ("natural", "pgd-2"), 30),
        ("evaluation-last.json", ("natural", "pgd-2"), 30),
        ("evaluation-aa.json", ("natural", "aa"), 5),
    ]
    cells.run_cell(cell_of(attacks="natural,pgd-2,aa", aa_n="5"), tmp_path / "run")
    assert len(judged) == 3  # nothing is judged twice


@pytest.mark.promise("P176")
@pytest.mark.parametrize(
    "by_hand",
    [{"n": 20}, {"attacks": ("natural",)}, {"seed": 4}, {"model": nn.Flatten()}],
    ids=lambda by: next(iter(by)),
)
def test_an_evaluation_made_by_hand_does_not_count_as_the_cells_result(tmp_path, judged, by_hand):
    cell, path = cell_of(attacks="natural,pgd-2", epoch="last"), tmp_path / "run"
    cells.run_cell(cell, path)
    run = cell.row.resolve(cell.seed)
    request = {"model": load_run_model(run, path / "last" / WEIGHTS_FILE), "data": get_test_split(run)}
    request |= {"threat": run.threat, "attacks": ("natural", "pgd-2"), "n": 30, "seed": 3}
    (path / "evaluation.json").unlink()
    cells.evaluate(**request | by_hand, block=cell.row.evaluation.block, save=path / "evaluation.json")
    copy = (path / "evaluation.json").read_bytes()
    judged.clear()
    cells.run_cell(cell, path)
    assert judged == [("evaluation.json", ("natural", "pgd-2"), 30)]
    is_contained = "attacks" in by_hand
    assert is_contained or (path / "evaluation-1.json").read_bytes() == copy


def test_chosen_seeds_are_evaluated_by_autoattack_on_all_images(tmp_path, judged):
    for seed in (0, 1):
        cells.run_cell(cell_of(seed=seed, attacks="natural,aa", aa_n="5", aa_whole="1,2"), tmp_path / str(seed))
    assert [n for name, _, n in judged if name == "evaluation-aa.json"] == [5, 30]


def test_a_damaged_evaluation_is_made_again_and_reported(tmp_path, judged, capsys):
    cells.run_cell(cell_of(), tmp_path / "run")
    trained = (tmp_path / "run/last/model.safetensors").stat().st_mtime_ns
    judged.clear()
    (tmp_path / "run/evaluation-last.json").write_text('{"schema": 1, "accu')
    cells.run_cell(cell_of(), tmp_path / "run")
    assert [name for name, _, _ in judged] == ["evaluation-last.json"]
    assert "evaluation-last.json is damaged, so this run is evaluated again" in capsys.readouterr().err
    assert (tmp_path / "run/last/model.safetensors").stat().st_mtime_ns == trained


@pytest.mark.promise("P3")
def test_a_run_whose_history_is_damaged_is_restarted_and_reported(tmp_path, judged, capsys):
    cells.run_cell(cell_of(), tmp_path / "run")
    before = (tmp_path / "run/history.jsonl").read_bytes()
    (tmp_path / "run/history.jsonl").write_bytes(b"{}\n")
    cells.run_cell(cell_of(), tmp_path / "run")
    assert "started again" in capsys.readouterr().err
    assert (tmp_path / "run/history.jsonl").read_bytes() == before


def test_the_last_model_alone_is_evaluated_where_the_recipe_says_so(tmp_path, judged):
    cells.run_cell(cell_of(attacks="natural,aa", epoch="last"), tmp_path / "run")
    assert judged == [("evaluation.json", ("natural", "aa"), 30)]


def test_training_that_was_killed_resumes_to_the_bytes_of_one_that_was_not(tmp_path, judged, monkeypatch):
    cells.run_cell(cell_of(epochs="3"), tmp_path / "whole")

    class Killed(Exception):
        pass

    def on_epoch(self, trainer, stats, timing):
        if stats.epoch == 1:
            raise Killed
        told(self, trainer, stats, timing)

    told = RunFolder.on_epoch
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(RunFolder, "on_epoch", on_epoch)
        cells.run_cell(cell_of(epochs="3"), tmp_path / "run")
    assert (tmp_path / "run" / "history.jsonl").read_bytes().count(b"\n") == 1
    cells.run_cell(cell_of(epochs="3"), tmp_path / "run")
    for name in ("history.jsonl", "last/model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not list((tmp_path / "run").glob("ckpt-*"))


@pytest.fixture
def last_save_failed(tmp_path, judged, monkeypatch):
    """A cell's folder whose history has all epochs, and whose newest whole checkpoint is of the epoch before."""

    def full_at_the_end(temporary, target):
        if target.name == "ckpt-000003":
            raise OSError(errno.ENOSPC, "No space left on device")
        commit(temporary, target)

    commit = store._commit
    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="No space left"):
        patch.setattr(store, "_commit", full_at_the_end)
        cells.run_cell(cell_of(epochs="3"), tmp_path / "run")
    path = tmp_path / "run"
    assert (path / "history.jsonl").read_bytes().count(b"\n") == 3
    assert store.find_newest_checkpoint(path).newest.name == "ckpt-000002"
    assert json.loads(read_note(path / "last/model.safetensors"))["epoch"] == 2
    return path


@pytest.mark.promise("P177")
def test_a_run_whose_last_save_failed_is_trained_to_its_end_before_it_is_evaluated(last_save_failed, tmp_path):
    cells.run_cell(cell_of(epochs="3"), tmp_path / "whole")
    cells.run_cell(cell_of(epochs="3"), last_save_failed)
    for name in ("history.jsonl", "best/model.safetensors", "last/model.safetensors"):
        assert (last_save_failed / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.promise("P177")
def test_weights_of_an_earlier_epoch_are_never_taken_for_the_finished_ones(last_save_failed, capsys):
    for checkpoint in store.list_checkpoints(last_save_failed):
        shutil.rmtree(checkpoint)
    cells.run_cell(cell_of(epochs="3"), last_save_failed)
    assert json.loads(read_note(last_save_failed / "last/model.safetensors"))["epoch"] == 3


@pytest.mark.promise("P177")
@pytest.mark.parametrize("which", ["best", "last"])
def test_weights_that_could_not_be_published_are_not_evaluated_until_they_are(which, tmp_path, judged, monkeypatch):
    def link(source, target):
        if target.parent.name == which and source.parent.name == "ckpt-000003":
            raise OSError(errno.ENOSPC, "No space left on device")
        link_atomic(source, target)

    cell = cell_of(epochs="3", held_out="0")  # without held-out images the last epoch is the best
    cells.run_cell(cell, tmp_path / "whole")
    judged.clear()
    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="could not be written"):
        patch.setattr("deat.runs.run_dir.link_atomic", link)
        cells.run_cell(cell, tmp_path / "run")
    assert judged == []
    cells.run_cell(cell, tmp_path / "run")
    for name in ("best/model.safetensors", "last/model.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_damaged_last_weights_without_a_checkpoint_are_trained_again(tmp_path, judged):
    cells.run_cell(cell_of(), tmp_path / "run")
    weights = tmp_path / "run/last/model.safetensors"
    before = weights.read_bytes()
    weights.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    (tmp_path / "run/evaluation-last.json").unlink()
    cells.run_cell(cell_of(), tmp_path / "run")
    assert weights.read_bytes() == before


def test_a_run_that_is_finished_without_checkpoints_is_evaluated_and_not_trained_again(tmp_path, judged, monkeypatch):
    cells.run_cell(cell_of(), tmp_path / "run")
    (tmp_path / "run/evaluation-last.json").unlink()
    monkeypatch.setattr(cells, "train_cell", lambda run, path: pytest.fail("it was trained again"))
    cells.run_cell(cell_of(), tmp_path / "run")
    assert (tmp_path / "run/evaluation-last.json").is_file()


def test_a_cell_is_not_trained_beside_a_process_that_works_in_its_folder(tmp_path, judged):
    cells.run_cell(cell_of(), tmp_path / "run")
    (tmp_path / "run/history.jsonl").write_bytes(b"{}\n")
    before = sorted(path for path in (tmp_path / "run").rglob("*"))
    with lock_run_folder(tmp_path / "run"), pytest.raises(BusyError, match="is working on"):
        cells.run_cell(cell_of(), tmp_path / "run")
    assert sorted(path for path in (tmp_path / "run").rglob("*")) == before


def test_a_folder_torn_before_its_record_is_restarted(tmp_path, judged):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".run.json.1234.tmp").write_text("{")
    cells.run_cell(cell_of(), tmp_path / "run")
    assert (tmp_path / "run" / "history.jsonl").is_file()


def test_data_without_a_test_part_are_refused_before_training(tmp_path, judged, monkeypatch):
    cell = cell_of()
    run = cell.row.resolve(0)
    bare = replace(run, splits=replace(run.splits, test=None))
    monkeypatch.setattr(type(cell.row), "resolve", lambda *_: bare)
    with pytest.raises(DataError, match="no test images"):
        cells.run_cell(cell, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.promise("P8")
def test_a_run_that_another_process_evaluates_is_not_evaluated_beside_it(tmp_path, judged):
    cells.run_cell(cell_of(), tmp_path / "run")
    (tmp_path / "run/evaluation.json").unlink()
    judged.clear()
    with lock_evaluation(tmp_path / "run/evaluation.json"), pytest.raises(BusyError, match="is working on"):
        cells.run_cell(cell_of(), tmp_path / "run")
    assert judged == []
    cells.run_cell(cell_of(), tmp_path / "run")
    assert [name for name, _, _ in judged] == ["evaluation.json"]


@pytest.mark.promise("P8")
def test_no_process_evaluates_a_run_while_it_is_evaluated_here(tmp_path, monkeypatch):
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


def test_an_evaluation_made_by_hand_during_training_is_kept_beside_the_result(tmp_path, judged, monkeypatch):
    def train(run, path):
        real(run, path)
        Evaluation([AttackResult("fgsm", [True], 0, 0.1, 1, 1)], [0], ["a"], {"cascade": False}).save(
            path / "evaluation.json"
        )

    real = cells.train_cell
    monkeypatch.setattr(cells, "train_cell", train)
    cells.run_cell(cell_of(), tmp_path / "run")
    assert [name for name, _, _ in judged] == ["evaluation.json", "evaluation-last.json"]
    assert load_evaluation(tmp_path / "run/evaluation-1.json").verdicts["fgsm"] == [True]
