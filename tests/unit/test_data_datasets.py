from importlib.resources import files

import pytest
import torch

import deat
from deat.data import list_dataset_infos, list_datasets
from deat.errors import UsageError
from helpers.data_sets import WRITERS, tree


def test_digits_ship_inside_the_package_with_their_attribution():
    folder = files("deat.data")
    assert len((folder / "digits.npz").read_bytes()) < 100_000
    text = (folder / "digits.txt").read_text()
    assert "Alpaydin" in text
    assert "CC BY 4.0" in text


def test_digits_need_neither_disk_nor_network(tmp_path, monkeypatch):
    monkeypatch.setenv("DEAT_DATA", str(tmp_path / "nothing"))
    data = deat.load_data("digits")
    assert (len(data.train), len(data.test)) == (1397, 400)
    assert data.train.shape == (1, 8, 8)
    assert data.train.num_classes == 10
    assert (data.eps, data.norm, data.pad, data.flip) == (0.15, "linf", 0, False)
    assert not (tmp_path / "nothing").exists()


def test_digits_are_complete_and_every_class_is_in_both_splits():
    data = deat.load_data("digits")
    for split in (data.train, data.test):
        split.check()
        assert set(split.labels.tolist()) == set(range(10))
        assert split.images.dtype == torch.uint8
        assert int(split.images.max()) == 255
    assert torch.bincount(torch.cat([data.train.labels, data.test.labels])).tolist() == [
        178, 182, 177, 183, 181, 182, 181, 179, 174, 180,
    ]  # fmt: skip


def test_an_unknown_name_is_refused_with_the_nearest_and_all_known_names():
    with pytest.raises(UsageError, match=r"'digts'.*'digits'.*cifar10.*folder:PATH"):
        deat.load_data("digts")


@pytest.mark.parametrize("spec", [5, None, ["cifar10"]])
def test_data_that_is_neither_a_name_nor_a_path_is_refused_with_the_known_names(spec):
    with pytest.raises(UsageError) as caught:
        deat.load_data(spec)
    assert all(word in str(caught.value) for word in ("digits", "cifar10", "path", repr(spec)))


def test_a_path_is_loaded_as_a_folder(tmp_path):
    path = WRITERS["set"](tmp_path / "set", tree())
    assert deat.load_data(path, root=tmp_path / "root").name == "folder:set"


@pytest.mark.parametrize("kind", sorted(WRITERS))
def test_the_path_of_an_existing_folder_or_archive_needs_no_folder_in_front(kind, tmp_path, monkeypatch):
    path = WRITERS[kind](tmp_path / kind, tree())
    monkeypatch.chdir(tmp_path)
    for spec in (str(path), path.name):
        data = deat.load_data(spec, root=tmp_path / "root")
        assert data.name == f"folder:{path.name}"
        assert data.train.digest() == deat.load_data(path, root=tmp_path / "root").train.digest()


def test_a_folder_with_the_name_of_a_data_set_does_not_hide_it(tmp_path, monkeypatch):
    WRITERS["set"](tmp_path / "digits", tree())
    monkeypatch.chdir(tmp_path)
    assert deat.load_data("digits").name == "digits"
    assert deat.load_data("./digits", root=tmp_path / "root").name == "folder:digits"


def test_a_file_that_is_no_archive_is_no_data_set(tmp_path):
    (tmp_path / "notes.md").write_text("x")
    with pytest.raises(UsageError, match=r"notes\.md.*folder:PATH"):
        deat.load_data(str(tmp_path / "notes.md"))


def test_size_is_refused_for_a_data_set_with_a_size_of_its_own():
    with pytest.raises(UsageError, match=r"size=32.*folder:PATH"):
        deat.load_data("digits", size=32)


@pytest.mark.parametrize("size", [-7, 0, 4097, 10**9, "40", 40.5, True])
def test_a_size_out_of_range_is_refused_before_anything_is_decoded(size, tmp_path, monkeypatch):
    monkeypatch.setattr("deat.data.image_folder.open_image", lambda *_: pytest.fail("decoded"))
    with pytest.raises(UsageError, match=f"whole number of pixels from 1 to 4096, not {size!r}"):
        deat.load_data(WRITERS["set"](tmp_path / "set", tree()), root=tmp_path / "root", size=size)
    assert not (tmp_path / "root").exists()


def test_every_known_data_set_has_a_description():
    assert [info.name for info in list_dataset_infos()] == list(list_datasets())
    assert all(info.description and info.threat for info in list_dataset_infos())


def test_the_repr_of_a_data_set_is_one_line_without_pixels():
    data = deat.load_data("digits")
    assert isinstance(data, deat.DataSplits)
    assert repr(data.train) == "ImageSet(1,397 of 1x8x8, 10 classes)"
    assert repr(data) == f"DataSplits('digits', train={data.train!r}, test={data.test!r}, linf 0.15)"
