"""The training accuracy in lines, records and reports, named by what it was computed on."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import deat
from deat.cli.main import main
from deat.training.epoch_records import get_training_images, separate_training_accuracy
from deat.training.progress_lines import format_epoch, format_epoch_short
from helpers.games import trainer_of


def test_clean_and_attacked_training_accuracy_have_their_own_names() -> None:
    history = trainer_of("m+deat", epochs=3).fit().history
    assert [stats.k for stats in history] == [0, 1, 1]
    assert [stats.train_natural for stats in history] == [history[0].train_accuracy, None, None]
    assert [stats.train_robust for stats in history] == [None, history[1].train_accuracy, history[2].train_accuracy]
    for stats, label in zip(history, ("clean", "under attack", "under attack"), strict=True):
        for line in (format_epoch(stats, 3), format_epoch_short(stats, 3, 1.0)):
            assert f"train ({label}) {stats.train_accuracy:.1%}" in line


@pytest.mark.parametrize(("rules", "label"), [("default", "clean"), ("literal", "clean"), ("released", "random start")])
def test_an_epoch_without_steps_is_named_by_its_start(rules: str, label: str) -> None:
    method = deat.get_method("m+pgd", rules=rules)
    assert get_training_images(0, method.describe()) == label
    assert get_training_images(1, method.describe()) == "under attack"


def test_natural_training_is_never_labelled_as_attacked() -> None:
    for stats in trainer_of("natural", epochs=2).fit().history:
        assert stats.train_natural == stats.train_accuracy
        assert stats.train_robust is None
        assert "train (clean)" in format_epoch(stats, 2)


def test_the_history_of_an_older_checkpoint_gets_the_names_when_it_is_loaded() -> None:
    first = trainer_of("m+deat", epochs=3)
    first.fit()
    state = first.state_dict()
    state["history"] = [replace(stats, train_natural=None, train_robust=None) for stats in state["history"]]
    second = trainer_of("m+deat", epochs=3)
    second.load_state_dict(state)
    assert second.history == first.history
    assert separate_training_accuracy(state["history"][0], first.method.describe()) == first.history[0]


def test_the_report_of_a_run_has_a_column_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    quick = ["--epochs", "2", "--test-images", "10", "--val-attack", "pgd-1", "--watch", "none", "--baseline", "no"]
    assert main(["train", *quick, "--out", "run"]) == 0
    lines = [line.split("|") for line in Path("run/report.md").read_text().splitlines() if line.startswith("|")]
    header = next(line for line in lines if " epoch " in line)
    natural, robust = header.index(" train natural "), header.index(" train robust ")
    first, second = (next(line for line in lines if line[1].strip() == str(n)) for n in (1, 2))
    history = [json.loads(line) for line in Path("run/history.jsonl").read_text().splitlines()]
    assert first[natural].strip() == f"{history[0]['train_accuracy']:.1%}"
    assert first[robust].strip() == second[natural].strip() == ""
    assert second[robust].strip() == f"{history[1]['train_accuracy']:.1%}"
