"""What our crops must equal bit for bit, for tests on a CPU (interpreted) and on a GPU."""

from typing import NamedTuple

import torch
from torch import Tensor

from deat.data import Augment
from deat.data.image_set import to_unit_range
from deat.engine.kernels.crop import crop


class Crop(NamedTuple):
    shape: tuple[int, int, int] = (3, 8, 8)
    pad: int = 4
    flip: bool = True
    num: int = 9
    taken: slice = slice(None)  # of the images in a random order
    last: bool = False
    dtype: torch.dtype = torch.uint8


def images_of(case: Crop) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (case.num, *case.shape), generator=generator, dtype=torch.uint8)
    x = x if case.dtype == torch.uint8 else torch.rand(x.shape, generator=generator).to(case.dtype)
    return x.contiguous(memory_format=torch.channels_last) if case.last else x


def compare(case: Crop, device: str) -> tuple[Tensor, Tensor]:
    """(tensor operations on the CPU, our kernel on a device): a batch of crops."""
    x, augment, generator = images_of(case), Augment(case.pad, case.flip), torch.Generator().manual_seed(1)
    draws, order = augment.draw(case.num, generator), torch.randperm(case.num, generator=generator)
    index = order[case.taken]
    torchs = to_unit_range(augment.apply(x.index_select(0, index), draws.select(index)))
    there = draws.to(torch.device(device))
    ours = crop(x.to(device), order.to(device)[case.taken], there.top, there.left, there.flip, case.pad)
    return torchs, ours


def is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two batches have the same bits, in the same order of memory."""
    alike = one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype
    return alike and torch.equal(one.view(torch.int32), other.cpu().view(torch.int32))
