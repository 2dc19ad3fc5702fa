from time import perf_counter

import pytest
import torch

from deat.data import ImageSet, LazyImages, duplicates, image_folder
from deat.data.duplicates import find_equal_files, find_equal_images
from deat.data.image_archives import FolderFiles
from helpers.data_sets import WRITERS, load, png, random_set, tree, write_folder


@pytest.mark.parametrize("kind", ["set", "set.tar.gz", "set.zip"])
def test_test_images_that_are_copies_of_training_images_are_reported_at_every_start(kind, tmp_path):
    files = tree()
    files |= {"test/cat/0.png": files["train/cat/1.png"], "test/dog/9.png": files["train/cat/1.png"]}
    path = WRITERS[kind](tmp_path / kind, files)
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"^2 of 7 test images are copies .* 'test/.*' of 'train/cat/1\.png'"):
            load(path, tmp_path / "root")


@pytest.mark.parametrize("kind", ["set", "set.tar", "set.zip"])
def test_copies_are_found_among_streamed_images(kind, tmp_path):
    files = {name: png(i, 600, 2) for i, name in enumerate(tree())}
    files |= {"train/dog/8.png": png(40, 9, 9), "test/cat/0.png": files["train/cat/1.png"]}
    path = WRITERS[kind](tmp_path / kind, files)
    with pytest.warns(UserWarning, match=r"^1 of 6 test images are copies .* 'test/cat/0\.png' of 'train/cat/1\.png'"):
        assert isinstance(load(path, tmp_path / "root").train, LazyImages)


def test_of_a_large_streamed_set_only_some_files_are_read(tmp_path, monkeypatch):
    same = FolderFiles(write_folder(tmp_path / "set", {f"{i}": b"same" for i in range(40)}), tuple(map(str, range(40))))
    assert len(find_equal_files(same, range(20), range(20, 40))) == 20
    read, real = [], FolderFiles.read
    monkeypatch.setattr(FolderFiles, "read", lambda self, index: read.append(index) or real(self, index))
    monkeypatch.setattr(duplicates, "MAX_COMPARED_FILES", 50)
    assert find_equal_files(same, range(20), range(20, 40)) == [(0, 0), (1, 0)]
    assert len(read) <= 50
    monkeypatch.setattr(duplicates, "MAX_REFERENCE_FILES", 19)
    assert find_equal_files(same, range(20), range(20, 40)) == []


@pytest.mark.parametrize("max_bytes", [image_folder.MAX_DECODED_BYTES, 100], ids=["decoded", "streamed"])
def test_a_val_split_that_shares_images_with_the_test_split_is_not_used(max_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(image_folder, "MAX_DECODED_BYTES", max_bytes)
    files = tree() | {"val/cat/0.png": png(40), "val/dog/0.png": png(41)}
    path = WRITERS["set"](tmp_path / "set", files | {"val/dog/1.png": files["test/dog/2.png"]})
    for _ in range(2):
        with pytest.warns(
            UserWarning, match=r"^1 of 6 test images are copies of val images.*Remove them.*val split is not used"
        ):
            data = load(path, tmp_path / "root")
        assert data.val is None
        assert isinstance(data.train, LazyImages) == (max_bytes == 100)


def test_a_val_split_that_shares_images_with_the_training_split_is_reported(tmp_path):
    files = tree()
    files |= {"val/cat/0.png": files["train/cat/0.png"], "val/dog/0.png": png(41)}
    with pytest.warns(UserWarning, match=r"^1 of 2 val images are copies of training images.* the best epoch"):
        assert load(WRITERS["set"](tmp_path / "set", files), tmp_path / "root").val is not None


def test_splits_without_a_common_image_cause_no_warning(tmp_path, recwarn):
    files = tree() | {"train/cat/8.png": png(50), "train/dog/8.png": png(50)}
    load(WRITERS["set"](tmp_path / "set", files), tmp_path / "root")
    assert not recwarn.list


def test_an_image_with_one_other_pixel_is_not_a_copy():
    train = random_set(4)
    images = train.images.clone()
    images[2, 0, 0, 0] ^= 1
    assert find_equal_images(train, ImageSet(images, train.labels, train.classes)) == [(0, 0), (1, 1), (3, 3)]


def test_sixty_thousand_small_images_are_compared_in_well_under_a_few_seconds():
    train, test = (
        ImageSet(torch.zeros(n, 3, 32, 32, dtype=torch.uint8), torch.zeros(n), ("a",)) for n in (50_000, 10_000)
    )
    start = perf_counter()
    assert len(find_equal_images(train, test)) == 10_000
    assert perf_counter() - start < 5
