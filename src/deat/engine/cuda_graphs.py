"""A move as a CUDA graph: recorded once for each round's buffers, then replayed with a single launch.

k, alpha, level, learning rate and momentum are device values or loop bounds, so they change without a new recording.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from deat.core.buffers import Buffers


def device_context(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, a GPU is the current one: recordings and our own kernels are launched there, wherever tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def capture_graph(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any = None) -> Iterator[None]:
    """What is launched inside becomes the graph; other threads, such as one that pins memory, may go on meanwhile.

    Where that fails, streams and random numbers are as before, and what is raised is what went wrong inside.
    """
    # torch's own stream is of whichever GPU was recorded on first: on another one, nothing would be recorded.
    here, stream = torch.cuda.current_stream(device), _get_side_stream(device, "record")
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
            _reset_after_failed_capture(here)
        raise inside or error from None


def _reset_after_failed_capture(stream: torch.cuda.Stream) -> None:
    """A recording that breaks leaves its stream the current one, and the random numbers' state as if it went on."""
    torch.cuda.set_stream(stream)
    numbers = torch.cuda.default_generators[stream.device_index]
    numbers.graphsafe_set_state(numbers.clone_state())


@contextmanager
def forbid_synchronisation() -> Iterator[None]:
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
def warm_up_stream(device: torch.device) -> Iterator[None]:
    """What is launched inside runs on a stream of its own: always the same, since cuBLAS keeps memory for each."""
    beside, here = _get_side_stream(device, "warm up"), torch.cuda.current_stream()
    beside.wait_stream(here)
    try:
        with torch.cuda.stream(beside):
            yield
    finally:
        here.wait_stream(beside)


@cache
def _get_side_stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


Move = Callable[[Buffers], None]
WARM_UP_CALLS = 2
"""Calls before the one that may not wait for the device."""


class GraphRecorder:
    """Plays moves of a network as recorded graphs. `state` yields every tensor that a move may change."""

    def __init__(self, net: nn.Module, mutable_tensors: Callable[[], Iterable[Tensor]]) -> None:
        self.net, self.state = net, mutable_tensors
        self._graphs: dict[tuple[str, int], tuple[torch.cuda.CUDAGraph, Buffers]] = {}

    def play(self, name: str, move: Move, buffers: Buffers) -> None:
        """Replay a move on a round, recording it the first time."""
        held = self._graphs.get((name, id(buffers)))
        if held is None:
            # The round is kept as well: its id must not pass to another one.
            held = self._graphs[name, id(buffers)] = self._record(move, buffers), buffers
        held[0].replay()

    def graph(self, name: str) -> torch.cuda.CUDAGraph:
        """The first recording of a move."""
        return next(graph for (move, _), (graph, _) in self._graphs.items() if move == name)

    def clear_recordings(self) -> None:
        """Drop every recording, as when the tensors they were made on are replaced."""
        self._graphs.clear()

    def drop(self, buffers: Buffers) -> None:
        """Drop the recordings on a round that will not be played again."""
        self._graphs = {key: held for key, held in self._graphs.items() if held[1] is not buffers}

    def __len__(self) -> int:
        return len(self._graphs)

    def _record(self, move: Move, buffers: Buffers) -> torch.cuda.CUDAGraph:
        with self._restore_state(buffers), _require_buffers_in_place(self.net):
            for _ in range(WARM_UP_CALLS):
                move(buffers)
            with forbid_synchronisation():
                move(buffers)
        graph = torch.cuda.CUDAGraph()
        with capture_graph(graph, buffers.x.device):
            move(buffers)
        return graph

    @contextmanager
    def _restore_state(self, buffers: Buffers) -> Iterator[None]:
        """Warm up on a stream of its own, and put every tensor and random stream back as it was."""
        held = [(tensor, tensor.detach().clone()) for tensor in self._all_mutable_tensors(buffers)]
        try:
            with torch.random.fork_rng(devices=[buffers.x.device]), warm_up_stream(buffers.x.device):
                yield
        finally:
            with torch.no_grad():
                for tensor, before in held:
                    tensor.copy_(before)

    def _all_mutable_tensors(self, buffers: Buffers) -> Iterator[Tensor]:
        yield from buffers.tensors()
        yield from self.state()


@contextmanager
def _require_buffers_in_place(net: nn.Module) -> Iterator[None]:
    """Refuse a network that puts new buffers in the place of old ones, which a recording would go on reading."""
    held = [(module, dict(module._buffers)) for module in net.modules()]
    try:
        yield
        replaced = [name for module, before in held for name in before if before[name] is not module._buffers.get(name)]
        if replaced:
            raise RuntimeError(f"its buffer {replaced[0]} is replaced by a new tensor, not changed in its place")
    finally:
        for module, before in held:
            module._buffers.update(before)
