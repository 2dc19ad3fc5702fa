"""How CUDA graphs are recorded."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, a GPU is the current one: recordings and our own kernels are launched there, wherever tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def recording(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any = None) -> AbstractContextManager[None]:
    """What is launched inside becomes the graph; other threads, such as one that pins memory, may go on meanwhile."""
    # torch's own stream is of whichever GPU was recorded on first: on another one, nothing would be recorded.
    return torch.cuda.graph(graph, pool=pool, stream=_stream(device, "record"), capture_error_mode="thread_local")


@contextmanager
def warming_up(device: torch.device) -> Iterator[None]:
    """What is launched inside runs on a stream of its own: always the same, since cuBLAS keeps memory for each."""
    beside, here = _stream(device, "warm up"), torch.cuda.current_stream()
    beside.wait_stream(here)
    try:
        with torch.cuda.stream(beside):
            yield
    finally:
        here.wait_stream(beside)


@cache
def _stream(device: torch.device, use: str) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
