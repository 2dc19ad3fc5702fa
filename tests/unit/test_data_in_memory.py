import pytest
import torch

from deat.data import Augment, ImageSet, InMemorySource, as_source
from deat.errors import DataError, UsageError
from deat.tasks import Regression, Segmentation
from helpers.data_sets import NoHostReads, numbered_set, random_set


def labels_of(source: InMemorySource, epoch: int) -> list[int]:
    return torch.cat([y for _, y in source.epoch(epoch)]).tolist()


def test_an_epoch_holds_every_image_once_and_keeps_the_short_batch():
    source = InMemorySource(numbered_set(), 5, seed=3)
    sizes = [len(y) for _, y in source.epoch(0)]
    assert sizes == [5, 5, 5, 5, 3]
    assert len(source) == 5
    assert sorted(labels_of(source, 0)) == list(range(23))


def test_order_is_a_pure_function_of_seed_and_epoch():
    source = InMemorySource(numbered_set(), 5, seed=3)
    first = labels_of(source, 1)
    labels_of(source, 0)
    torch.manual_seed(99)
    assert labels_of(source, 1) == first
    assert labels_of(InMemorySource(numbered_set(), 7, seed=3), 1) == first
    assert labels_of(source, 2) != first
    assert labels_of(InMemorySource(numbered_set(), 5, seed=4), 1) != first


def test_without_shuffling_the_images_stay_in_order():
    assert labels_of(InMemorySource(numbered_set(), 5, shuffle=False), 7) == list(range(23))


def test_batches_do_not_touch_the_global_generator():
    before = torch.get_rng_state()
    list(InMemorySource(random_set(), 5, augment=Augment()).epoch(0))
    assert torch.equal(torch.get_rng_state(), before)


def test_uint8_images_are_divided_by_255_exactly():
    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    x, y = next(InMemorySource(ImageSet(images, torch.tensor([0]), ("a",)), 1).epoch(0))
    assert x.dtype == torch.float32
    assert y.dtype == torch.int64
    assert torch.equal(x.flatten(), torch.arange(256).float() * (1 / 255))


def test_augmentation_crops_and_mirrors_each_image_by_its_parameters():
    images = torch.rand(64, 3, 8, 8)
    augment = Augment(pad=2, flip=True)
    params = augment.draw(64, torch.Generator().manual_seed(0))
    out = augment.apply(images, params)
    padded = torch.nn.functional.pad(images, [2] * 4)
    for i in range(64):
        top, left = int(params.top[i]), int(params.left[i])
        crop = padded[i, :, top : top + 8, left : left + 8]
        assert torch.equal(out[i], crop.flip(-1) if params.flip[i] else crop)
    assert {int(t) for t in params.top} == {0, 1, 2, 3, 4}
    assert 0 < int(params.flip.sum()) < 64


def masked_set(task=None, size=8):
    """Images whose pixels say which class their mask has there."""
    classes = torch.arange(size * size).view(1, 1, size, size)
    images = ((classes + 1) / 255).repeat(16, 1, 1, 1)
    names = tuple(map(str, range(size * size)))
    return ImageSet(images, classes[0].repeat(16, 1, 1), names, task or Segmentation(ignore_index=255))


def test_masks_are_cropped_and_mirrored_with_their_images():
    source = InMemorySource(masked_set(), 8, augment=Augment(2))
    seen = set()
    for epoch in range(3):
        for x, y in source.epoch(epoch):
            assert torch.equal((255 * x[:, 0]).round().long() - 1, torch.where(y == 255, -1, y))
            seen |= set(y[:, 0, 0].tolist())
    assert 255 in seen
    assert len(seen) > 3


def test_masks_that_cannot_follow_an_augmentation_are_refused():
    class Brighter:
        def draw(self, num_images, generator):
            return Augment(0, False).draw(num_images, generator)

        def apply(self, images, params):
            return images

    class Depths(Regression):
        name = "depths"

    small = masked_set()
    small = ImageSet(small.images, small.labels[:, ::2, ::2], small.classes, small.task)
    depths = ImageSet(small.images, small.images[:, 0], ("depth",), Depths())
    for data, augment, remedy in [
        (masked_set(Segmentation()), Augment(2), "pad=0"),
        (masked_set(), Brighter(), "apply_to_masks"),
        (small, Augment(2), "size of images"),
        (depths, Augment(2), "augment_labels"),
    ]:
        with pytest.raises(UsageError, match=remedy):
            as_source(data, batch_size=8, augment=augment)
    as_source(masked_set(Segmentation()), batch_size=8, augment=Augment(pad=0))


def test_no_padding_and_no_flip_changes_nothing():
    images = random_set().images
    augment = Augment(pad=0, flip=False)
    assert torch.equal(augment.apply(images, augment.draw(len(images), torch.Generator())), images)


def test_augmentation_of_an_image_does_not_depend_on_the_batch_size():
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


def test_fewer_images_than_a_batch_is_refused_in_training_only():
    with pytest.raises(DataError, match=r"20 examples.*one batch of 64.*at most 20"):
        InMemorySource(random_set(), 64).check()
    InMemorySource(random_set(), 64, shuffle=False).check()
