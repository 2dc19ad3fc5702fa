"""Crops and mirror images by one launch, run one program after the other by Triton's interpreter."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deat.data import Augment, ImageSet, InMemorySource
from deat.data.augment import AugmentParams
from deat.data.image_set import to_unit_range
from deat.engine.kernels import crop
from deat.utils.distributed import BatchShard
from helpers.crop_cases import Crop, compare, is_same
from helpers.data_sets import NoHostReads, random_set

pytest.importorskip("triton", reason="needs Triton, which is for Linux")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs it for real")

CASES = [
    Crop(),
    Crop(flip=False),
    Crop(pad=0),
    Crop(pad=0, flip=False),
    Crop(shape=(1, 5, 7)),
    Crop(shape=(3, 9, 4), pad=3),
    Crop(shape=(1, 1, 1), pad=1),
    Crop(shape=(3, 3, 3), pad=4),  # a crop may be all border
    Crop(shape=(3, 23, 19), num=3),  # more than a program's numbers
    Crop(num=1),
    Crop(taken=slice(2, 7)),
    Crop(taken=slice(1, None, 3)),
    Crop(last=True, shape=(3, 5, 7)),
    Crop(dtype=torch.float32, shape=(3, 5, 7)),
    Crop(dtype=torch.float32, last=True, pad=1),
]


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sets are taken for a GPU's; the lengths of the batches that our kernel cut."""
    cut: list[int] = []
    monkeypatch.setattr(crop, "on_gpu", lambda x: True)
    monkeypatch.setattr(crop, "has_triton", lambda: True)
    monkeypatch.setattr("deat.data.in_memory.crop", lambda *args: (cut.append(len(args[1])), crop.crop(*args))[1])
    return cut


@pytest.mark.parametrize("case", CASES, ids=str)
def test_crops_have_the_bits_of_tensor_operations(case: Crop) -> None:
    assert is_same(*compare(case, "cpu"))


sizes = st.integers(1, 12)


@settings(deadline=None, max_examples=25)
@given(
    case=st.builds(
        Crop,
        shape=st.tuples(st.integers(1, 4), sizes, sizes),
        pad=st.integers(0, 6),
        flip=st.booleans(),
        num=st.integers(1, 5),
        taken=st.builds(slice, st.just(0), st.none(), st.integers(1, 3)),
        last=st.booleans(),
        dtype=st.sampled_from([torch.uint8, torch.float32]),
    )
)
def test_crops_of_any_size_have_the_bits_of_tensor_operations(case: Crop) -> None:
    assert is_same(*compare(case, "cpu"))


def test_every_byte_is_scaled_as_elsewhere() -> None:
    x, first = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16), torch.zeros(1, dtype=torch.int64)
    assert is_same(to_unit_range(x), crop.crop(x, first, first, first, first.bool(), 0))


def batches(
    images: ImageSet, augment: Augment | None, share: BatchShard, first: int = 0
) -> list[tuple[Tensor, Tensor]]:
    source = InMemorySource(images, 8, seed=3, augment=augment)
    source.shard = share
    return [batch for epoch in (0, 1) for batch in source.epoch(epoch, first)]


@pytest.mark.parametrize("share", [BatchShard(), BatchShard(1, 2), BatchShard(4, 5)], ids=str)
def test_a_resident_set_has_the_same_batches_with_our_kernel(share: BatchShard, as_on_a_gpu: list[int]) -> None:
    images = random_set(19, shape=(3, 6, 5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crop, "on_gpu", lambda x: False)
        torchs = batches(images, Augment(2), share)
    assert not as_on_a_gpu
    ours = batches(images, Augment(2), share)
    assert as_on_a_gpu == [len(y) for _, y in torchs]
    for (x, y), (u, v) in zip(torchs, ours, strict=True):
        assert is_same(x, u)
        assert torch.equal(y, v)


@pytest.mark.promise("P16")
def test_an_epoch_begun_in_its_middle_has_the_same_batches(as_on_a_gpu: list[int]) -> None:
    whole, rest = (batches(random_set(), Augment(2), BatchShard(), first) for first in (0, 1))
    assert all(is_same(one[0], other[0]) for one, other in zip(whole[1:3], rest[:2], strict=True))
    assert len(as_on_a_gpu) == len(whole) + len(rest)


def test_nothing_is_read_back(as_on_a_gpu: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []
    monkeypatch.setattr(
        "deat.engine.kernels.crop_triton.launch_crop", lambda x, index, *rest: launched.append(len(index))
    )
    with NoHostReads():
        assert sum(1 for _ in InMemorySource(random_set(), 8, augment=Augment(2)).epoch(0)) == 3
    assert launched == [1, 8, 8, 4], "one image is tried first"


class Darker(Augment):
    def apply(self, images: Tensor, draws: AugmentParams) -> Tensor:
        return super().apply(images, draws) // 2


KEPT: dict[str, Callable[[], tuple[ImageSet, Augment | None]]] = {
    "no augmentation": lambda: (random_set(), None),
    "an augmentation of one's own": lambda: (random_set(), Darker(2)),
    "doubles": lambda: (
        ImageSet(torch.rand(8, 1, 4, 4, dtype=torch.float64), torch.zeros(8).long(), ("a",)),
        Augment(2),
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_our_kernel_does_not_take_is_left_to_tensor_operations(name: str, as_on_a_gpu: list[int]) -> None:
    images, augment = KEPT[name]()
    assert batches(images, augment, BatchShard())
    assert not as_on_a_gpu


def test_images_too_large_to_be_counted_in_32_bits_are_left_to_tensor_operations(
    as_on_a_gpu: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crop, "_can_build_kernel", lambda x: True)
    assert crop.is_supported(torch.empty(2**20, 3, 224, 224, dtype=torch.uint8, device="meta")), "a set may be larger"
    apart = torch.empty_strided((4, 3, 8, 8), (1, 2**30, 32, 4), dtype=torch.uint8, device="meta")
    assert not crop.is_supported(apart)


def test_where_the_kernel_cannot_be_built_batches_come_all_the_same(
    as_on_a_gpu: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("Failed to find C compiler.\nSet CC.")

    monkeypatch.setattr("deat.engine.kernels.crop_triton.launch_crop", fail)
    with pytest.warns(UserWarning, match=r"cannot be built: Failed to find C compiler\.$") as said:
        found = batches(random_set(), Augment(2), BatchShard())
    assert len(said) == 1
    assert len(found) == 6
    assert not as_on_a_gpu
