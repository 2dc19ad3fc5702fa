"""Where tensors are, and streams beside the one that the rest of a network runs on."""

from functools import cache

import torch
from torch import Tensor


def on_gpu(x: Tensor) -> bool:
    """Whether kernels of our own can be launched on a tensor."""
    return x.is_cuda


@cache
def side(device: torch.device, use: str) -> torch.cuda.Stream:
    """A device's stream beside the others, one for each use."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
