"""A data root that a record names is looked into, and nothing is ever written there on a file's word."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deat.cli.main import main
from deat.data import cifar

from .test_hostile import FOLDER, images

JUDGE = ["evaluate", "run", "--attacks", "natural", "--n", "4"]


@pytest.fixture(autouse=True)
def _own_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DEAT_DATA", str(tmp_path / "own"))


def shared_run(data_root: str, **request: object) -> None:
    """Have the record in run/ name a data root, as one that somebody shares may."""
    record = json.loads(Path("run/run.json").read_text())
    record["request"] |= {"data_root": data_root, **request}
    Path("run/run.json").write_text(json.dumps(record))


def listing(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


@pytest.mark.promise("P56")
@pytest.mark.parametrize("command", [["resume", "run"], JUDGE])
def test_decoded_images_are_kept_in_the_user_s_own_root_and_not_where_a_record_says(command):
    for part in ("train", "test"):
        images(Path("set", part))
    assert main([*FOLDER, "--model", "small", "--out", "run"]) == 0
    shared_run(str(Path("theirs").resolve()))
    assert main(command) in (0, 6)
    assert not Path("theirs").exists()
    assert list(Path("own/decoded").iterdir())


@pytest.mark.promise("P56")
def test_what_lies_where_a_record_says_is_neither_changed_nor_removed():
    images(Path("set"))
    assert main([*FOLDER, "--model", "small", "--out", "run"]) == 0
    (entry,) = Path("cache/decoded").iterdir()
    (entry / "train_labels.npy").write_bytes(b"damaged")
    before = listing(Path("cache"))
    assert main(["resume", "run"]) == 0  # the record names cache/, whose copy is damaged
    assert listing(Path("cache")) == before
    assert (entry / "train_labels.npy").read_bytes() == b"damaged"


def test_a_data_root_on_the_command_line_is_written_to():
    images(Path("set"))
    assert main([*FOLDER, "--model", "small", "--out", "run"]) == 0
    assert main(["resume", "run", "--data-root", "mine"]) == 0
    assert list(Path("mine/decoded").iterdir())
    assert not Path("own").exists()


@pytest.fixture
def _small_cifar(monkeypatch: pytest.MonkeyPatch) -> None:
    """CIFAR-10 of 40 and 8 images, in theirs/."""
    whole = cifar.RELEASES["cifar10"][0]
    small = replace(whole, train={"data_batch_1.bin": 40}, test={"test_batch.bin": 8})
    monkeypatch.setitem(cifar.RELEASES, "cifar10", (small,))
    folder = Path("theirs", small.folder)
    folder.mkdir(parents=True)
    (folder / small.meta_file).write_text("\n".join(f"class{i}" for i in range(10)))
    for name, count in {**small.train, **small.test}.items():
        rows = np.random.default_rng(count).integers(0, 256, (count, 3073), dtype=np.uint8)
        rows[:, 0] %= 10
        (folder / name).write_bytes(rows.tobytes())


@pytest.mark.promise("P56")
@pytest.mark.usefixtures("_small_cifar")
def test_a_data_set_in_the_recorded_root_is_found_without_a_flag_and_reported(capsys):
    order = [*FOLDER, "--model", "small", "--out", "run", "--data", "cifar10", "--data-root", "theirs"]
    assert main(order) == 0
    for command in (["resume", "run"], JUDGE):
        capsys.readouterr()
        assert main(command) in (0, 6)
        assert "cifar10 is read from 'theirs'" in capsys.readouterr().err
    Path("theirs").rename("own")
    assert main(["resume", "run"]) == 0
    assert "is read from" not in capsys.readouterr().err


@pytest.mark.parametrize("place", ["/proc/1/root", "a\0b", "x" * 5000, "run/run.json"])
def test_a_recorded_root_that_cannot_be_looked_at_is_one_clean_error(place, whole, capsys):
    shutil.copytree(whole, "run")
    shared_run(place, data="cifar10")
    assert main(["resume", "run"]) == 3
    assert "cifar10 is not in" in capsys.readouterr().err
