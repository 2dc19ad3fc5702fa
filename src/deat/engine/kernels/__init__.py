"""Kernels of our own, for GPUs, and the pass that puts them into a network's graph."""

import os
from functools import cache
from pathlib import Path


@cache
def has_triton() -> bool:
    """Whether Triton is here, which builds them."""
    from torch.utils._triton import has_triton as found

    return found()


def has_cached_kernels() -> bool:
    """Whether an earlier process has left them in Triton's cache."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"
    return any(Path(os.environ.get("TRITON_CACHE_DIR") or home).glob("*/batch_norm_forward_kernel.*"))
