"""Our own GPU kernels, and the graph pass that puts them into a network."""

import os
from functools import cache
from pathlib import Path


@cache
def has_triton() -> bool:
    """Whether Triton is installed and supports this machine's GPU; it builds the kernels."""
    from torch.utils._triton import has_triton as torch_has_triton

    return torch_has_triton()


def has_cached_kernels() -> bool:
    """Whether Triton's cache holds the kernels, built by an earlier process."""
    default = Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"
    return any(Path(os.environ.get("TRITON_CACHE_DIR") or default).glob("*/batch_norm_forward_kernel.*"))
