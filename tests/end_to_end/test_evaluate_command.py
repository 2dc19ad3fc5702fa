"""`deat evaluate` as a person uses it."""

import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deat
from deat.cli.evaluate import print_evaluation
from deat.cli.main import main
from deat.evaluation.attacks import Attack
from deat.evaluation.autoattack import AutoAttack
from deat.evaluation.results import AttackResult, Evaluation, load_evaluation
from deat.runs.record_files import read_record
from deat.threat import Linf
from helpers.children import Children


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run on digits."""
    out = tmp_path_factory.mktemp("runs") / "run"
    flags = ["--epochs", "8", "--test-images", "0", "--val-attack", "pgd-5", "--baseline", "no", "--out", str(out)]
    assert main(["train", *flags]) == 0
    return out


def test_a_run_is_evaluated_by_what_it_says_of_itself(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["evaluate", str(run), "--attacks", "natural,fgsm,pgd-10", "--epoch", "last"]) == 0
    shown = capsys.readouterr().out
    found = load_evaluation(run / "evaluation.json")
    assert "linf eps 0.15, 400 images" in shown
    assert f"{found.accuracy['pgd-10']:.2%}" in shown
    assert found.worst <= found.accuracy["pgd-10"] <= found.accuracy["natural"]
    assert found.settings["threat"] == {"norm": "linf", "eps": 0.15}
    assert not list(run.glob(".evaluation*"))


def test_the_table_says_which_weights_it_evaluated_on_what_and_where_autoattack_is_not_the_standard_one(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(run), "--attacks", "natural", "--n", "20", "--epoch", "last"]) == 0
    said = capsys.readouterr().out
    assert "evaluated: the last epoch's weights, " in said
    assert "on 20 test images of digits" in said
    for classes, told in ((3, True), (4, False)):
        how = AutoAttack().describe(Linf(8 / 255), classes)
        settings = {
            "about": {"epoch": None, "weights": "w.safetensors", "data": "digits"},
            **{"threat": {"norm": "linf", "eps": 8 / 255}, "sample": False, "seed": 0, "cascade": False},
            "attacks": {"aa": how},
        }
        result = AttackResult("aa", [True], 0, 1.0, 1, 1)
        print_evaluation(Evaluation([result], [0], ["a"], settings), tmp_path / "e.json")
        said = capsys.readouterr().out
        assert "linf eps 8/255, 1 images" in said
        assert ("not the standard AutoAttack" in said) == told


@pytest.mark.parametrize(("cascade", "pgd"), [(False, ["50.00%", "29.9% to 70.1%"]), (True, [])])
def test_the_table_shows_intervals_by_class_too_and_what_each_attack_added_and_a_cascade_fills_no_attack_s_column(
    cascade: bool, pgd: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    standing = {"natural": 18, "pgd-20": 10, "cw-20": 11}
    results = [AttackResult(name, [i < n for i in range(20)], 0, 1.0, 1, 1) for name, n in standing.items()]
    settings = {
        "about": {"epoch": None, "weights": "w.safetensors", "data": "digits"},
        **{"threat": {"norm": "l2", "eps": 0.5}, "sample": True, "available": 4000, "seed": 0, "cascade": cascade},
        "attacks": {name: {} for name in standing},
    }
    found = Evaluation(results, [0] * 10 + [1] * 10, ["cat", "dog"], settings)
    print_evaluation(found, tmp_path / "e.json")
    shown = capsys.readouterr().out
    rows = {row[0]: row[1:] for line in shown.splitlines() if (row := re.split(" {2,}", line.strip()))}
    assert rows["natural"] == ["90.00%", "69.9% to 97.2%", "2", "1.0"]
    assert rows["pgd-20"] == [*pgd, "8", "1.0"]
    assert rows["cw-20"][-2:] == ["0", "1.0"]
    assert rows["worst of all"] == ["50.00%", "29.9% to 70.1%"]
    assert (rows["cat"], rows["dog"]) == (["100.0%", "72.2% to 100.0%", "10"], ["0.0%", "0.0% to 27.8%", "10"])
    assert "l2 eps 0.5, 20 images (a sample of 4,000), seed 0" in shown
    assert "a sample of 20 images: not comparable with numbers on the whole test set" in shown


@pytest.mark.parametrize(("order", "told"), [("natural,fgsm", False), ("fgsm", True), ("fgsm,natural", True)])
def test_the_table_says_where_images_that_nothing_had_to_fool_are_counted_among_the_fooled(
    order: str, told: bool, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(run), "--attacks", order, "--n", "20"]) == 0
    assert ("counts examples that are wrong without any attack" in capsys.readouterr().out) == told


def test_the_record_says_which_weights_of_which_model_were_evaluated_on_which_data_and_names_no_home(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(run.parent))
    judged = ["evaluate", str(run), "--attacks", "natural", "--n", "20", "--device", "cpu"]
    for epoch in ("best", "last"):
        assert main([*judged, "--epoch", epoch]) == 0
        told = load_evaluation(run / "evaluation.json").settings
        known = {
            "data": "digits",
            "data_root": None,
            "size": None,
            "model": "small",
            "normalize": "auto",
            "epoch": epoch,
        }
        assert told["about"] == {**known, "weights": f"~/run/{epoch}/model.safetensors"}
        assert (told["device"], told["image"], told["sanity"]) == ("cpu", [1, 8, 8], True)
    assert str(run.parent) not in (run / "evaluation.json").read_text()


def test_alpha_is_the_step_of_every_attack_but_fgsm(run: Path) -> None:
    attacks = ["natural", "fgsm", "pgd-1", "cw-1", "pgd-3"]
    judged = ["evaluate", str(run), "--attacks", ",".join(attacks), "--n", "20"]
    assert main([*judged, "--alpha", "0.01"]) in (0, 6)
    steps = load_evaluation(run / "evaluation.json").settings["attacks"]
    shown = [steps[name]["alpha"] for name in attacks[1:]]
    assert shown == pytest.approx([0.15, 0.01, 0.01, 0.01])


def test_json_is_the_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["evaluate", str(run), "--attacks", "natural,pgd-5", "--n", "60", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((run / "evaluation.json").read_text())
    assert printed["images"] == 60
    assert printed["settings"]["sample"] is True


def test_a_sample_and_a_cascade_are_named_as_such(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(run), "--attacks", "natural,fgsm,pgd-5", "--n", "50", "--cascade"]) == 0
    shown = capsys.readouterr().out
    assert "a sample of" in shown
    assert "survivors only" in shown
    assert set(load_evaluation(run / "evaluation.json").accuracy) == {"natural", "worst"}


def test_weights_alone_need_their_data_and_model(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = tmp_path / "mine.safetensors"
    weights.write_bytes((run / "last/model.safetensors").read_bytes())
    assert main(["evaluate", str(weights)]) == 2
    assert "--data" in capsys.readouterr().err
    assert main(["evaluate", str(weights), "--data", "digits", "--attacks", "natural", "--n", "40"]) == 0
    assert (tmp_path / "mine.evaluation.json").is_file()
    assert main(["evaluate", str(weights), "--data", "digits", "--model", "preact_resnet18"]) == 4


def test_code_is_never_run_on_a_records_word(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    marker = tmp_path / "marker"
    code = tmp_path / "net.py"
    code.write_text(f"from pathlib import Path\nPath({str(marker)!r}).touch()\nNet = None\n")
    copied = tmp_path / "run"
    copied.mkdir()
    record = json.loads((run / "run.json").read_text())
    record["model"]["name"] = f"{code}:Net"
    (copied / "run.json").write_text(json.dumps(record))
    assert main(["evaluate", str(copied)]) == 2
    assert "--model" in capsys.readouterr().err
    assert not marker.exists()


class Quantised(nn.Module):
    """A network behind an input that is rounded to eight levels."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.net = deat.build_model("small", num_classes, 1, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net((x * 7).round() / 7)


@pytest.fixture
def judge_quantised(tmp_path: Path) -> list[str]:
    """A command that judges what raises a flag before the first attack."""
    deat.save_weights(Quantised(), tmp_path / "quantised.safetensors")
    order = ["evaluate", str(tmp_path / "quantised.safetensors"), "--data", "digits", "--model"]
    return [*order, f"{Path(__file__)}:Quantised", "--attacks", "natural,pgd-5", "--n", "100"]


def test_a_number_that_should_not_be_believed_exits_with_6(
    judge_quantised: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(judge_quantised) == 6
    for text in capsys.readouterr():  # before the first attack, and once more at the end
        assert text.count("FLAG zero_gradients") == 1
        assert "docs/evaluation.md#zero_gradients" in text
    assert main([*judge_quantised, "--json"]) == 6
    shown, early = capsys.readouterr()
    assert "zero_gradients" in {flag["name"] for flag in json.loads(shown)["flags"]}
    assert early.count("FLAG zero_gradients") == 1


def test_on_one_screen_a_flag_is_explained_once(
    judge_quantised: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    assert main(judge_quantised) == 6
    screen = "".join("".join(capsys.readouterr()).split())
    assert screen.count("docs/evaluation.md#zero_gradients") == 1
    assert screen.count("FLAGzero_gradients,seeabove") == 1
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    assert main(judge_quantised) == 6
    for text in capsys.readouterr():
        assert "docs/evaluation.md#zero_gradients" in "".join(text.split())


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (["--attacks", "pdg-20"], 2, ["pdg-20", "pgd-20"]),
        (["--attacks", ""], 2, ["no attack"]),
        (["--attacks", "pgd-5,pgd-5"], 2, ["twice"]),
        (["--n", "0"], 2, [">= 1"]),
        (["--block", "0"], 2, [">= 1"]),
        (["--eps", "8"], 2, ["8/255"]),
        (["--norm", "l2"], 2, ["--eps", "l2"]),
        (["--norm", "l2", "--eps", "0.5"], 0, []),
        (["--device", "nope"], 2, ["nope"]),
    ],
)
def test_bad_input_names_what_is_accepted(
    run: Path, flags: list[str], status: int, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    command = ["evaluate", str(run), "--attacks", "natural", *flags]
    assert main(command) == status
    message = capsys.readouterr().err
    assert all(word in message for word in words), message


@pytest.mark.parametrize("name", ["run.json", "last/model.safetensors", "last"])
def test_only_an_earlier_evaluation_is_replaced(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = (run / name).read_bytes() if (run / name).is_file() else b""
    assert main(["evaluate", str(run), "--attacks", "natural", "--out", str(run / name)]) == 2
    assert "--out" in capsys.readouterr().err
    assert not before or (run / name).read_bytes() == before


@pytest.mark.promise("P8")
def test_a_second_command_on_the_same_file_leaves_with_7_and_the_first_one_s_rulings_stay(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, real = tmp_path / "deep/e.json", Attack.__call__
    command = ["evaluate", str(run), "--n", "10", "--out", str(out), "--attacks"]

    def beside(*args: Any) -> torch.Tensor:
        monkeypatch.setattr(Attack, "__call__", real)
        rulings = (out.parent / ".e-rulings.jsonl").read_bytes()
        assert main([*command, "fgsm"]) == 7
        assert (out.parent / ".e-rulings.jsonl").read_bytes() == rulings != b""
        assert main([*command[:-2], str(tmp_path / "other.json"), "--attacks", "fgsm"]) == 0
        return real(*args)

    monkeypatch.setattr(Attack, "__call__", beside)
    assert main([*command, "natural,fgsm"]) == 0
    assert re.search(r"process \d+ on this machine, .* is working on '.*e.json'", capsys.readouterr().err)
    assert [path.name for path in out.parent.iterdir()] == ["e.json"]
    assert main([*command, "fgsm"]) == 0


def test_an_evaluation_of_other_weights_is_kept_though_their_file_has_the_same_name(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights, out = tmp_path / "w.safetensors", tmp_path / "e.json"
    deat.save_weights(deat.build_model("small", 10, 1, 8), weights)
    command = ["evaluate", str(weights), "--data", "digits", "--attacks", "natural", "--n", "50", "--out", str(out)]
    for _ in range(2):
        main(command)
    first = out.read_bytes()
    assert not (tmp_path / "e-1.json").exists()
    weights.write_bytes((run / "last/model.safetensors").read_bytes())
    capsys.readouterr()
    assert main(command) == 0
    assert "e.json is of other weights; it was copied to e-1.json" in capsys.readouterr().err
    assert (tmp_path / "e-1.json").read_bytes() == first
    assert load_evaluation(out).accuracy != load_evaluation(tmp_path / "e-1.json").accuracy


def test_no_other_epoch_is_evaluated_than_the_one_requested(run: Path, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text((run / "run.json").read_text())
    assert main(["evaluate", str(tmp_path), "--attacks", "natural"]) == 4


def test_what_is_not_there_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "nowhere"]) == 4
    assert "nowhere" in capsys.readouterr().err


def test_killed_at_any_moment_it_resumes_and_ends_with_the_same_verdicts(
    run: Path, children: Children, tmp_path: Path
) -> None:
    command = ["evaluate", str(run), "--attacks", "natural,pgd-40,cw-40", "--block", "20", "--n", "200"]
    whole, broken = tmp_path / "whole.json", tmp_path / "broken.json"
    assert main([*command, "--out", str(whole)]) == 0
    rulings = tmp_path / ".broken-rulings.jsonl"
    child = children.start(*command, "--out", str(broken), cwd=tmp_path)
    deadline = time.monotonic() + 60
    while (not rulings.exists() or rulings.read_text().count("\n") < 5) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    children.wait(child)
    assert rulings.exists(), "the child ended before it was killed"
    done = rulings.read_text().count("\n")
    assert done >= 5
    assert not broken.exists()
    assert main([*command, "--out", str(broken)]) == 0
    assert load_evaluation(whole).verdicts == load_evaluation(broken).verdicts
    assert not rulings.exists()


def test_precision_and_engine_reach_the_judge(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    judged = ["evaluate", str(run), "--attacks", "natural", "--n", "20", "--device", "cpu"]
    assert main([*judged, "--precision", "fp32", "--engine", "eager", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["precision"] == "fp32"
    assert main([*judged, "--precision", "fp16"]) == 2
    assert "fp16 need a CUDA device" in capsys.readouterr().err
    for engine in ("graph", "compile"):
        assert main([*judged, "--engine", engine]) == 2
        assert f"engine '{engine}' needs a CUDA device" in capsys.readouterr().err


def test_every_form_of_an_attack_s_name_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "attacks"]) == 0
    shown = capsys.readouterr().out
    assert "pgd-NxR" in shown
    assert "pgd-N-last" in shown


def test_classes_of_other_names_are_reported_to_be_matched_by_their_order(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judged = ["evaluate", "--attacks", "natural", "--n", "20"]
    assert main([*judged, str(run)]) == 0
    assert "other classes" not in capsys.readouterr().err
    copied = shutil.copytree(run, tmp_path / "run")
    record = json.loads((copied / "run.json").read_text())
    record["data"]["classes"][3] = "trois"
    (copied / "run.json").write_text(json.dumps(record))
    assert main([*judged, str(copied)]) == 0
    assert "matched by their order: '3' for 'trois'" in capsys.readouterr().err


def test_a_run_s_record_is_read_once_so_that_all_that_is_reported_is_of_one_run(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    monkeypatch.setattr("deat.runs.trained_run.read_record", lambda path: read.append(path) or read_record(path))
    assert main(["evaluate", str(run), "--attacks", "natural", "--n", "20"]) == 0
    assert read == [run]
