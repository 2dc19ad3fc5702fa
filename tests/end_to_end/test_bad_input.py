"""Bad input ends before training, says what is wrong, what is accepted and what to do, and creates nothing."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import deat
from deat.cli.exit_handling import short_warnings
from deat.cli.main import main
from deat.errors import DataError, DeatError, UsageError

CASES = [
    (["--method", "deet-3"], 2, ["unknown method 'deet-3'", "deat-3"]),
    (["--method", "m+natural"], 2, ["m+", "adversary"]),
    (["--model", "preact_resnet19"], 2, ["unknown model 'preact_resnet19'", "preact_resnet18"]),
    (["--data", "cifar11"], 2, ["unknown data 'cifar11'", "cifar10"]),
    (["--data", "folder:nowhere"], 3, ["nowhere", "directory"]),
    (["--eps", "8"], 2, ["8/255"]),
    (["--eps", "-0.1"], 2, ["eps", "negative"]),
    (["--eps", "nan"], 2, ["nan", "8/255"]),
    (["--eps", "8/0"], 2, ["8/0", "8/255"]),
    (["--eps", "__import__('os').mkdir('marker')"], 2, ["not a number"]),
    (["--norm", "l2"], 2, ["l2", "eps"]),
    (["--norm", "l3"], 2, ["unknown norm 'l3'", "l1, l2, linf"]),
    (["--norm", "l2", "--eps", "600"], 2, ["l2 eps 600", "1x8x8", "8.", "smaller radius"]),
    (["--gamma", "0"], 2, ["gamma", "> 0"]),
    (["--gamma", "-1"], 2, ["gamma", "-1"]),
    (["--gamma", "1.1", "--method", "pgd-7"], 2, ["pgd-7", "gamma", "m+"]),
    (["--max-steps", "0"], 2, ["max_steps", ">= 1"]),
    (["--beta", "2"], 2, ["beta", "trades"]),
    (["--beta", "-2", "--method", "trades"], 2, ["beta", "-2"]),
    (["--tau", "2"], 2, ["tau", "fat-K"]),
    (["--compact"], 2, ["compact", "fat-K"]),
    (["--alpha", "-1"], 2, ["alpha", "-1"]),
    (["--alpha", "1e39"], 2, ["alpha", "1e+39", "2/255"]),
    (["--alpha", "1e39", "--eps", "0.1"], 2, ["alpha", "1e+39"]),
    (["--epochs", "1000000000", "--dry-run"], 2, ["epochs", "100,000"]),
    (["--out", "x" * 300], 2, ["--out", "too long"]),
    (["--out", "x/" * 3000], 2, ["--out", "too long"]),
    (["--out", "a\0b"], 2, ["--out", "null"]),
    (["--resume", "auto"], 2, ["--out"]),
    (["--resume", "yes"], 2, ["yes", "auto"]),
    (["--method", "{{7*7}}"], 2, ["{{7*7}}"]),
    (["--model", "__import__('os').mkdir('marker')"], 2, ["unknown model"]),
    (["--data", "$(mkdir marker)"], 2, ["unknown data"]),
    (["--init", "../../etc/passwd"], 4, ["passwd"]),
    (["--epochs", "0"], 2, ["epochs", ">= 1"]),
    (["--epochs", "1.5"], 2, ["1.5", "whole number"]),
    (["--batch-size", "0"], 2, ["batch_size", ">= 1"]),
    (["--batch-size", "5000"], 3, ["1258", "5000"]),
    (["--lr", "-1"], 2, ["lr", "-1"]),
    (["--lr", "inf"], 2, ["inf"]),
    (["--momentum", "1.5"], 2, ["momentum", "1.5"]),
    (["--weight-decay", "-1"], 2, ["weight_decay"]),
    (["--seed", "-1"], 2, ["seed", ">= 0"]),
    (["--threads", "0"], 2, ["threads"]),
    (["--workers", "-1"], 2, ["workers"]),
    (["--held-out", "5000"], 2, ["5000", "1397"]),
    (["--held-out", "1396"], 3, ["1396 are held out", "Hold out at most 1333 (val, --held-out)."]),
    (["--held-out", "-1"], 2, ["-1"]),
    (["--val-attack", "pgd"], 2, ["unknown attack 'pgd'", "pgd-20"]),
    (["--test-images", "-1"], 2, ["test_images"]),
    (["--device", "cuda:99"], 2, ["cuda:99", "cpu"]),
    (["--device", "gpu"], 2, ["gpu", "cpu"]),
    (["--precision", "fp16", "--device", "cpu"], 2, ["fp16", "bf16"]),
    (["--init", "nothing.safetensors"], 4, ["nothing.safetensors"]),
    (["--method", "nothing.py:NAME"], 2, ["nothing.py"]),
    (["--model", "nothing.py:NAME"], 2, ["nothing.py"]),
    (["--size", "32"], 2, ["size", "folder"]),
    (["--lr-schedule", "triangle"], 2, ["triangle", "cyclic"]),
    (["--rules", "both"], 2, ["both", "released"]),
    (["--colour", "red"], 2, ["--colour"]),
    (["--learning-rate", "0.1"], 2, ["unknown option '--learning-rate'", "Did you mean --lr?"]),
    (["--learning_rate=0.1"], 2, ["unknown option '--learning_rate'", "Did you mean --lr?"]),
    (["--lr", "0.1", "--batch", "4"], 2, ["Did you mean --batch-size?"]),
]


@pytest.mark.promise("P48", "P49", "P50", "P52")
@pytest.mark.parametrize(
    ("flags", "status", "words"), CASES, ids=lambda v: " ".join(v) if isinstance(v, list) else None
)
def test_it_is_refused_before_training_with_a_reason_and_a_remedy(
    flags: list[str],
    status: int,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code = main(["train", *flags])
    except SystemExit as stop:  # the flag parser's own refusals
        code = int(stop.code or 0)
    message = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert code == status, message
    assert all(word in message for word in words), message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "flags",
    [["--method", "nope"], ["--eps", "8"], ["--device", "nope"], ["--out", "set"], ["--gamma", "0", "--eps", "0.1"]],
)
def test_nothing_is_decoded_for_a_command_that_is_refused(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("set/cat").mkdir(parents=True)
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save("set/cat/0.png")
    assert main(["train", "--data", "folder:set", "--data-root", "cache", *flags]) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["set"]


def test_an_existing_folder_is_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    assert main(["train", "--out", str(tmp_path / "mine")]) == 2
    message = capsys.readouterr().err
    assert str(tmp_path / "mine") in message
    assert "another --out" in message
    assert "--resume auto" in message
    assert list((tmp_path / "mine").iterdir()) == []
    (tmp_path / "mine" / "thesis.docx").write_text("mine")
    assert main(["train", "--out", str(tmp_path / "mine")]) == 2
    assert capsys.readouterr().err.endswith("is no run of deat's. Choose another --out.\n")


def test_a_folder_that_cannot_be_written_ends_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["train", "--out", str(tmp_path / "file" / "run")]) in (2, 4)
    assert "--out" in capsys.readouterr().err


def test_a_folder_with_a_broken_image_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "set" / name).mkdir(parents=True)
        for i in range(4):
            Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "set" / name / f"{i}.png")
    (tmp_path / "set" / "dog" / "9.png").write_bytes(b"not an image")
    command = ["train", "--data", f"folder:{tmp_path / 'set'}", "--data-root", str(tmp_path / "cache")]
    assert main([*command, "--out", str(tmp_path / "run")]) == 3
    assert "9.png" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_warning_of_deats_own_is_a_line_without_a_place_in_its_code() -> None:
    usual = warnings.formatwarning
    with short_warnings():
        assert warnings.formatwarning("so it is", UserWarning, deat.__file__, 1) == "deat: so it is\n"
        assert warnings.formatwarning("no", UserWarning, "other.py", 1) == usual("no", UserWarning, "other.py", 1)
    assert warnings.formatwarning is usual


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def tensors(high: float = 1.0, top: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(64, 1, 8, 8) * high, torch.arange(64) % (top + 1)


@pytest.mark.parametrize(
    ("train", "options", "words"),
    [
        (tensors(255.0), {}, ["255", "uint8"]),
        ((tensors()[0] * 4 - 2, tensors()[1]), {}, ["normal"]),
        ((tensors()[0].fill_(float("nan")), tensors()[1]), {}, ["nan"]),
        (tensors(top=10), {}, ["10"]),
        ((tensors()[0], tensors()[1] - 1), {}, ["-1"]),
        ((tensors()[0][:4], tensors()[1][:4]), {}, ["4", "batch"]),
        ((tensors()[0][:0], tensors()[1][:0]), {}, ["empty"]),
        ((batch for batch in [tensors()]), {}, ["once"]),
        (tensors(top=0), {}, ["single class"]),
        (tensors(), {"threads": 10**6}, ["threads", "1024"]),
        (tensors(), {"workers": 10**6}, ["workers", "1024"]),
        (tensors(), {"threat": "l2:1e300"}, ["1e+300"]),
        (tensors(), {"threat": "linf:8"}, ["8/255"]),
        (tensors(), {"method": "nothing"}, ["nothing"]),
        (tensors(), {"val": 1.5}, ["1.5"]),
        (tensors(), {"epochs": 0}, ["epochs"]),
        (tensors(), {"normalize": ((0.5,), (0.0,))}, ["std"]),
        ((torch.rand(64, 3, 8, 8), tensors()[1]), {}, ["(3, 8, 8)"]),
    ],
)
def test_fit_refuses_bad_data_before_training(train: object, options: dict[str, object], words: list[str]) -> None:
    model = net()
    before = model[1].weight.detach().clone()
    with pytest.raises((UsageError, DataError)) as caught:
        deat.fit(model, train, **{"batch_size": 16, "threat": "linf:0.1", **options})
    assert all(word in str(caught.value).lower() for word in words), str(caught.value)
    assert torch.equal(before, model[1].weight)


def test_every_error_has_the_documented_exit_status() -> None:
    codes = {kind.__name__: kind.exit_code for kind in DeatError.__subclasses__()}
    assert codes == {
        "UsageError": 2,
        "DataError": 3,
        "CheckpointError": 4,
        "NumericalError": 5,
        "BusyError": 7,
        "Interrupted": 75,
    }
