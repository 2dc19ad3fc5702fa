"""How CUDA graphs are recorded."""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, a GPU is the current one: recordings and our own kernels are launched there, wherever tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any = None) -> Iterator[None]:
    """What is launched inside becomes the graph; other threads, such as one that pins memory, may go on meanwhile.

    Where that fails, streams and random numbers are as before, and what is raised is what went wrong inside.
    """
    # torch's own stream is of whichever GPU was recorded on first: on another one, nothing would be recorded.
    here, stream = torch.cuda.current_stream(device), _stream(device, "record")
    inside: Exception | None = None
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            try:
                yield
            except Exception as error:
                inside = error
                raise
    except Exception as error:
        if error is not inside:  # else it ended as it should, and other recordings know these random numbers
            _mend(here)
        raise inside or error from None


def _mend(here: torch.cuda.Stream) -> None:
    """A recording that breaks leaves its stream the current one, and the random numbers' state as if it went on."""
    torch.cuda.set_stream(here)
    numbers = torch.cuda.default_generators[here.device_index]
    numbers.graphsafe_set_state(numbers.clone_state())


@contextmanager
def refusing_waits() -> Iterator[None]:
    """Inside, what waits for the device raises. A recording that it happens in would be past mending."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


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
