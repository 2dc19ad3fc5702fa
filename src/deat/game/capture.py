"""A move as a CUDA graph: recorded once for each round's buffers, then replayed with a single launch.

k, alpha, level, learning rate and momentum are device values or loop bounds, so they change without a new recording.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from deat.game.round import Round
from deat.recording import recording, refusing_waits, warming_up

Move = Callable[[Round], None]
WARM_UP = 2
"""Calls before the one that may not wait for the device."""


class Recorder:
    """Plays moves of a network as recorded graphs. `state` yields every tensor that a move may change."""

    def __init__(self, net: nn.Module, state: Callable[[], Iterable[Tensor]]) -> None:
        self.net, self.state = net, state
        self._graphs: dict[tuple[str, int], tuple[torch.cuda.CUDAGraph, Round]] = {}

    def play(self, name: str, move: Move, r: Round) -> None:
        """Replay a move on a round, recording it the first time."""
        held = self._graphs.get((name, id(r)))
        if held is None:
            # The round is kept as well: its id must not pass to another one.
            held = self._graphs[name, id(r)] = self._record(move, r), r
        held[0].replay()

    def graph(self, name: str) -> torch.cuda.CUDAGraph:
        """The first recording of a move."""
        return next(graph for (move, _), (graph, _) in self._graphs.items() if move == name)

    def forget(self) -> None:
        """Drop every recording, as when the tensors they were made on are replaced."""
        self._graphs.clear()

    def drop(self, r: Round) -> None:
        """Drop the recordings on a round that will not be played again."""
        self._graphs = {key: held for key, held in self._graphs.items() if held[1] is not r}

    def __len__(self) -> int:
        return len(self._graphs)

    def _record(self, move: Move, r: Round) -> torch.cuda.CUDAGraph:
        with self._untouched(r), _changed_in_place(self.net):
            for _ in range(WARM_UP):
                move(r)
            with refusing_waits():
                move(r)
        graph = torch.cuda.CUDAGraph()
        with recording(graph, r.x.device):
            move(r)
        return graph

    @contextmanager
    def _untouched(self, r: Round) -> Iterator[None]:
        """Warm up on a stream of its own, and put every tensor and random stream back as it was."""
        held = [(tensor, tensor.detach().clone()) for tensor in self._changing(r)]
        try:
            with torch.random.fork_rng(devices=[r.x.device]), warming_up(r.x.device):
                yield
        finally:
            with torch.no_grad():
                for tensor, before in held:
                    tensor.copy_(before)

    def _changing(self, r: Round) -> Iterator[Tensor]:
        yield from r.tensors()
        yield from self.state()


@contextmanager
def _changed_in_place(net: nn.Module) -> Iterator[None]:
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
