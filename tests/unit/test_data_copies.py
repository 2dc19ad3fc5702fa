from time import perf_counter

import pytest
import torch

from deat.data import ImageSet
from deat.data.copies import copied
from helpers.data_sets import WRITERS, load, png, random_set, tree


@pytest.mark.parametrize("kind", ["set", "set.tar.gz", "set.zip"])
def test_test_images_that_are_copies_of_training_images_are_counted_at_every_start(kind, tmp_path):
    files = tree()
    files |= {"test/cat/0.png": files["train/cat/1.png"], "test/dog/9.png": files["train/cat/1.png"]}
    path = WRITERS[kind](tmp_path / kind, files)
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"^2 of 7 test images are copies .* 'test/.*' of 'train/cat/1\.png'"):
            load(path, tmp_path / "root")


def test_parts_without_a_common_image_are_not_spoken_of(tmp_path, recwarn):
    files = tree() | {"train/cat/8.png": png(50), "train/dog/8.png": png(50)}
    load(WRITERS["set"](tmp_path / "set", files), tmp_path / "root")
    assert not recwarn.list


def test_one_other_pixel_is_no_copy():
    train = random_set(4)
    images = train.images.clone()
    images[2, 0, 0, 0] ^= 1
    assert copied(train, ImageSet(images, train.labels, train.classes)) == [(0, 0), (1, 1), (3, 3)]


def test_sixty_thousand_small_images_are_compared_in_well_under_a_few_seconds():
    train, test = (
        ImageSet(torch.zeros(n, 3, 32, 32, dtype=torch.uint8), torch.zeros(n), ("a",)) for n in (50_000, 10_000)
    )
    start = perf_counter()
    assert len(copied(train, test)) == 10_000
    assert perf_counter() - start < 5
