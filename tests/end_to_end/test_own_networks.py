"""A network of the user's own: taken as it is, whatever it imports, and gone on with by the command that is shown."""

import json
import shutil
import sys
import warnings
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import deat
from deat.cli.main import main
from deat.data.image_set import split_indices
from deat.methods import method_registry
from deat.models.weights import read_weights
from deat.recipes import get_recipe
from deat.recipes.overrides import apply_overrides
from deat.runs.resolve_request import Request, resolve_request
from deat.training.make_trainer import make_trainer

ROOT = Path(__file__).parents[2]
NET = """
from torch import nn
from beside import outputs

class Net(nn.Module):
    def __init__(self, num_classes, in_channels):
        super().__init__()
        self.layer = nn.Sequential(nn.Flatten(), nn.Linear(64 * in_channels, outputs(num_classes)))

    def forward(self, x):
        return self.layer(x)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a network, what it imports, and a few photos of two classes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "beside.py").write_text("def outputs(num_classes): return num_classes\n")
    draw = torch.Generator().manual_seed(0)
    for part, count in (("train", 24), ("test", 8)):
        for number in range(count):
            file = tmp_path / "photos" / part / ("light" if number % 2 else "dark") / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            pixels = torch.randint(0, 128, (8, 8, 3), generator=draw) + 127 * (number % 2)
            held = BytesIO()
            Image.fromarray(pixels.to(torch.uint8).numpy()).save(held, "png")
            file.write_bytes(held.getvalue())
    return tmp_path


def run_of(**given: Any) -> Any:
    return resolve_request(Request(data="folder:photos", **given), epochs=1, batch_size=8, device="cpu")


def train(*flags: str) -> int:
    how = "--data folder:photos --epochs 2 --batch-size 8 --held-out 4 --val-attack pgd-2 --device cpu --out run"
    return main(["train", *how.split(), *flags])


@pytest.fixture
def chosen_by(here: Path) -> Path:
    """The same folder with a val part, of three dark images and one light one."""
    for number, name in enumerate(("dark", "dark", "dark", "light")):
        file = here / "photos" / "val" / name / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (30 + number, 90, 160)).save(file)
    return here


def test_a_val_folder_chooses_the_best_epoch_and_all_of_the_training_images_are_trained_on(chosen_by, capsys) -> None:
    run = run_of(model="small")
    trainer = run.trainer()
    assert (trainer.train.num_examples, trainer.val.num_examples) == (24, 4)
    assert torch.equal(next(trainer.val.epoch(0))[1], run.splits.val.labels)
    assert run.statistics.images == 24, "normalised by all of them too"
    command = "train --data folder:photos --model small --epochs 1 --batch-size 8 --val-attack pgd-1 --out run"
    assert main([*command.split(), "--device", "cpu"]) == 0
    assert "24 images of 3x8x8 in 2 classes, 4 others to choose the best epoch" in capsys.readouterr().out
    data = json.loads(Path("run/run.json").read_text())["data"]
    assert (data["train"], data["held_out"]) == (24, 4)
    assert run.baseline().trainer().val is None


def test_images_are_held_out_of_the_training_part_where_that_is_requested(chosen_by) -> None:
    trainer = run_of(model="small", held_out=6).trainer()
    assert (trainer.train.num_examples, trainer.val.num_examples) == (18, 6)
    assert run_of(model="small", held_out=0).trainer().val is None
    given = {"epochs": 1, "batch_size": 8, "device": "cpu", "val_attack": "none"}
    assert resolve_request(Request(data="folder:photos", model="small"), **given).trainer().val is None


def test_fit_takes_a_folder_with_its_val_part_unless_another_is_given(chosen_by) -> None:
    photos = deat.load_data("folder:photos")
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 2))
    settings = deat.TrainConfig(batch_size=8)
    asked = ((photos, None), (photos, 0.5), (photos, photos.train), (photos.train, None))
    held = [make_trainer(net, train, val=val, config=settings).val for train, val in asked]
    assert [source and source.num_examples for source in held] == [4, 12, 24, None]


def test_it_stands_behind_no_normalisation_unless_that_is_requested(here: Path) -> None:
    data = run_of(model="small").normalization
    assert data
    assert run_of(model="net.py:Net").normalization is None
    assert run_of(model="net.py:Net", normalize="data").normalization == data
    assert run_of(model="small", normalize="none").normalization is None
    with pytest.raises(deat.errors.UsageError, match=r"normalize 'nothing'.*auto, data"):
        run_of(normalize="nothing")


def test_images_are_trained_on_as_they_are_where_that_is_requested(here: Path) -> None:
    assert run_of().augment is not None
    assert run_of(augment="none").augment is None


def test_what_is_done_to_images_is_reported_and_recorded(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--model", "net.py:Net", "--augment", "none") == 0
    assert "24 images of 3x8x8 in 2 classes, 4 of them held out; not normalised\n" in capsys.readouterr().out
    held = json.loads((here / "run/run.json").read_text())["data"]
    assert (held["image"], held["normalized_by"], held["augmented_by"]) == ([3, 8, 8], None, None)


def test_the_numbers_that_images_are_normalised_by_are_measured_said_and_recorded(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("--model", "net.py:Net", "--normalize", "data") == 0
    found = run_of(model="net.py:Net", normalize="data", held_out=4).statistics
    mean, std = (" ".join(f"{value:.4g}" for value in values) for values in found[:2])
    assert f"normalised by mean {mean} and std {std}, measured on 20 training images" in capsys.readouterr().out
    held = json.loads((here / "run/run.json").read_text())["data"]
    assert (held["normalized_by"], held["measured_on"]) == ([list(found.mean), list(found.std)], 20)
    carried = read_weights(here / "run/last/model.safetensors").normalization
    assert (carried["mean"], carried["std"]) == (pytest.approx(found.mean), pytest.approx(found.std))


def test_held_out_and_test_images_are_not_measured(here: Path) -> None:
    expected = run_of(normalize="data", held_out=4).statistics
    run = run_of(normalize="data", held_out=4)
    run.splits.train.images[split_indices(24, 4, 0)[1]] = 255
    run.splits.test.images.fill_(0)
    assert run.statistics == expected


def never(*_: object) -> None:
    pytest.fail("measured again")


@pytest.mark.parametrize("model", ["net.py:Net", "small"])
def test_what_a_run_was_normalised_by_is_never_measured_again(
    here: Path, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train("--model", model, "--normalize", "data")
    recorded = read_weights(here / "run/best/model.safetensors").normalization
    monkeypatch.setattr("deat.data.datasets.measure_channel_stats", never)
    shutil.copytree("photos", "others")
    assert main(["resume", "run", "--model", model]) == 0
    assert train("--model", model, "--normalize", "data", "--resume", "auto") == 0
    assert main(["export", "run", "--out", "bare.safetensors"]) == 0
    assert "normalised by" in capsys.readouterr().out
    assert read_weights(here / "bare.safetensors").normalization == recorded
    accuracies = []
    for target, data in (("run", "photos"), ("run", "others"), ("bare.safetensors", "others")):
        how = [target, "--data", f"folder:{data}", "--model", model, "--attacks", "natural,fgsm", "--eps", "0.1"]
        main(["evaluate", *how, "--out", "e.json"])
        accuracies.append(json.loads((here / "e.json").read_text())["accuracy"])
    assert accuracies == [accuracies[0]] * 3
    assert "does not record its normalisation" not in capsys.readouterr().err


def test_a_run_that_was_killed_resumes_with_the_numbers_it_began_with(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train("--model", "small")
    shutil.rmtree(max(here.glob("run/ckpt-*")))
    monkeypatch.setattr("deat.data.datasets.measure_channel_stats", never)
    assert main(["resume", "run"]) == 0
    said = capsys.readouterr().out.split("resuming run at epoch 2")[1]
    assert "measured on 20 training images" in said


@pytest.mark.parametrize("kept", ["run", "bare.safetensors"])
def test_fine_tuned_weights_keep_what_they_were_trained_behind(here: Path, kept: str) -> None:
    train("--model", "small")
    main(["export", "run", "--out", "bare.safetensors"])
    recorded = read_weights(here / "bare.safetensors").normalization
    for number, file in enumerate(here.glob("photos/*/light/*.png")):
        Image.new("RGB", (8, 8), (255, 255, 255 - number)).save(file)
    tuned = run_of(model="small", init=kept)
    assert tuned.statistics == (tuple(recorded["mean"]), tuple(recorded["std"]), 0)
    assert tuned.model().normalize.mean.flatten().tolist() == recorded["mean"]


@pytest.mark.parametrize("held", [[[0.5], [0.0]], [["x"], [1]], [[0.5] * 3], "mean", 7])
def test_a_record_with_no_numbers_to_normalise_by_is_refused(here: Path, held: object) -> None:
    train("--model", "small")
    record = json.loads((here / "run/run.json").read_text())
    record["data"]["normalized_by"] = held
    (here / "run/run.json").write_text(json.dumps(record))
    assert main(["evaluate", "run"]) == 4


@pytest.mark.parametrize("normalize", ["none", "data"])
def test_the_command_line_evaluates_it_as_python_does(here: Path, normalize: str) -> None:
    assert train("--model", "net.py:Net", "--normalize", normalize) == 0
    assert main(["export", "run", "--out", "bare.safetensors", "--epoch", "last"]) == 0
    assert bool(read_weights(here / "bare.safetensors").normalization) == (normalize == "data")
    model = run_of(model="net.py:Net", normalize=normalize).model()
    deat.load_weights(model, here / "run/last")
    corpus = deat.load_data("folder:photos")
    mine = deat.evaluate(model, corpus.test, threat=deat.Linf(0.1), attacks=["natural", "fgsm"], sanity=False)
    for target in (["run", "--epoch", "last"], ["bare.safetensors", "--data", "folder:photos"]):
        how = ["--model", "net.py:Net", "--eps", "0.1", "--attacks", "natural,fgsm", "--out", f"{target[0]}.json"]
        main(["evaluate", *target, *how])
        assert json.loads((here / f"{target[0]}.json").read_text())["accuracy"] == dict(mine.accuracy)


@pytest.mark.promise("P79")
def test_weights_that_were_trained_behind_a_normalisation_bring_it_or_say_that_it_is_missing(here: Path) -> None:
    train("--model", "net.py:Net", "--normalize", "data")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for normalize in ("auto", "data"):
            model = run_of(model="net.py:Net", init="run", normalize=normalize).model()
            assert model.normalize.mean.flatten().tolist() == read_weights(here / "run").normalization["mean"]
    with pytest.warns(UserWarning, match=r"trained with a normalisation layer.*leave --normalize none out"):
        run_of(model="net.py:Net", init="run", normalize="none").model()


@pytest.mark.promise("P79")
@pytest.mark.parametrize("target", ["run", "bare.safetensors"])
def test_network_is_not_evaluated_without_the_normalisation_of_its_weights(
    here: Path, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    train("--model", "net.py:Net", "--normalize", "data")
    main(["export", "run", "--out", "bare.safetensors"])
    how = ["--model", "net.py:Net", "--data", "folder:photos", "--attacks", "natural", "--normalize", "none"]
    assert main(["evaluate", target, *how]) == 2
    assert "leave --normalize none out" in capsys.readouterr().err
    assert not list(here.glob("**/*evaluation.json"))


def test_a_bare_files_normalisation_is_reported(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deat.save_weights(deat.build_model("small", num_classes=2, in_channels=3, image_size=8), here / "w.safetensors")
    how = ["w.safetensors", "--data", "folder:photos", "--model", "small", "--attacks", "natural", "--out", "e.json"]
    main(["evaluate", *how])
    assert "does not record its normalisation, so the data's is used" in capsys.readouterr().err
    main(["evaluate", *how, "--normalize", "none"])
    assert "normalisation" not in capsys.readouterr().err
    kept, new = (json.loads((here / name).read_text())["settings"]["about"] for name in ("e-1.json", "e.json"))
    assert (kept["normalize"], new["normalize"]) == ("auto", "none"), "they answer different questions"


def test_the_usual_learning_rate_is_for_training_from_nothing_and_a_tenth_of_it_for_given_weights(here: Path) -> None:
    assert run_of().config.lr is None
    assert run_of(init="w").config.lr == pytest.approx(0.1 * run_of().default_lr) == pytest.approx(0.01)
    assert resolve_request(Request(init="w"), device="cpu").config.lr == pytest.approx(0.005)
    assert resolve_request(Request(init="w"), device="cpu", lr=0.3).config.lr == 0.3


def test_a_recipe_keeps_its_learning_rate_whatever_it_starts_from(here: Path) -> None:
    for recipe in ("quick", "cifar10-fast", "cifar10-standard"):
        (row,) = get_recipe(recipe).row_builder("m+deat", "small")[:1]
        (changed,) = apply_overrides([row], {"init": "w"})
        assert changed.request.init == "w"
        assert changed.settings["lr"] == row.settings["lr"] > 0
    assert (
        apply_overrides(get_recipe("quick").row_builder("fgsm", "small"), {"init": "w"})[0].resolve(0).config.lr == 0.05
    )


def test_a_run_at_chance_on_few_images_says_so_before_and_after_on_the_screen_and_in_its_records(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "stuck.py").write_text(
        "import torch\nfrom torch import nn\nclass Net(nn.Module):\n"
        "    def __init__(self, num_classes):\n        super().__init__()\n"
        "        self.bias = nn.Parameter(torch.zeros(num_classes))\n"
        "    def forward(self, x):\n"
        "        return (self.bias + 0 * x.flatten(1).sum(1, keepdim=True)).softmax(1)\n"
    )
    assert train("--model", "stuck.py:Net", "--method", "pgd-2", "--baseline", "yes") == 0
    told = capsys.readouterr()
    assert told.err.count("deat: the model's outputs are probabilities") == 1
    assert told.err.count("only 4 images are held out to choose the best epoch: each is worth 25.0 points") == 1
    line = "are at chance: without any attack"
    assert line in told.out
    assert line in (here / "run/report.md").read_text()
    assert main(["resume", "run", "--model", "stuck.py:Net", "--json"]) == 0
    (note,) = json.loads(capsys.readouterr().out)["notes"]
    assert line in note


def test_a_file_that_registers_methods_may_be_run_again(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(method_registry, "_METHODS", dict(method_registry._METHODS))
    (here / "way.py").write_text(
        "import deat\n@deat.register_method('zigzag-K')\ndef zigzag(k: int = 2) -> deat.Method:\n"
        "    return deat.Method('zigzag', deat.Craft(), deat.attack_schedules.Fixed(k=k, alpha_eps=0.5))\nOURS = zigzag()\n"
    )
    for _ in range(2):
        assert run_of(method="way.py:OURS").method.name == "zigzag"
    (here / "other.py").write_text((here / "way.py").read_text())
    with pytest.raises(deat.errors.UsageError, match="registered already"):
        run_of(method="other.py:OURS")


SHORTER = {
    "--epochs 30": "--epochs 1 --batch-size 8 --held-out 4",
    "epochs=30": "epochs=1, batch_size=8",
    "natural,pgd-20,aa": "natural,fgsm",
    "deat report": "deat report --no-figures",
    "int = 3": "int = 2",
    "num_classes=3": "num_classes=2",
    "natural,pgd-7,m+deat": "natural,m+deat --seeds 0 --set epochs=1 --set batch_size=8 --set held_out=4 --set n=8",
}
"""What makes the page's work small, and fit for two classes."""


def test_the_page_on_your_own_data_runs(here: Path) -> None:
    page = (ROOT / "docs/your-data.md").read_text().replace("\\\n", " ")
    for old, new in SHORTER.items():
        assert old in page
        page = page.replace(old, new)
    net, bare, fitted = (part.split("```")[0] for part in page.split("```python\n")[1:])
    (here / "my_net.py").write_text(net)
    for line in page.splitlines():
        if line.startswith("deat "):
            assert main(line.split("#")[0].split()[1:]) in (0, 6), line
    sys.path.append(str(here))
    for code in (bare, fitted):
        exec(code, {})
    del sys.modules["my_net"]
