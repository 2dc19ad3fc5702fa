"""Every command that deat prints works as it is printed, for a run whose network and method are code of one's own."""

import os
import re
import shlex
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from deat.cli.evaluate import EXIT_FLAGGED
from deat.cli.main import main
from deat.core.game import Game
from deat.report.run_results import load_run_results
from deat.training.messages import format_command
from deat.utils.distributed import Distributed
from helpers.data_sets import tree, write_folder

OWN = """
import deat
from torch import nn

OURS = deat.get_method("pgd-1")

class Net(nn.Module):
    def __init__(self, num_classes, in_channels):
        super().__init__()
        self.layer = nn.Sequential(nn.Flatten(), nn.Linear(64 * in_channels, num_classes))

    def forward(self, x):
        return self.layer(x)
"""
HOW = "--epochs 2 --batch-size 256 --held-out 20 --val-attack fgsm --watch none --baseline no --test-images 20"
TRAIN = ["train", "--model", "own.py:Net", "--method", "own.py:OURS", *HOW.split(), "--out", "my run"]
RESUME = "deat resume 'my run' --method own.py:OURS --model own.py:Net"
EVALUATE = "deat evaluate 'my run' --model own.py:Net"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with code of one's own and a run of it, whose name needs quotes."""
    here = tmp_path_factory.mktemp("advice")
    (here / "own.py").write_text(OWN)
    before = Path.cwd()
    os.chdir(here)
    try:
        assert main(TRAIN) == 0
    finally:
        os.chdir(before)
    return here


@pytest.fixture(autouse=True)
def here(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, to work in."""
    place = shutil.copytree(trained, tmp_path / "here")
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return place


def give(text: str) -> int:
    """Give a printed command, as a shell would."""
    deat, *words = shlex.split(text)
    assert deat == "deat"
    return main(words)


def test_a_folder_that_is_taken_names_the_command_that_resumes_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(TRAIN) == 2
    said = capsys.readouterr().err
    assert said.strip().endswith(f"add --overwrite to replace that run, or resume it: {RESUME}")
    assert give(RESUME) == 0


def test_a_folder_that_is_no_run_is_not_said_to_be_one(capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    assert main([*TRAIN[:-1], "empty"]) == 2
    assert "--resume auto" in capsys.readouterr().err
    assert main([*TRAIN[:-1], "empty", "--resume", "auto"]) == 0
    Path("my run/notes.txt").write_text("mine")  # then it may go on, and may not be replaced
    assert main(TRAIN) == 2
    said = capsys.readouterr().err
    assert RESUME in said
    assert "--overwrite" not in said


@pytest.mark.promise("P24")
def test_interrupted_training_names_its_folder_and_the_command_that_resumes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, seen = Game.end_batch, []

    def close(self: Game, *args: Any) -> Any:
        seen.append(1)
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, *args)

    shutil.rmtree("my run")
    with monkeypatch.context() as patch:
        patch.setattr(Game, "end_batch", close)
        assert main(TRAIN) == 75
    said = capsys.readouterr().err.strip()
    assert said.endswith(
        f"interrupted by SIGTERM in epoch 1 of 2, after batch 2; saved in my run. Resume with: {RESUME}"
    )
    assert give(RESUME) == 0
    assert Path("my run/report.md").is_file()


def test_an_unfinished_run_that_is_evaluated_names_the_command_that_resumes(capsys: pytest.CaptureFixture[str]) -> None:
    Path("my run/report.md").unlink()
    assert give(f"{EVALUATE} --attacks natural --n 10") in (0, 6)
    assert f"Resume it with: {RESUME}" in capsys.readouterr().err


def test_a_report_names_the_command_that_fills_its_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "my run", "--no-figures"]) == 0
    said = capsys.readouterr().out
    assert "held-out natural  held-out FGSM" in said
    (judging,) = [line.strip() for line in said.splitlines() if line.startswith("  deat evaluate")]
    assert judging == EVALUATE
    for name in ("table.md", "index.html"):
        assert (judging if name == "table.md" else "--model own.py:Net") in Path("my run/report", name).read_text()
    assert give(f"{judging} --attacks natural,fgsm --n 20") in (0, 6)
    assert main(["report", "my run", "--no-figures", "--gallery", "0"]) == 0
    assert "held-out" not in capsys.readouterr().out
    assert set(load_run_results("my run").metrics) >= {"natural", "fgsm"}


def test_code_that_must_be_named_is_named_as_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    for words, flags in (
        (["resume"], ("--method own.py:OURS", "--model own.py:Net")),
        (["evaluate"], ("--model own.py:Net",)),
    ):
        given = [*words, "my run"]
        for flag in flags:
            assert main(given) == 2
            assert capsys.readouterr().err.strip().endswith(f"Say so yourself: {flag}")
            given += flag.split()


def test_data_without_test_images_name_the_command_that_scores_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(Path("bare"), tree(per_class=12, test=None))
    write_folder(Path("judged"), tree(per_class=12))
    shutil.rmtree("my run")
    own = ["--data", "folder:bare", "--batch-size", "8", "--held-out", "4", "--epochs", "1"]
    assert main([*TRAIN, *own]) == 0
    said = " ".join(capsys.readouterr().out.split())
    (judging,) = re.findall(r"score this run on such a folder: (deat evaluate .* folder:PATH)", said)
    assert judging == f"{EVALUATE} --data folder:PATH"
    assert give(judging.replace("PATH", "judged") + " --attacks natural") in (0, 6)


def test_a_doubtful_score_names_the_command_that_tells_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "deat.runs.final_scores.compute_accuracies", lambda *_, **__: {"natural": 0.9, "fgsm": 0.1, "pgd-20": 0.8}
    )
    shutil.rmtree("my run")
    assert main(TRAIN) == 0
    told = f": {EVALUATE} --attacks natural,pgd-20,aa"
    assert told in capsys.readouterr().out
    assert told in Path("my run/report.md").read_text()
    assert give(f"{EVALUATE} --attacks natural,pgd-2 --n 10") in (0, 6)


def test_paths_at_home_are_recorded_without_it_and_advised_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert format_command("evaluate", Path("run"), {"model": "~/my nets/own.py:Net"}) == (
        f"deat evaluate run --model '{tmp_path}/my nets/own.py:Net'"
    )
    assert format_command("evaluate", Path("run"), {"model": "small", "method": "own.py:OURS"}) == "deat evaluate run"
    assert format_command("resume", Path("run"), {}) == "deat resume run"


def test_a_run_of_several_processes_resumes_in_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    said = "torchrun --standalone --nproc-per-node=2 -m -- deat resume run"
    assert format_command("resume", Path("run"), {}, Distributed(0, 2)) == said
    assert format_command("resume", Path("run"), {}, Distributed(0, 4)).startswith(
        "(started as before, in 4 processes) deat"
    )


def test_weights_saved_by_torch_are_evaluated_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"layer.1.weight": torch.zeros(10, 64), "layer.1.bias": torch.zeros(10)}, "my weights.pt")
    assert main(["evaluate", "my weights.pt", "--data", "digits", "--model", "own.py:Net"]) == EXIT_FLAGGED
    assert "at_chance" in capsys.readouterr().err
    assert Path("my weights.evaluation.json").is_file()
