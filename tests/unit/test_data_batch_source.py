from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from deat.data import Augment, BatchSource, InMemorySource, as_source
from deat.data.batch_source import SeekableSource
from deat.errors import DataError, UsageError
from deat.utils.distributed import BatchShard
from helpers.data_sets import random_set


class Numbers(Dataset[Any]):
    """A map-style set whose labels are its indices and whose images are random transforms."""

    def __init__(self, num: int = 12, noise: bool = True) -> None:
        self.num, self.noise = num, noise

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return (torch.rand(3, 4, 4) if self.noise else torch.full((3, 4, 4), index / self.num)), index


def collect(source: BatchSource, epoch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    xs, ys = zip(*source.epoch(epoch), strict=True)
    return torch.cat(xs), torch.cat(ys)


def same(one: BatchSource, two: BatchSource, epoch: int = 0) -> bool:
    return all(torch.equal(a, b) for a, b in zip(collect(one, epoch), collect(two, epoch), strict=True))


def test_an_image_set_a_pair_and_a_tensor_dataset_give_the_same_batches():
    images = random_set()
    pair = (images.images, images.labels)
    sources = [as_source(d, batch_size=6, seed=2) for d in (images, pair, list(pair), TensorDataset(*pair))]
    assert all(isinstance(s, InMemorySource) and same(s, sources[0]) for s in sources)
    assert all((s.num_examples, s.num_classes, s.shape, len(s)) == (20, 4, (3, 8, 8), 4) for s in sources)


def test_numpy_arrays_and_double_precision_are_accepted():
    images = random_set()
    doubles = (images.images.numpy() / 255.0, images.labels.numpy().astype(np.int32))
    x, y = collect(as_source(doubles, batch_size=6, seed=2))
    wanted, labels = collect(as_source(images, batch_size=6, seed=2))
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    assert torch.allclose(x, wanted)
    assert torch.equal(y, labels)


def test_an_image_set_is_augmented_on_request():
    images = random_set()
    assert not same(as_source(images, batch_size=6, augment=Augment(2)), as_source(images, batch_size=6))


def seekable() -> dict[str, BatchSource]:
    options: dict[str, Any] = {"batch_size": 5, "seed": 3}
    return {
        "in memory": as_source(random_set(), augment=Augment(2), **options),
        "a data set": as_source(Numbers(), num_classes=12, **options),
    }


@pytest.mark.promise("P16")
@pytest.mark.parametrize("kind", seekable())
@pytest.mark.parametrize("share", [BatchShard(), BatchShard(1, 2)], ids=["alone", "shared"])
def test_an_epoch_begun_in_its_middle_has_the_same_batches(kind, share):
    source = seekable()[kind]
    source.shard = share
    assert isinstance(source, SeekableSource)
    assert source.can_seek
    whole = list(source.epoch(1))
    for first in range(len(source) + 1):
        rest = list(source.epoch(1, first))
        assert len(rest) == len(whole) - first
        for one, other in zip(rest, whole[first:], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert len(list(source.epoch(2))) == len(source)


def test_a_user_s_own_loader_cannot_start_in_the_middle():
    source = as_source(DataLoader(Numbers(), batch_size=5, shuffle=True), batch_size=5, num_classes=12)
    assert not source.can_seek  # type: ignore[attr-defined]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_dataset_is_ordered_and_transformed_by_seed_and_epoch_alone(workers):
    source = as_source(Numbers(), batch_size=5, seed=3, workers=workers, num_classes=12)
    again = as_source(Numbers(), batch_size=5, seed=3, num_classes=12)
    torch.manual_seed(77)
    assert same(source, again, 4)
    assert sorted(collect(source, 4)[1].tolist()) == list(range(12))
    assert not same(source, as_source(Numbers(), batch_size=5, seed=4, num_classes=12), 4)
    assert collect(source, 5)[1].tolist() != collect(source, 4)[1].tolist()


def test_a_dataset_has_the_same_order_as_an_image_set():
    dataset = Numbers(noise=False)
    pair = torch.stack([dataset[i][0] for i in range(12)]), torch.arange(12)
    assert same(as_source(dataset, batch_size=5, seed=3), as_source(pair, batch_size=5, seed=3), 2)


def test_a_shuffling_loader_is_fixed_by_seed_and_epoch_without_touching_the_global_generator():
    def source() -> BatchSource:
        return as_source(DataLoader(Numbers(), batch_size=5, shuffle=True), batch_size=99, seed=1)

    first = source()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert same(first, source(), 2)
    assert torch.equal(torch.get_rng_state(), before)
    assert collect(first, 0)[1].tolist() != collect(first, 1)[1].tolist()
    assert (first.batch_size, len(first), first.num_examples, first.num_classes) == (5, 3, 12, 12)


def test_a_loader_with_its_own_generator_is_fixed_by_seed_and_epoch_too():
    loader = DataLoader(Numbers(noise=False), batch_size=5, shuffle=True, generator=torch.Generator())
    source = as_source(loader, batch_size=5, seed=1)
    first = collect(source, 2)[1].tolist()
    collect(source, 0)
    assert collect(source, 2)[1].tolist() == first


def test_a_sampler_gets_the_epoch():
    epochs: list[int] = []

    class Sampler(torch.utils.data.SequentialSampler):
        def set_epoch(self, epoch: int) -> None:
            epochs.append(epoch)

    data = Numbers()
    collect(as_source(DataLoader(data, 5, sampler=Sampler(data)), batch_size=5, num_classes=12), 6)
    assert epochs[-1] == 6


def test_classes_that_a_dataset_names_are_counted_without_reading_it():
    class Named(Numbers):
        classes = ("a", "b", "c")

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            assert index == 0, "read more than the first"
            return torch.zeros(3, 4, 4), 0

    for data in (Named(), DataLoader(Named(), batch_size=1)):
        source = as_source(data, batch_size=1, shuffle=False)
        assert (source.num_classes, source.num_examples, len(source)) == (3, 12, 12)


def test_a_list_of_batches_is_read_as_often_as_needed():
    batches = [(torch.randint(0, 256, (4, 3, 2, 2), dtype=torch.uint8), torch.tensor([0, 1, 2, 0]))] * 3
    source = as_source(batches, batch_size=1)
    source.check()
    for epoch in range(2):
        x, y = collect(source, epoch)
        assert torch.equal(x[:4], batches[0][0].float() * (1 / 255))
        assert y.dtype == torch.int64
    assert (source.num_examples, source.num_classes, source.batch_size, len(source)) == (12, 3, 4, 3)


def one_shot() -> Iterator[Any]:
    yield torch.zeros(4, 3, 2, 2), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    "make", [one_shot, lambda: iter([1]), lambda: map(str, [1]), lambda: zip([1], [2], strict=True)]
)
def test_data_that_can_be_read_only_once_is_refused_with_the_fix(make):
    with pytest.raises(UsageError, match=r"only once.*DataLoader itself, or list\(\.\.\.\)"):
        as_source(make(), batch_size=4)


def test_a_loader_that_is_empty_in_a_later_epoch_is_refused_there():
    class Once(IterableDataset[Any]):
        def __init__(self) -> None:
            self.items = iter([(torch.zeros(3, 2, 2), i % 2) for i in range(16)])

        def __iter__(self) -> Iterator[Any]:
            return self.items

    source = as_source(DataLoader(Once(), batch_size=4), batch_size=4)
    with pytest.raises(DataError, match="no batches in epoch 1"):
        list(source.epoch(1))


@pytest.mark.parametrize("thing", [3, None, object()])
def test_objects_that_are_no_data_are_refused_with_what_is_accepted(thing):
    with pytest.raises(UsageError, match=f"{type(thing).__name__}.*ImageSet.*DataLoader"):
        as_source(thing, batch_size=4)


def test_a_batch_size_below_one_is_refused():
    with pytest.raises(UsageError, match="batch size is 0"):
        as_source(random_set(), batch_size=0)


def loader_of(x: Any, y: Any) -> list[Any]:
    return [(torch.zeros(4, 3, 2, 2), torch.tensor([0, 1, 2, 2])), (x, y)]


def test_a_bad_label_in_any_batch_of_a_loader_is_refused_before_transfer():
    source = as_source(loader_of(torch.zeros(2, 3, 2, 2), torch.tensor([1, 3])), batch_size=4, num_classes=3)
    source.check()
    with pytest.raises(DataError, match="label 5 is 3; with 3 classes"):
        list(source.epoch(0))


def test_an_image_of_another_shape_in_a_loader_is_refused():
    source = as_source(loader_of(torch.zeros(2, 3, 5, 5), torch.tensor([0, 1])), batch_size=4)
    with pytest.raises(DataError, match=r"image 4 has shape \(3, 5, 5\)"):
        list(source.epoch(0))


def test_a_batch_without_an_image_is_refused_before_training():
    full = torch.zeros(4, 3, 2, 2), torch.tensor([0, 1, 2, 0])
    source = as_source([full, (full[0][:0], full[1][:0]), full], batch_size=4)
    with pytest.raises(DataError, match=r"batch 2 .*empty"):
        source.check()


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (torch.zeros(4, 3, 2, 2), "not a pair"),
        ({"x": 1}, "not a pair"),
        (("image", torch.zeros(1)), "str and Tensor"),
        ((torch.zeros(4, 3, 2, 2), torch.zeros(3, dtype=torch.int64)), r"\(4, 3, 2, 2\) and \(3,\)"),
        ((torch.zeros(4), torch.zeros(4, dtype=torch.int64)), r"\(B, C, H, W\)"),
    ],
)
def test_batches_of_another_form_are_refused(batch, words):
    with pytest.raises(DataError, match=words):
        as_source([batch], batch_size=4)


@pytest.mark.parametrize(
    ("images", "words"),
    [
        (torch.full((4, 3, 2, 2), float("nan")), "image 0 holds nan"),
        (torch.full((4, 3, 2, 2), -1.0), r"outside \[0, 1\].*normalize="),
        (torch.full((4, 3, 2, 2), 200.0), "divide by 255"),
        (torch.zeros((4, 3, 2, 2), dtype=torch.int64), "uint8"),
    ],
)
@pytest.mark.parametrize("as_loader", [True, False])
def test_bad_images_are_refused_before_training(as_loader, images, words):
    labels = torch.tensor([0, 1, 0, 1])
    source = as_source([(images, labels)] if as_loader else (images, labels), batch_size=4)
    with pytest.raises(DataError, match=words):
        source.check()


def test_one_hot_labels_are_refused_with_the_fix():
    with pytest.raises(DataError, match=r"argmax\(1\)"):
        as_source((torch.zeros(4, 3, 2, 2), torch.eye(4)), batch_size=2)
    with pytest.raises(DataError, match=r"argmax\(1\)"):
        as_source([(torch.zeros(4, 3, 2, 2), torch.eye(4))], batch_size=2, num_classes=4).check()


@pytest.mark.parametrize(
    ("labels", "fix"),
    [
        (torch.zeros(4, 1, dtype=torch.int64), r"Pass labels\.squeeze\(1\)\."),
        (torch.zeros(4, 1), r"Pass labels\.squeeze\(1\)\.long\(\)\."),
        (torch.zeros(4), r"Pass labels\.long\(\)\."),
        (torch.zeros(4, 2, 2), r"Give one number for each image\."),
    ],
)
def test_labels_of_another_shape_or_type_are_refused_with_the_call_that_converts_them(labels, fix):
    with pytest.raises(DataError, match=fix):
        as_source((torch.zeros(4, 3, 2, 2), labels), batch_size=2)
    with pytest.raises(DataError, match=fix):
        as_source([(torch.zeros(4, 3, 2, 2), labels)], batch_size=2, num_classes=4).check()


def test_an_empty_set_is_refused():
    for data in ((torch.zeros(0, 3, 2, 2), torch.zeros(0, dtype=torch.int64)), Numbers(0), []):
        with pytest.raises(DataError, match="at least one image"):
            as_source(data, batch_size=2).check()


def test_a_dataset_smaller_than_a_batch_is_refused():
    for data in (Numbers(), DataLoader(Numbers(), batch_size=64)):
        for num_classes in (12, None):
            with pytest.raises(DataError, match=r"12 examples.*one batch of 64.*at most 12"):
                as_source(data, batch_size=64, num_classes=num_classes).check()
