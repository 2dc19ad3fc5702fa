from importlib.resources import files

import pytest
import torch

import deat.data
from deat.errors import UsageError


def test_digits_ship_inside_the_package_with_their_attribution():
    folder = files("deat.data")
    assert len((folder / "digits.npz").read_bytes()) < 100_000
    text = (folder / "digits.txt").read_text()
    assert "Alpaydin" in text
    assert "CC BY 4.0" in text


def test_digits_need_neither_disk_nor_network(tmp_path, monkeypatch):
    monkeypatch.setenv("DEAT_DATA", str(tmp_path / "nothing"))
    corpus = deat.data.load_data("digits")
    assert (len(corpus.train), len(corpus.test)) == (1397, 400)
    assert corpus.train.shape == (1, 8, 8)
    assert corpus.train.num_classes == 10
    assert (corpus.eps, corpus.norm, corpus.pad, corpus.flip) == (0.15, "linf", 0, False)
    assert not (tmp_path / "nothing").exists()


def test_digits_are_whole_and_every_class_is_in_both_parts():
    corpus = deat.data.load_data("digits")
    for part in (corpus.train, corpus.test):
        part.check()
        assert set(part.labels.tolist()) == set(range(10))
        assert part.images.dtype == torch.uint8
        assert int(part.images.max()) == 255
    assert torch.bincount(torch.cat([corpus.train.labels, corpus.test.labels])).tolist() == [
        178, 182, 177, 183, 181, 182, 181, 179, 174, 180,
    ]  # fmt: skip


def test_unknown_data_names_the_nearest_and_the_accepted():
    with pytest.raises(UsageError, match=r"'digts'.*'digits'.*cifar10.*folder:PATH"):
        deat.data.load_data("digts")


def test_size_is_refused_where_the_set_has_its_own():
    with pytest.raises(UsageError, match="size=32"):
        deat.data.load_data("digits", size=32)


def test_every_known_set_has_a_line_for_people():
    assert [info.name for info in deat.data.list_dataset_infos()] == list(deat.data.list_datasets())
    assert all(info.description and info.threat for info in deat.data.list_dataset_infos())


def test_a_set_is_printed_in_a_line_and_not_as_its_pixels():
    corpus = deat.data.load_data("digits")
    assert repr(corpus.train) == "ImageSet(1,397 of 1x8x8, 10 classes)"
    parts = "train=ImageSet(1,397 of 1x8x8, 10 classes), test=ImageSet(400 of 1x8x8, 10 classes)"
    assert repr(corpus) == f"Corpus('digits', {parts}, linf 0.15)"
