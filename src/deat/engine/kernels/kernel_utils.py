"""Where tensors are, and streams beside the one that the rest of a network runs on."""

from functools import cache
from typing import Any

import torch
from torch import Tensor


def on_gpu(x: Tensor) -> bool:
    """Whether kernels of our own can be launched on a tensor."""
    return x.is_cuda


@cache
def get_side_stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """A device's stream beside the others, one for each use."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


HALF_DTYPES = (torch.bfloat16, torch.float16)


def as_pair(sizes: Any) -> tuple[int, int]:
    """A size by height and width; one number may stand for both, also in a list of its own."""
    held = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    return held[0], held[-1]


def is_dense_unit_stride(stride: Any, dilation: Any, groups: int) -> bool:
    """Whether a kernel moves by one pixel, is dense, and sees every channel."""
    return as_pair(stride) == as_pair(dilation) == (1, 1) and groups == 1
