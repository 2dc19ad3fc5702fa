import pytest
import torch

from deat.data import Augment, ImageSet, InMemorySource
from deat.errors import DataError, UsageError
from helpers.data_sets import NoHostReads, random_set


def labels_of(source: InMemorySource, epoch: int) -> list[int]:
    return torch.cat([y for _, y in source.epoch(epoch)]).tolist()


def numbered(num: int = 23) -> ImageSet:
    """A set whose labels are the images' own numbers."""
    return ImageSet(torch.zeros(num, 1, 2, 2, dtype=torch.uint8), torch.arange(num), tuple(map(str, range(num))))


def test_an_epoch_holds_every_image_once_and_keeps_the_short_batch():
    source = InMemorySource(numbered(), 5, seed=3)
    sizes = [len(y) for _, y in source.epoch(0)]
    assert sizes == [5, 5, 5, 5, 3]
    assert len(source) == 5
    assert sorted(labels_of(source, 0)) == list(range(23))


def test_order_is_a_pure_function_of_seed_and_epoch():
    source = InMemorySource(numbered(), 5, seed=3)
    first = labels_of(source, 1)
    labels_of(source, 0)
    torch.manual_seed(99)
    assert labels_of(source, 1) == first
    assert labels_of(InMemorySource(numbered(), 7, seed=3), 1) == first
    assert labels_of(source, 2) != first
    assert labels_of(InMemorySource(numbered(), 5, seed=4), 1) != first


def test_without_shuffling_the_order_is_the_sets_own():
    assert labels_of(InMemorySource(numbered(), 5, shuffle=False), 7) == list(range(23))


def test_batches_do_not_touch_the_global_generator():
    before = torch.get_rng_state()
    list(InMemorySource(random_set(), 5, augment=Augment()).epoch(0))
    assert torch.equal(torch.get_rng_state(), before)


def test_bytes_are_scaled_to_the_unit_interval_exactly():
    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    x, y = next(InMemorySource(ImageSet(images, torch.tensor([0]), ("a",)), 1).epoch(0))
    assert x.dtype == torch.float32
    assert y.dtype == torch.int64
    assert torch.equal(x.flatten(), torch.arange(256).float() * (1 / 255))


def test_augmentation_is_a_shifted_crop_and_a_mirror_image():
    images = torch.rand(64, 3, 8, 8)
    augment = Augment(pad=2, flip=True)
    draws = augment.draw(64, torch.Generator().manual_seed(0))
    out = augment.apply(images, draws)
    padded = torch.nn.functional.pad(images, [2] * 4)
    for i in range(64):
        top, left = int(draws.top[i]), int(draws.left[i])
        crop = padded[i, :, top : top + 8, left : left + 8]
        assert torch.equal(out[i], crop.flip(-1) if draws.flip[i] else crop)
    assert {int(t) for t in draws.top} == {0, 1, 2, 3, 4}
    assert 0 < int(draws.flip.sum()) < 64


def test_no_padding_and_no_flip_changes_nothing():
    images = random_set().images
    augment = Augment(pad=0, flip=False)
    assert torch.equal(augment.apply(images, augment.draw(len(images), torch.Generator())), images)


def test_augmentation_belongs_to_the_image_not_to_its_place_in_a_batch():
    def by_image(batch_size: int, epoch: int) -> dict[int, torch.Tensor]:
        images = ImageSet(random_set(23).images, torch.arange(23), tuple(map(str, range(23))))
        source = InMemorySource(images, batch_size, seed=1, augment=Augment(2))
        return {int(n): image for x, y in source.epoch(epoch) for image, n in zip(x, y, strict=True)}

    one, other, later = by_image(5, 0), by_image(8, 0), by_image(5, 1)
    assert all(torch.equal(one[n], other[n]) for n in one)
    assert not all(torch.equal(one[n], later[n]) for n in one)


@pytest.mark.parametrize("augment", [None, Augment(2)])
def test_an_epoch_reads_nothing_back_from_the_device(augment):
    source = InMemorySource(random_set(), 8, augment=augment)
    with NoHostReads():
        assert sum(1 for _ in source.epoch(0)) == 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_device_does_not_change_the_batches():
    here = list(InMemorySource(random_set(), 8, augment=Augment(2)).epoch(0))
    there = list(InMemorySource(random_set(), 8, augment=Augment(2), device="cuda").epoch(0))
    assert all(
        torch.equal(a, b.cpu()) for one, two in zip(here, there, strict=True) for a, b in zip(one, two, strict=True)
    )


@pytest.mark.promise("P46")
def test_split_is_disjoint_complete_and_fixed_by_the_seed():
    train, val = numbered().split(5, seed=1)
    again = numbered().split(5, seed=1)[1]
    other = numbered().split(5, seed=2)[1]
    assert (len(train), len(val)) == (18, 5)
    assert sorted([*train.labels.tolist(), *val.labels.tolist()]) == list(range(23))
    assert val.labels.tolist() == again.labels.tolist() != other.labels.tolist()


@pytest.mark.parametrize("held_out", [0, 23, -1])
def test_a_split_that_leaves_a_part_empty_is_refused(held_out):
    with pytest.raises(UsageError, match=f"cannot hold out {held_out} of 23"):
        numbered().split(held_out, seed=0)


def float_set(value: float) -> ImageSet:
    images = torch.full((4, 1, 2, 2), 0.5)
    images[2, 0, 1, 1] = value
    return ImageSet(images, torch.tensor([0, 1, 0, 1]), ("a", "b"))


@pytest.mark.promise("P45")
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("nan"), r"image 2 holds nan"),
        (float("inf"), r"image 2 holds inf"),
        (-0.5, r"image 2 .*-0\.5, outside \[0, 1\].*normalize=\(mean, std\)"),
        (1.25, r"image 2 .*1\.25.*normalize=\(mean, std\)"),
        (255.0, r"image 2 .*255.*divide by 255.*uint8"),
    ],
)
def test_bad_pixels_are_refused_with_index_value_and_fix(value, words):
    with pytest.raises(DataError, match=words):
        InMemorySource(float_set(value), 2).check()


@pytest.mark.promise("P45")
@pytest.mark.parametrize("label", [10, -1])
def test_a_label_out_of_range_is_refused_with_index_and_value(label):
    images = ImageSet(torch.zeros(3, 1, 2, 2), torch.tensor([0, label, 1]), tuple("0123456789"))
    with pytest.raises(DataError, match=rf"label 1 is {label}; with 10 classes.*0 to 9"):
        images.check()


def test_empty_and_mismatched_sets_are_refused():
    with pytest.raises(DataError, match="empty"):
        ImageSet(torch.zeros(0, 1, 2, 2), torch.zeros(0, dtype=torch.int64), ("a",)).check()
    with pytest.raises(DataError, match="3 images but 2 labels"):
        ImageSet(torch.zeros(3, 1, 2, 2), torch.zeros(2, dtype=torch.int64), ("a",)).check()
    with pytest.raises(DataError, match=r"\(3, 4\).*\(N, C, H, W\)"):
        ImageSet(torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64), ("a",)).check()


def test_fewer_images_than_a_batch_is_refused_in_training_only():
    with pytest.raises(DataError, match=r"20 images, fewer than one batch of 64.*at most 20"):
        InMemorySource(random_set(), 64).check()
    InMemorySource(random_set(), 64, shuffle=False).check()
