"""How CUDA graphs are recorded."""

from contextlib import AbstractContextManager
from typing import Any

import torch


def recording(graph: torch.cuda.CUDAGraph, pool: Any = None) -> AbstractContextManager[None]:
    """What is launched inside becomes the graph; other threads, such as one that pins memory, may go on meanwhile."""
    return torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")
