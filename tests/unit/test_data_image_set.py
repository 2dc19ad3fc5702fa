import pytest
import torch

from deat.data import ImageSet
from deat.errors import DataError, UsageError
from helpers.data_sets import numbered_set


@pytest.mark.promise("P46")
def test_split_is_disjoint_complete_and_fixed_by_the_seed():
    train, val = numbered_set().split(5, seed=1)
    again = numbered_set().split(5, seed=1)[1]
    other = numbered_set().split(5, seed=2)[1]
    assert (len(train), len(val)) == (18, 5)
    assert sorted([*train.labels.tolist(), *val.labels.tolist()]) == list(range(23))
    assert val.labels.tolist() == again.labels.tolist() != other.labels.tolist()


@pytest.mark.parametrize("held_out", [0, 23, -1])
def test_a_split_with_an_empty_side_is_refused(held_out):
    with pytest.raises(UsageError, match=f"cannot hold out {held_out} of 23"):
        numbered_set().split(held_out, seed=0)


def float_set(value: float) -> ImageSet:
    images = torch.full((4, 1, 2, 2), 0.5)
    images[2, 0, 1, 1] = value
    return ImageSet(images, torch.tensor([0, 1, 0, 1]), ("a", "b"))


@pytest.mark.promise("P45")
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("nan"), r"image 2 .*nan"),
        (float("inf"), r"image 2 .*inf"),
        (-0.5, r"image 2 .*-0\.5.*\[0, 1\].*normalize=\(mean, std\)"),
        (1.25, r"image 2 .*1\.25.*clamp\(0, 1\)"),
        (255.0, r"image 2 .*255.*divide by 255.*uint8"),
    ],
)
def test_bad_pixels_are_refused_with_index_value_and_fix(value, words):
    with pytest.raises(DataError, match=words):
        float_set(value).check()


@pytest.mark.promise("P45")
@pytest.mark.parametrize("label", [10, -1])
def test_a_label_out_of_range_is_refused_with_index_and_value(label):
    images = ImageSet(torch.zeros(3, 1, 2, 2), torch.tensor([0, label, 1]), tuple("0123456789"))
    with pytest.raises(DataError, match=rf"label 1 is {label}; with 10 classes.*0 to 9"):
        images.check()


def test_empty_sets_and_wrong_shapes_are_refused():
    with pytest.raises(DataError, match="empty"):
        ImageSet(torch.zeros(0, 1, 2, 2), torch.zeros(0, dtype=torch.int64), ("a",)).check()
    with pytest.raises(DataError, match="3 images but 2 labels"):
        ImageSet(torch.zeros(3, 1, 2, 2), torch.zeros(2, dtype=torch.int64), ("a",)).check()
    with pytest.raises(DataError, match=r"\(3,\).*\(N, C, H, W\)"):
        ImageSet(torch.zeros(3), torch.zeros(3, dtype=torch.int64), ("a",)).check()


def test_an_image_set_is_indexed_by_image_and_by_slice():
    pixels = torch.arange(4 * 64, dtype=torch.uint8).reshape(4, 1, 8, 8)
    images = ImageSet(pixels, torch.tensor([2, 0, 1, 2]), ("a", "b", "c"))
    image, label = images[-1]
    assert torch.allclose(image, pixels[3] / 255)
    assert (image.dtype, label) == (torch.float32, 2)
    part = images[1:3]
    assert isinstance(part, ImageSet)
    assert (part.labels.tolist(), part.classes) == ([0, 1], images.classes)
    assert [label for _, label in images] == [2, 0, 1, 2]
    with pytest.raises(IndexError):
        images[4]
