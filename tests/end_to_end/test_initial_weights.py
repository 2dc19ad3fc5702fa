"""`--init`: given weights are read safely, scored before training, and change nothing else."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deat
from deat.cli import train as train_command
from deat.cli.main import main
from deat.data.channel_stats import ChannelStats
from deat.models.weights import read_weights

QUICK = [
    "train",
    "--model",
    "net.py:Net",
    "--method",
    "fgsm",
    "--epochs",
    "1",
    "--batch-size",
    "64",
    "--baseline",
    "no",
]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(CODE)


STATISTICS = ChannelStats((0.5,), (0.1,))
CODE = """import torch
from torch import nn
class Net(nn.Module):
    \"\"\"Of no use with another normalisation than in training.\"\"\"
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 128), nn.Linear(128, 10)
    def forward(self, x):
        return self.last(torch.tanh(self.first(torch.cos(x.flatten(1)))))
"""


def train_on_digits(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    net = make_net()
    train = deat.load_data("digits").train
    deat.fit(net, train, method="natural", epochs=12, batch_size=64, lr=0.1, progress=False, **options)
    return net


def make_net() -> nn.Module:
    names: dict[str, Any] = {}
    exec(CODE, names)
    net: nn.Module = names["Net"]()
    return net


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    """A network that knows digits, behind no normalisation."""
    return train_on_digits()


def scores_in(told: str) -> tuple[float, float, int]:
    (line,) = [line for line in told.splitlines() if line.startswith("your weights: ")]
    words = line.replace("%", "").replace("(", "").split()
    return float(words[2]), float(words[4]), int(words[6])


@pytest.mark.parametrize("suffix", ["pt", "pth", "safetensors"])
def test_given_weights_are_scored_on_held_out_images_before_training(
    suffix: str, trained: nn.Module, capsys: pytest.CaptureFixture[str]
) -> None:
    if suffix == "safetensors":
        deat.save_weights(trained, "w.safetensors")
    else:
        torch.save({"state_dict": {f"module.{n}": t for n, t in trained.state_dict().items()}}, f"w.{suffix}")
    assert main([*QUICK, "--init", f"w.{suffix}", "--normalize", "none", "--out", "run", "--held-out", "200"]) == 0
    told = capsys.readouterr()
    natural, robust, images = scores_in(told.out)
    assert (natural > 80, robust < natural, images) == (True, True, 200)
    assert "at chance" not in told.err
    assert "your weights: " in Path("run/report.md").read_text()
    before = json.loads(Path("run/run.json").read_text())["digest_of_init"]
    assert main(["resume", "run", "--model", "net.py:Net"]) == 0
    assert "your weights: " not in capsys.readouterr().out
    assert json.loads(Path("run/run.json").read_text())["digest_of_init"] == before


@pytest.mark.promise("P81")
def test_training_is_the_same_with_and_without_the_scores(
    trained: nn.Module, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    deat.save_weights(trained, "w.safetensors")
    command = [*QUICK, "--init", "w.safetensors", "--out"]
    assert main([*command, "scored"]) == 0
    assert "your weights: " in capsys.readouterr().out
    monkeypatch.setattr(train_command, "score_initial_weights", lambda *_: None)
    assert main([*command, "plain"]) == 0
    assert "your weights: " not in capsys.readouterr().out
    for name in ("history.jsonl", "best/model.safetensors", "last/model.safetensors"):
        assert Path("scored", name).read_bytes() == Path("plain", name).read_bytes()


def reordered(net: nn.Module) -> nn.Module:
    """The network with its outputs in another order."""
    net = copy.deepcopy(net)
    for tensor in (net.last.weight, net.last.bias):
        tensor.data = tensor.data.roll(1, 0)
    return net


CAUSES = {
    "normalisation missing": (
        lambda trained: train_on_digits(normalize=STATISTICS[:2]),
        "none",
        r"With the data's normalisation in front they reach [5-9].*add --normalize data",
    ),
    "normalisation too many": (
        lambda trained: trained,
        "data",
        r"Without the normalisation in front they reach [5-9].*add --normalize none",
    ),
    "classes in another order": (
        reordered,
        "none",
        r"in another order they reach [789].*the data's classes, which is 0, 1, 2, 3, 4, \.\.\.",
    ),
    "no knowledge": (
        lambda trained: make_net(),
        "none",
        "Usual causes: another normalisation",
    ),
}


@pytest.mark.promise("P81")
@pytest.mark.parametrize("cause", CAUSES)
def test_weights_at_chance_are_reported_with_the_likely_cause(
    cause: str, trained: nn.Module, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make, normalize, words = CAUSES[cause]
    monkeypatch.setattr(deat.DataSplits, "channel_stats", lambda *_, **__: STATISTICS)
    deat.save_weights(make(trained), "w.safetensors")
    assert main([*QUICK, "--init", "w.safetensors", "--out", "run", "--normalize", normalize]) == 0
    told = capsys.readouterr()
    assert scores_in(told.out)[0] < 20
    assert "answer at chance before training" in told.err
    assert re.search(words, told.err)


def test_scores_are_in_the_document_of_json(trained: nn.Module, capsys: pytest.CaptureFixture[str]) -> None:
    deat.save_weights(trained, "w.safetensors")
    assert main([*QUICK, "--init", "w.safetensors", "--out", "run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["init"]
    assert (found["images"], found["part"], found["natural"] > 0.8) == (139, "held-out", True)


def test_a_run_s_own_normalisation_is_taken_over_from_a_file_of_torch_s_too(trained: nn.Module) -> None:
    wrapped = deat.add_normalization(trained, [0.25], [0.5])
    torch.save({f"model.{name}": tensor for name, tensor in wrapped.state_dict().items()}, "w.pt")
    assert main([*QUICK, "--init", "w.pt", "--out", "run"]) == 0
    assert read_weights("run").normalization == {"mean": [0.25], "std": [0.5]}


@pytest.mark.promise("P24")
def test_a_run_that_is_interrupted_while_its_weights_are_scored_is_resumed(
    trained: nn.Module, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    deat.save_weights(trained, "w.safetensors")
    command = [*QUICK, "--init", "w.safetensors", "--out"]
    assert main([*command, "whole"]) == 0

    def interrupt(run: Any, trainer: Any, *_: Any) -> None:
        trainer.interruption.request("asked to stop")
        trainer.interruption.check()

    with monkeypatch.context() as patched:
        patched.setattr(train_command, "score_initial_weights", interrupt)
        assert main([*command, "run"]) == 75
    assert "Resume with: deat resume run" in capsys.readouterr().err
    assert main(["resume", "run", "--model", "net.py:Net"]) == 0
    for name in ("history.jsonl", "last/model.safetensors"):
        assert Path("run", name).read_bytes() == Path("whole", name).read_bytes()
