"""A play and a schedule of one's own, as their page has them: from the command line, composed, listed and resumed."""

import json
import os
import signal
from pathlib import Path

import pytest

import deat
from deat.cli.main import main
from deat.methods import method_registry
from deat.training.training_cost import backprop_bounds

PAGE = (Path(__file__).parents[2] / "docs/own-plays-and-schedules.md").read_text()
BATCHES = 10
SMALL = ["--epochs", "4", "--batch-size", "128", "--test-images", "0", "--baseline", "no", "--threads", "1"]


@pytest.fixture(autouse=True)
def _in_a_folder_with_both_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(method_registry, "_METHODS", dict(method_registry._METHODS))
    blocks = [block.split("```")[0] for block in PAGE.split("```python\n")[1:]]
    for name, number in (("own_play.py", 0), ("own_schedule.py", 2), ("own_steps.py", 5)):
        Path(name).write_text(blocks[number])


def history(folder: str) -> list[dict]:
    return [json.loads(line) for line in Path(folder, "history.jsonl").read_text().splitlines()]


def test_the_play_trains_from_the_command_line_with_the_cost_that_it_declares(capsys):
    assert main(["train", "--method", "own_play.py:mixed-2", *SMALL, "--out", "run"]) == 0
    assert "Natural and adversarial training in turn, with k attack steps" in capsys.readouterr().out
    assert history("run")[-1]["backprops"] == 4 * BATCHES * (2 + 2)
    assert "in turn, with k attack steps" in Path("run/report.md").read_text()


@pytest.mark.parametrize(("name", "summary"), [("m+mixed-3", "k guided by l_X"), ("f+mixed", "friendly")])
def test_the_play_composes_with_m_plus_and_f_plus(name, summary):
    assert main(["train", "--method", f"own_play.py:{name}", *SMALL, "--out", "run"]) == 0
    method = json.loads(Path("run/run.json").read_text())["method"]
    assert method["summary"] == f"Natural and adversarial training in turn, with k attack steps, {summary}"
    assert {epoch["k"] for epoch in history("run")} >= ({0, 1} if name.startswith("m+") else {3})


def test_list_shows_what_a_file_defines_with_its_docstrings(capsys):
    for file in ("own_play.py", "own_schedule.py"):
        assert main(["list", "methods", "--json", "--code", file]) == 0
    tables = capsys.readouterr().out.replace("]\n[", "]\0[").split("\0")
    rows = {row["name"]: row for table in tables for row in json.loads(table)}
    assert rows["own_play.py:mixed-3"]["what"] == "Natural and adversarial training in turn, with k attack steps"
    assert rows["own_play.py:mixed-3"]["backprops in 10 epochs"] == "50"
    assert rows["own_play.py:m+mixed-3"]["backprops in 10 epochs"] == "29-42"
    assert rows["own_schedule.py:PLATEAU"]["what"].startswith("DEAT's replays, one more whenever the loss")
    assert "pgd-7" in rows


def test_code_is_listed_for_methods_alone_and_from_files_that_define_some(capsys):
    Path("empty.py").write_text("import deat\n")
    assert main(["list", "models", "--code", "own_play.py"]) == 2
    assert main(["list", "methods", "--code", "empty.py"]) == 2
    assert "register_method" in capsys.readouterr().err


def test_the_schedule_follows_the_epoch_and_the_records():
    plateau = deat.get_method("own_schedule.py:PLATEAU").bind(deat.Linf(0.1), 9)
    state, ks = plateau.init(), []
    for epoch, loss in enumerate([2.3, 2.0, 1.5, 1.49, 1.7, 1.69, 1.0, 1.0]):
        ks.append(plateau.budget(state, epoch).k)
        state = json.loads(json.dumps(plateau.observe(state, deat.EpochRecord(epoch, loss, 0.5, 1.0, 10))))
    assert ks == [0, 1, 1, 1, 2, 2, 3, 3]


def test_the_cost_of_a_schedule_that_reads_measurements_is_estimated(capsys):
    assert main(["train", "--method", "own_steps.py:CONVERGED", *SMALL, "--dry-run"]) == 0
    assert "dry run" in capsys.readouterr().out
    method = deat.get_method("own_steps.py:CONVERGED")
    assert backprop_bounds(method, method.bind(deat.Linf(0.1), 4), 4) == (4 * 2, 2 + 3 + 4 + 5)


def test_k_follows_what_is_measured_both_ways():
    schedule = deat.get_method("own_steps.py:CONVERGED").bind(deat.Linf(0.1), 9)
    state, ks = schedule.init(), []
    for epoch, reached in enumerate([0.5, 0.9, 0.98, 0.995, 0.999, 0.999, 1.0]):
        ks.append(schedule.budget(state, epoch).k)
        measured = {"reached_rise": 3 * reached, "largest_rise": 3.0}
        state = schedule.observe(state, deat.EpochRecord(epoch, 1.0, 0.5, 1.0, 10, measured=measured))
    assert ks == [1, 2, 3, 3, 2, 1, 1]


@pytest.mark.promise("P112")
def test_a_run_with_an_own_schedule_resumes_to_the_same_decisions(monkeypatch):
    asked = ["--method", "own_schedule.py:PLATEAU", *SMALL, "--epochs", "7"]
    assert main(["train", *asked, "--out", "whole"]) == 0
    end_batch, ended = deat.Game.end_batch, []

    def end_batch_and_interrupt(game, buffers):
        end_batch(game, buffers)
        ended.append(buffers)
        if len(ended) == BATCHES * 4 + 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as cut:
        cut.setattr(deat.Game, "end_batch", end_batch_and_interrupt)
        assert main(["train", *asked, "--out", "cut"]) == 75
    assert main(["resume", "cut", "--method", "own_schedule.py:PLATEAU"]) == 0
    assert history("cut") == history("whole")
    assert len({epoch["k"] for epoch in history("whole")}) > 2


@pytest.mark.promise("P112")
def test_a_play_that_declares_another_cost_than_it_has_is_stopped_at_the_first_batch(capsys):
    Path("own_play.py").write_text(Path("own_play.py").read_text().replace("budget.k + 2", "budget.k + 1"))
    assert main(["train", "--method", "own_play.py:mixed-2", *SMALL, "--out", "run"]) == 2
    assert "made 4 backprops in a batch with k = 2" in " ".join(capsys.readouterr().err.split())
