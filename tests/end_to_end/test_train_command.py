"""`deat train` and `deat list` as a person uses them."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import deat
from deat.cli.main import main

QUICK = ["--epochs", "2", "--test-images", "50", "--val-attack", "pgd-2"]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_no_flags_teach_what_robustness_is_and_costs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train"]) == 0
    lines = capsys.readouterr().out.splitlines()
    scores = {row["name"]: row for row in json.loads(Path("runs/digits-m+deat/scores.json").read_text())}
    robust = min(row["accuracy"]["pgd-20"] for name, row in scores.items() if name.startswith("m+deat"))
    assert robust > 0.75
    assert scores["natural training"]["accuracy"]["pgd-20"] < 0.30
    assert scores["natural training"]["accuracy"]["natural"] > 0.95
    ks = [json.loads(line)["k"] for line in Path("runs/digits-m+deat/history.jsonl").read_text().splitlines()]
    assert ks[:3] == [0, 1, 1]
    assert max(ks) >= 3
    assert sum("natural training" in line for line in lines) == 1
    assert any(line.startswith("m+deat  epoch 30/30  k ") for line in lines)


def test_every_epoch_stays_on_a_terminal_with_its_scores(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("deat.cli.train.is_stdout_terminal", lambda: True)
    assert main(["train", *QUICK, "--out", "run", "--baseline", "yes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    epochs = [line for line in lines if line.startswith("epoch ")]
    assert [line.split()[1] for line in epochs] == ["1/2", "2/2", "1/2", "2/2"]
    assert all(" k " in line and " train (" in line and len(line) <= 80 for line in epochs)
    assert [" val " in line and "robust" in line for line in epochs] == [True, True, False, False]
    assert "natural training, to compare" in lines


def test_a_folder_without_test_images_says_why_nothing_is_scored_and_counts_what_is_held_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    draw = np.random.default_rng(0)
    for name in ("car", "dog"):
        Path("set", name).mkdir(parents=True)
        for i in range(15):
            Image.fromarray(draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(f"set/{name}/{i}.png")
    flags = ["train", "--data", "folder:set", "--data-root", "cache", "--out", "run", "--epochs", "1", "--val-attack"]
    assert main([*flags, "pgd-1"]) == 3
    said = capsys.readouterr().err
    assert "30 examples, of which 3 are held out for validation and 27 left, fewer than one batch of 128" in said
    assert "--batch-size) of at most 27" in said
    assert main([*flags, "pgd-1", "--batch-size", "9"]) == 0
    said = capsys.readouterr().out
    assert "nothing was scored: " in said
    assert "deat evaluate run --data folder:PATH" in said


def test_a_run_leaves_its_records_weights_and_report() -> None:
    assert main(["train", *QUICK, "--out", "run", "--baseline", "no"]) == 0
    found = sorted(str(p.relative_to("run")) for p in Path("run").rglob("*") if p.is_file())
    weights = [f"{which}/model.safetensors" for which in ("best", "last")]
    parts = ["MANIFEST.json", "model.safetensors", "optim.safetensors", "rng.safetensors", "state.json"]
    checkpoints = [f"ckpt-00000{number}/{part}" for number in (1, 2) for part in parts]
    records = ["history.jsonl", "report.md", "run.json", "scores.json", "timing.jsonl", "watch.jsonl"]
    assert found == sorted([*weights, *checkpoints, *records])
    history = [json.loads(line) for line in Path("run/history.jsonl").read_text().splitlines()]
    assert [h["epoch"] for h in history] == [0, 1]
    wanted = {"k", "alpha", "magnitude", "threshold", "loss", "train_accuracy", "val_natural", "val_robust", "lr"}
    assert wanted | {"log10_lipschitz", "backprops", "passes", "val_passes"} <= set(history[0])
    report = Path("run/report.md").read_text()
    assert "m+deat on digits" in report
    assert "| 2 | 1 |" in report


def test_the_same_seed_writes_the_same_history_byte_for_byte() -> None:
    for out, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        assert main(["train", *QUICK, "--out", out, "--seed", seed, "--baseline", "no"]) == 0
    a, b, c = (Path(out, "history.jsonl").read_bytes() for out in "abc")
    assert a == b
    assert a != c
    assert Path("a/last/model.safetensors").read_bytes() == Path("b/last/model.safetensors").read_bytes()


def test_json_prints_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *QUICK, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["history"]) == 2
    assert {s["name"] for s in document["scores"]} >= {"natural training"}


def test_a_dry_run_tells_the_cost_and_creates_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--method", "pgd-7", "--epochs", "10", "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["batches"] == 20  # 1,258 of 1,397 images in batches of 64
    assert plan["backprops"] == [1600, 1600]
    assert plan["seconds_per_backprop"] > 0
    assert plan["memory"] > 0
    assert main(["train", "--dry-run"]) == 0
    assert "depending on what training shows" in capsys.readouterr().out
    assert list(Path().iterdir()) == []


def test_training_continues_from_weights_of_an_earlier_run() -> None:
    assert main(["train", *QUICK, "--out", "first", "--baseline", "no", "--epochs", "6"]) == 0
    assert main(["train", *QUICK, "--out", "cold", "--baseline", "no"]) == 0
    assert main(["train", *QUICK, "--out", "warm", "--baseline", "no", "--init", "first"]) == 0
    cold, warm = (json.loads(Path(out, "history.jsonl").read_text().splitlines()[0]) for out in ("cold", "warm"))
    assert warm["train_accuracy"] > cold["train_accuracy"] + 0.2


def test_given_weights_start_with_a_smaller_learning_rate_which_is_reported_recorded_and_kept(
    capsys: pytest.CaptureFixture[str],
) -> None:
    deat.save_weights(deat.build_model("small", num_classes=10, in_channels=1, image_size=8), "w.safetensors")
    command = ["train", *QUICK, "--epochs", "1", "--baseline", "no", "--init", "w.safetensors", "--out"]
    assert main([*command, "warm"]) == 0
    said = (
        "starting from w.safetensors with a learning rate of 0.005, where training from random weights takes 0.05; --lr"
    )
    assert said in capsys.readouterr().out
    assert main(["resume", "warm"]) == 0
    assert main([*command, "mine", "--lr", "0.02"]) == 0
    assert "with a learning rate of 0.02, where training from random weights takes 0.05" in capsys.readouterr().out
    kept = [json.loads(Path(out, "run.json").read_text())["settings"]["lr"] for out in ("warm", "mine")]
    assert kept == [0.005, 0.02]


def test_a_method_and_a_model_come_from_files() -> None:
    Path("mine.py").write_text(
        "import deat\nfrom torch import nn\nfrom deat.attack_schedules import Fixed\n"
        "TWO = deat.Method('two', deat.Craft(), Fixed(k=2, alpha_eps=0.5))\n"
        "class Net(nn.Sequential):\n"
        "    def __init__(self, num_classes=10):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(64, num_classes))\n"
    )
    command = ["train", *QUICK, "--method", "mine.py:TWO", "--model", "mine.py:Net", "--out", "run", "--baseline", "no"]
    assert main(command) == 0
    record = json.loads(Path("run/run.json").read_text())
    assert record["method"]["name"] == "two"
    assert record["model"]["parameters"] == 650
    assert json.loads(Path("run/history.jsonl").read_text().splitlines()[0])["k"] == 2


def test_weights_for_other_classes_are_fine_tuned_with_a_fresh_last_layer() -> None:
    model = deat.build_model("small", num_classes=3, in_channels=1, image_size=8)
    deat.save_weights(model, "three.safetensors")
    with pytest.warns(UserWarning, match="start from random weights"):
        assert main(["train", *QUICK, "--out", "run", "--baseline", "no", "--init", "three.safetensors"]) == 0


def test_the_baseline_sees_the_same_training_images(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *QUICK, "--json", "--method", "free-1"]) == 0
    ours, natural = json.loads(capsys.readouterr().out)["scores"]
    assert ours["backprops"] == natural["backprops"] == 2 * 20


def test_runs_without_a_name_do_not_overwrite_each_other() -> None:
    for _ in range(2):
        assert main(["train", *QUICK, "--baseline", "no", "--epochs", "1"]) == 0
    assert sorted(p.name for p in Path("runs").iterdir()) == ["digits-m+deat", "digits-m+deat-2"]


@pytest.mark.promise("P51")
def test_overwrite_replaces_a_run_but_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", *QUICK, "--baseline", "no", "--epochs", "1", "--out", "run"]
    assert main(command) == 0
    assert main(command) == 2
    assert main([*command, "--overwrite"]) == 0
    Path("precious").mkdir()
    Path("precious/thesis.txt").write_text("years of work")
    assert main([*command[:-1], "precious", "--overwrite"]) == 2
    Path("precious/run.json").write_text(Path("run/run.json").read_text())
    assert main([*command[:-1], "precious", "--overwrite"]) == 2
    assert Path("precious/thesis.txt").read_text() == "years of work"
    assert "precious" in capsys.readouterr().err


def test_records_carry_no_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["train", *QUICK, "--baseline", "no", "--epochs", "1", "--out", "a"]) == 0
    assert (
        main(["train", *QUICK, "--baseline", "no", "--epochs", "1", "--out", "b", "--init", str(tmp_path / "a")]) == 0
    )
    text = "".join(p.read_text() for p in Path("b").glob("*.*"))
    assert str(tmp_path) not in text


@pytest.mark.parametrize("kind", ["methods", "models", "data", "attacks"])
def test_lists_are_readable_by_people_and_programs(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", kind, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert main(["list", kind]) == 0
    shown = capsys.readouterr().out
    assert all(row["name"] in shown for row in rows)
    assert len(rows) >= 4


def test_piped_output_is_plain(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deat", "train", *QUICK, "--baseline", "no", "--out", "run"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "epoch 2/2" in done.stdout
    assert done.stderr == ""
