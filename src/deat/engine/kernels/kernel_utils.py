"""Helpers of the kernels: sizes, memory formats, side streams."""

from functools import cache
from typing import Any

import torch
from torch import Tensor


def on_gpu(x: Tensor) -> bool:
    """Whether a tensor is on a GPU. A function, so that tests on a CPU can patch it."""
    return x.is_cuda


@cache
def get_side_stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """Return a device's side stream for one purpose, always the same one."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


HALF_DTYPES = (torch.bfloat16, torch.float16)
Size2d = tuple[int, int]
"""Height and width."""


def as_pair(size: Any) -> Size2d:
    """Return (height, width) of a size that is given as one number, a list of one, or a list of two."""
    values = (size,) if isinstance(size, int) else tuple(size)
    return values[0], values[-1]


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def next_power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least this size."""
    return 1 << (size - 1).bit_length()


def is_channels_last(x: Tensor) -> bool:
    """Whether a tensor is four-dimensional and dense in channels-last order."""
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)


def to_channels_last(x: Tensor) -> Tensor:
    """Return a tensor in channels-last order, itself if it is in that order."""
    return x.contiguous(memory_format=torch.channels_last)


def is_dense_unit_stride(stride: Any, dilation: Any, groups: int) -> bool:
    """Whether a convolution has stride 1, no dilation and no groups."""
    return as_pair(stride) == as_pair(dilation) == (1, 1) and groups == 1
