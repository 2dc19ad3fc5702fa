"""Kernels of our own, for GPUs, and the pass that puts them into a network's graph."""

from functools import cache


@cache
def has_triton() -> bool:
    """Whether Triton is here, which builds them."""
    from torch.utils._triton import has_triton as found

    return found()
