import zipfile
from pathlib import Path

import pytest

from deat.data import LazyImages, image_folder
from deat.errors import DataError
from helpers.data_sets import WRITERS, load, png, tree, write_folder, write_tar

VAL = {"val/cat/0.png": png(30), "val/dog/0.png": png(31)}


def write_with_folders(kind: str, root: Path, files: dict[str, bytes], *folders: str) -> Path:
    """A data set with folders that have no images."""
    path = root / kind
    if kind == "set":
        for folder in folders:
            (path / folder).mkdir(parents=True)
        return write_folder(path, files)
    if kind == "set.zip":
        WRITERS[kind](path, files)
        with zipfile.ZipFile(path, "a") as archive:
            for folder in folders:
                archive.writestr(f"{folder}/", b"")
        return path
    return write_tar(path, files, "w:gz" if kind.endswith("gz") else "w", folders=folders)


@pytest.mark.parametrize("kind", WRITERS)
def test_a_class_that_the_test_split_lacks_is_named_at_every_start(kind, tmp_path):
    path = WRITERS[kind](tmp_path / kind, tree() | {"train/owl/0.png": png(90)})
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"the test split has no images of 'owl'.*Add images") as warned:
            assert load(path, tmp_path / "root").train.classes == ("cat", "dog", "owl")
        assert warned[0].filename.endswith("data_sets.py"), "it points at the caller of load_data"


def test_of_many_classes_that_the_test_split_lacks_the_first_are_named(tmp_path):
    path = WRITERS["set"](tmp_path / "set", tree() | {f"train/owl{i}/0.png": png(20 + i) for i in range(7)})
    with pytest.warns(UserWarning, match=r"'owl4' and 2 more"):
        load(path, tmp_path / "root", cache=False)


@pytest.mark.parametrize("max_bytes", [image_folder.MAX_DECODED_BYTES, 100], ids=["decoded", "streamed"])
@pytest.mark.parametrize("kind", ["set", "set.zip"])
def test_a_val_folder_next_to_a_test_folder_is_the_val_split_at_every_start(kind, max_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(image_folder, "MAX_DECODED_BYTES", max_bytes)
    path = WRITERS[kind](tmp_path / kind, tree() | VAL)
    for _ in range(2):
        data = load(path, tmp_path / "root")
        assert isinstance(data.train, LazyImages) == (max_bytes == 100)
        assert data.test is not None
        assert data.val is not None
        assert (len(data.test), len(data.val)) == (6, 2)
        assert sorted(data.val.labels.tolist()) == [0, 1]


def test_a_val_folder_without_a_test_folder_is_the_test_split(tmp_path):
    data = load(WRITERS["set"](tmp_path / "set", tree(test=None) | VAL), tmp_path / "root")
    assert data.test is not None
    assert len(data.test) == 2
    assert data.val is None


def test_a_second_val_folder_is_named_as_unused(tmp_path):
    second = {name.replace("val/", "valid/"): png(40 + i) for i, name in enumerate(VAL)}
    with pytest.warns(UserWarning, match="'valid/' is not used.*'test/'.*'val/'"):
        data = load(WRITERS["set"](tmp_path / "set", tree() | VAL | second), tmp_path / "root")
    assert data.val is not None


def test_classes_that_the_val_split_lacks_are_named_and_those_of_its_own_refused(tmp_path):
    with pytest.warns(UserWarning, match="the val split has no images of 'dog'"):
        load(WRITERS["set"](tmp_path / "lacking", tree() | {"val/cat/0.png": png(30)}), tmp_path / "root")
    with pytest.raises(DataError, match=r"class 'owl'.*to 'train/', or remove it from the val split"):
        load(WRITERS["set"](tmp_path / "more", tree() | VAL | {"val/owl/0.png": png(32)}), tmp_path / "root")


FLAT = {"train/0.png": png(0), "train/1.png": png(1)}


@pytest.mark.parametrize("outer", ["", "photos/"])
@pytest.mark.parametrize("others", [{}, {"test/0.png": png(2)}, {"val/cat/0.png": png(3)}])
def test_training_images_without_class_folders_are_refused_with_the_layout(outer, others, tmp_path):
    files = {f"{outer}{name}": data for name, data in (FLAT | others).items()}
    with pytest.raises(DataError, match=r"'train/' itself.*train/CLASS"):
        load(WRITERS["set"](tmp_path / "set", files), tmp_path / "root")


def test_train_next_to_other_classes_is_a_class(tmp_path):
    path = WRITERS["set"](tmp_path / "set", FLAT | {"car/0.png": png(4)})
    assert load(path, tmp_path / "root").train.classes == ("car", "train")


@pytest.mark.parametrize("outer", ["", "outer/"])
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("kind", ["set", "set.tar", "set.tar.gz", "set.zip"])
def test_an_empty_class_folder_is_named_at_every_start(kind, cache, outer, tmp_path):
    files = {f"{outer}{name}": data for name, data in tree().items()}
    folders = (f"{outer}train/cross", f"{outer}train/.hidden", f"{outer}logs/old")
    path = write_with_folders(kind, tmp_path, files, *folders)
    for _ in range(2):
        with pytest.warns(UserWarning, match=f"'{outer}train/cross' has no images.*Add images.*or remove") as warned:
            assert load(path, tmp_path / "root", cache=cache).train.classes == ("cat", "dog")
        assert warned[0].filename.endswith("data_sets.py"), "it points at the caller of load_data"
        assert len(warned) == 1


def test_empty_class_folders_without_a_train_folder_are_named_whatever_else_they_hold(tmp_path):
    files = {name.removeprefix("train/"): data for name, data in tree(test=None).items()}
    path = write_with_folders("set", tmp_path, files | {"owl/0.heic": b""}, "emu")
    with pytest.warns(UserWarning, match="'emu', 'owl' have no images"):
        load(path, tmp_path / "root")


@pytest.mark.parametrize(("split", "other"), [("train", "test"), ("test", "train"), ("train", "valid")])
def test_an_empty_class_folder_is_refused_if_another_split_has_images_of_the_class(split, other, tmp_path):
    files = tree(test=other if split == "train" else "test") | {f"{other}/owl/0.png": png(0)}
    path = write_with_folders("set", tmp_path, files, f"{split}/owl")
    with pytest.raises(DataError, match=f"'{split}/owl' has no images.*another split.*Add images.*or remove"):
        load(path, tmp_path / "root")


@pytest.mark.parametrize("kind", ["set.tar", "set.tar.gz", "set.zip"])
def test_a_class_folder_without_images_in_an_archive_is_refused_as_in_a_folder(kind, tmp_path):
    files = tree() | {"train/owl/0.png": png(90), "test/owl/notes.txt": b"none yet"}
    with pytest.raises(DataError, match=r"'test/owl' has no images.*another split"):
        load(WRITERS[kind](tmp_path / kind, files), tmp_path / "root")


def test_a_test_folder_is_not_used_for_training_if_train_is_empty(tmp_path):
    files = {name: data for name, data in tree().items() if name.startswith("test")}
    path = write_with_folders("set", tmp_path, files, "train/cat", "train/dog")
    with pytest.raises(DataError, match=r"'train/cat', 'train/dog' have no images.*another split"):
        load(path, tmp_path / "root")


def test_a_class_folder_with_images_in_subfolders_is_not_empty(tmp_path, recwarn):
    files = tree() | {"train/cat/more/9.png": png(90)}
    load(write_with_folders("set", tmp_path, files, "train/cat/none"), tmp_path / "root")
    assert not recwarn.list


def test_a_folder_without_images_is_refused_with_the_layout(tmp_path):
    path = write_with_folders("set", tmp_path, {}, "train/cat")
    with pytest.raises(DataError, match=r"no images in class folders of '.*set'; expected train/CLASS/IMAGE.*\.png"):
        load(path, tmp_path / "root")


def test_a_class_that_only_the_test_split_has_is_refused(tmp_path):
    with pytest.raises(DataError, match="'fish'"):
        load(write_folder(tmp_path / "set", tree() | {"test/fish/0.png": png()}), tmp_path / "root")
