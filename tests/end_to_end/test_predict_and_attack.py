"""`deat predict` and `deat attack`: image files through a run's network, and adversarial files that were verified."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

import deat
from deat.cli.main import main
from deat.errors import DataError, UsageError
from deat.evaluation.image_rounding import round_to_8_bits

EPS = 0.15


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> deat.SavedRun:
    folder = tmp_path_factory.mktemp("runs") / "run"
    command = ["train", "--epochs", "4", "--method", "natural", "--out", str(folder), "--baseline", "no"]
    assert main([*command, "--val-attack", "none", "--test-images", "0", "--watch", "none"]) == 0
    return deat.load_run(folder, epoch="last", device="cpu")


@pytest.fixture(scope="module")
def digits() -> Any:
    return deat.load_data("digits").test


def write_digits(digits: Any, folder: Path, count: int) -> list[Path]:
    """Test images in folders named after their classes."""
    files = []
    for i in range(count):
        file = folder / str(int(digits.labels[i])) / f"{i:02}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.fromarray(digits.images[i, 0].numpy()).save(file)
        files.append(file)
    return files


def read_png(file: Path) -> torch.Tensor:
    return torch.from_numpy(np.array(PIL.Image.open(file))).float()[None] / 255


def test_predictions_are_those_of_the_network_and_come_as_a_table_and_as_json(run, digits, capsys):
    files = write_digits(digits, Path("images"), 12)
    expected = run.model(digits.images[:12].float() / 255).argmax(1).tolist()
    assert main(["predict", str(run.path), *map(str, files), "--epoch", "last", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [int(image["class"]) for image in found["images"]] == expected
    assert [image["file"] for image in found["images"]] == list(map(str, files))
    assert main(["predict", str(run.path), "images", "--epoch", "last", "--top", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("images/")]) == 12
    np.save("images.npy", digits.images[:12].numpy())
    assert [int(p.label) for p in deat.predict(run, "images.npy")] == expected


def test_images_of_another_size_or_in_colour_are_resized_and_it_is_reported(run, capsys):
    PIL.Image.new("RGB", (90, 60), (255, 0, 0)).save("photo.jpg")
    assert main(["predict", str(run.path), "photo.jpg", "--epoch", "last", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["images"][0]["resized_from"] == [90, 60]
    assert main(["predict", str(run.path), "photo.jpg", "--epoch", "last"]) == 0
    assert "resized to 8x8" in capsys.readouterr().out


def test_a_file_that_cannot_be_read_is_named_and_the_others_are_classified(run, digits, capsys):
    files = write_digits(digits, Path("images"), 2)
    Path("text.png").write_text("no image")
    np.save("levels.npy", digits.images[:1].float().numpy())
    np.save("shape.npy", np.zeros((1, 3, 5, 5), np.uint8))
    bad = ["text.png", "levels.npy", "shape.npy"]
    assert main(["predict", str(run.path), *bad, *map(str, files), "--epoch", "last", "--json"]) == DataError.exit_code
    output = capsys.readouterr()
    rows = json.loads(output.out)["images"]
    assert ["error" in row for row in rows] == [True, True, True, False, False]
    assert all(name in output.err for name in bad)
    with pytest.raises(DataError, match=r"3 images .*text\.png.*levels\.npy.*shape\.npy"):
        deat.predict(run, [*bad, *files])


@pytest.mark.parametrize("paths", [["nothing"], ["empty"], ["objects.npy"]])
def test_a_path_without_images_is_refused(run, paths):
    Path("empty").mkdir()
    np.save("objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=paths[0]):
        deat.predict(run, paths)


def test_adversarial_files_are_inside_the_ball_and_their_status_is_that_of_the_file(run, digits, capsys):
    files = write_digits(digits, Path("images"), 30)
    assert main(["attack", str(run.path), "images", "--out", "adv", "--epoch", "last", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads(Path("adv/attack.json").read_text())
    assert told["labels"] == "folders"
    assert told["fooled"] + told["resisted"] + told["wrong_without_attack"] == 30
    assert told["fooled"] > 5
    for row, file in zip(told["results"], sorted(files), strict=True):
        x = read_png(file)
        if row["status"] == "wrong without attack":
            assert run.model(x[None]).argmax().item() != int(row["label"])
            assert row["written"] is None
            continue
        adv = read_png(Path("adv", row["written"]))
        assert run.threat.contains(x[None], adv[None]).item()
        assert (run.model(adv[None]).argmax().item() != int(row["label"])) == (row["status"] == "fooled")
        assert row["distance"] == pytest.approx((adv - x).abs().max().item(), abs=1e-6)


def test_without_labels_the_attack_is_against_the_networks_own_prediction_and_says_so(run, digits, capsys):
    write_digits(digits, Path("images"), 6)
    PIL.Image.new("L", (20, 20), 90).save("images/other.png")
    assert main(["attack", str(run.path), "images", "--out", "adv", "--epoch", "last"]) == 0
    assert "its own predictions" in capsys.readouterr().out
    found = json.loads(Path("adv/attack.json").read_text())
    assert found["labels"] == "predicted"
    assert [row["label"] == row["before"] for row in found["results"]] == [True] * 7


def test_labels_come_from_a_csv_file_and_a_missing_or_unknown_one_is_named(run, digits):
    files = write_digits(digits, Path("images"), 5)
    with Path("labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows((path.name, path.parent.name) for path in files)
    found = deat.attack_images(run, files, "adv", labels="labels.csv", attack="fgsm")
    assert [image.label for image in found.images] == [path.parent.name for path in files]
    with pytest.raises(DataError, match=r"no class for .*04\.png"):
        deat.attack_images(run, files, "adv2", labels={path.name: "1" for path in files[:4]})
    with pytest.raises(DataError, match="'cat' by given, but the run's classes are"):
        deat.attack_images(run, files[:1], "adv2", labels={files[0].name: "cat"})
    assert not Path("adv2").exists()


def test_arrays_between_the_levels_are_written_exactly_as_floats(run, digits):
    np.save("images.npy", digits.images[:4].float().numpy() / 255 * 0.97)
    found = deat.attack_images(run, "images.npy", "adv", threat="l2:1", attack="pgd-10")
    for i, image in enumerate(found.images):
        x = torch.from_numpy(np.load("images.npy"))[i : i + 1]
        adv = torch.from_numpy(np.load(Path("adv", image.written)))[None]
        assert deat.L2(1.0).contains(x, adv).item()
        assert image.distance == pytest.approx((adv - x).double().norm().item())
    with pytest.raises(UsageError, match="between the 256 levels"):
        deat.attack_images(run, "images.npy", "adv2", format="png")


def test_nothing_of_the_user_is_overwritten(run, digits):
    files = write_digits(digits, Path("images"), 2)
    before = [file.read_bytes() for file in files]
    with pytest.raises(UsageError, match="is not empty"):
        deat.attack_images(run, files, "images")
    with pytest.raises(UsageError, match="would replace"):
        deat.attack_images(run, "images", "images", overwrite=True)
    Path("adv").mkdir()
    Path("adv", files[0].parent.name).symlink_to(Path("images").resolve())
    with pytest.raises(deat.errors.CheckpointError, match="symbolic link"):
        deat.attack_images(run, "images", "adv", overwrite=True)
    assert [file.read_bytes() for file in files] == before


def test_files_of_one_name_do_not_replace_each_other(run, digits):
    for suffix, i in (("png", 0), ("bmp", 1)):
        PIL.Image.fromarray(digits.images[i, 0].numpy()).save(f"same.{suffix}")
    found = deat.attack_images(run, ["same.png", "same.bmp"], "adv", attack="fgsm")
    assert len({image.written for image in found.images}) == 2


@pytest.mark.parametrize("threat", [deat.Linf(0.05), deat.Linf(8 / 255), deat.L2(0.5), deat.L1(3.0)], ids=repr)
def test_rounding_to_8_bits_stays_in_the_ball_and_close_to_the_attack(threat):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (16, 3, 8, 8), generator=generator).float() / 255
    adv = x + threat.initial_delta(x, "bernoulli", generator)
    adv = x + threat.project(x, adv - x)
    rounded = round_to_8_bits(x, adv, threat)
    assert threat.contains(x, rounded).all()
    assert torch.equal((rounded * 255).round() / 255, rounded)
    assert (threat.norm(rounded - x) >= 0.5 * threat.norm(adv - x)).all()


def test_a_run_that_does_not_classify_images_is_refused(tmp_path):
    x = torch.rand(80, 1, 4, 4)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 1))
    options: Any = {"epochs": 1, "lr": 0.01, "batch_size": 20, "progress": False, "threat": "linf:0.1"}
    deat.fit(net, (x, x.mean((1, 2, 3))), method="natural", task="regression", val=0.2, **options).save("reg")
    PIL.Image.new("L", (4, 4)).save("a.png")
    with pytest.raises(UsageError, match="regression"):
        deat.predict(deat.load_run("reg", model=net, epoch="last"), "a.png")
