"""CUDA graphs: record functions of static buffers once, replay each with a single launch."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from deat.engine.kernels.kernel_utils import get_side_stream


@contextmanager
def capture_graph(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any = None) -> Iterator[None]:
    """Record what is launched inside as a graph. Other threads, such as one that pins memory, may run meanwhile.

    If recording fails, streams and random number generators are restored, and the error from inside is raised.

    Args:
        graph: The graph to record.
        device: The GPU.
        pool: The memory pool to share with other graphs, if any.
    """
    # Not torch's own capture stream: it belongs to the first GPU that was recorded on.
    here, stream = torch.cuda.current_stream(device), get_side_stream(device, "record")
    inside: Exception | None = None
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            try:
                yield
            except Exception as error:
                inside = error
                raise
    except Exception as error:
        if (
            error is not inside
        ):  # else the capture ended properly, and its generator state is in use by other recordings
            _reset_after_failed_capture(here)
        raise inside or error from None
    # torch writes the generator's seed and offset on the capture's stream, and a replay writes its own on this one.
    here.wait_stream(stream)


def _reset_after_failed_capture(stream: torch.cuda.Stream) -> None:
    """Restore the current stream, and a generator state that is not in capture mode."""
    torch.cuda.set_stream(stream)
    generator = torch.cuda.default_generators[stream.device_index]
    generator.graphsafe_set_state(generator.clone_state())


@contextmanager
def forbid_synchronisation() -> Iterator[None]:
    """Raise where something inside waits for the device: in a recording, that could not be recovered from."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def warm_up_stream(device: torch.device) -> Iterator[None]:
    """Run what is inside on a side stream: always the same one, since cuBLAS allocates memory for each stream."""
    side_stream, here = get_side_stream(device, "warm up"), torch.cuda.current_stream()
    side_stream.wait_stream(here)
    try:
        with torch.cuda.stream(side_stream):
            yield
    finally:
        here.wait_stream(side_stream)


WARM_UP_CALLS = 2
"""Calls before the one in which waiting for the device is an error."""


class StaticBuffers(Protocol):
    """Device tensors at fixed addresses, which a recording reads and writes."""

    x: Tensor

    def tensors(self) -> list[Tensor]:
        """Return every tensor."""


BuffersT = TypeVar("BuffersT", bound=StaticBuffers)


class GraphRecorder:
    """Functions of static buffers as CUDA graphs: recorded at the first call, replayed with one launch after it.

    Numbers that change between calls (k, alpha, learning rate, momentum) are device values or bounds of loops outside
    the function, so that they change without a new recording.

    Args:
        net: The network that the functions call; its module buffers must be changed in place.
    """

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self._graphs: dict[tuple[str, int], tuple[torch.cuda.CUDAGraph, StaticBuffers]] = {}

    def run(
        self,
        name: str,
        function: Callable[[BuffersT], None],
        buffers: BuffersT,
        mutable_tensors: Callable[[], Iterable[Tensor]],
    ) -> None:
        """Replay the recording of a function on these buffers, making it at the first call.

        Args:
            name: The name of the function.
            function: What to record.
            buffers: The static buffers.
            mutable_tensors: Every other tensor that the function may change.
        """
        recording = self._graphs.get((name, id(buffers)))
        if recording is None:
            # The buffers are kept too, so that no other object gets their id.
            recording = self._graphs[name, id(buffers)] = self._record(function, buffers, mutable_tensors), buffers
        recording[0].replay()

    def graph(self, name: str) -> torch.cuda.CUDAGraph:
        """Return the first recording of a function."""
        return next(graph for (function, _), (graph, _) in self._graphs.items() if function == name)

    def clear_recordings(self) -> None:
        """Drop every recording, as is needed when tensors that it uses are replaced."""
        self._graphs.clear()

    def drop(self, buffers: StaticBuffers) -> None:
        """Drop the recordings on buffers that will not be used again."""
        self._graphs = {key: recording for key, recording in self._graphs.items() if recording[1] is not buffers}

    def __len__(self) -> int:
        return len(self._graphs)

    def _record(
        self,
        function: Callable[[BuffersT], None],
        buffers: BuffersT,
        mutable_tensors: Callable[[], Iterable[Tensor]],
    ) -> torch.cuda.CUDAGraph:
        device = buffers.x.device
        with _restore_tensors(device, [*buffers.tensors(), *mutable_tensors()]), _require_buffers_in_place(self.net):
            for _ in range(WARM_UP_CALLS):
                function(buffers)
            with forbid_synchronisation():
                function(buffers)
        graph = torch.cuda.CUDAGraph()
        with capture_graph(graph, device):
            function(buffers)
        return graph


@contextmanager
def _restore_tensors(device: torch.device, tensors: list[Tensor]) -> Iterator[None]:
    """Run the inside on a side stream, then restore these tensors and the random number generators."""
    copies = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        with torch.random.fork_rng(devices=[device]), warm_up_stream(device):
            yield
    finally:
        with torch.no_grad():
            for tensor, copy in copies:
                tensor.copy_(copy)


@contextmanager
def _require_buffers_in_place(net: nn.Module) -> Iterator[None]:
    """Refuse a network that replaces its module buffers, since a recording would keep reading the old ones."""
    before = [(module, dict(module._buffers)) for module in net.modules()]
    try:
        yield
        replaced = [name for module, old in before for name in old if old[name] is not module._buffers.get(name)]
        if replaced:
            raise RuntimeError(f"its buffer {replaced[0]} is replaced by a new tensor, not changed in place")
    finally:
        for module, old in before:
            module._buffers.update(old)
