"""A convolution's sizes, in the ways that torch takes them."""

from typing import Any

import torch

HALVES = (torch.bfloat16, torch.float16)


def pair(sizes: Any) -> tuple[int, int]:
    """A size by height and width; one number may stand for both, also in a list of its own."""
    held = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    return held[0], held[-1]


def is_plain(stride: Any, dilation: Any, groups: int) -> bool:
    """Whether a kernel moves by one pixel, is dense, and sees every channel."""
    return pair(stride) == pair(dilation) == (1, 1) and groups == 1
