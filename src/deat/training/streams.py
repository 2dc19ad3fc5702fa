"""The trainer's random streams: each draw derives from (seed, stream, epoch, step), dropout included."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from deat.ranks import ALONE, Ranks
from deat.seeding import derive


class Streams:
    """Seeds the perturbation's generator and torch's own ones before every batch."""

    def __init__(self, seed: int, starts: torch.Generator, ranks: Ranks = ALONE) -> None:
        self.seed, self.starts = seed, starts
        self.place = (ranks.rank,) if ranks.many else ()
        self._held: dict[str, torch.Tensor] = {}

    def at(self, epoch: int, step: int) -> None:
        """Put every stream at the beginning of a batch."""
        self.starts.manual_seed(derive(self.seed, "start", epoch, step))
        # A network draws dropout for the rows it sees, so that each process needs draws of its own.
        torch.manual_seed(derive(self.seed, "dropout", epoch, step, *self.place))

    @contextmanager
    def private(self, device: torch.device) -> Iterator[None]:
        """Inside, torch's generators are ours; afterwards they are the caller's again."""
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            if self._held:
                torch.set_rng_state(self._held["torch"])
            yield

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Where the streams are, in the middle of a batch too."""
        return {"torch": torch.get_rng_state(), "starts": self.starts.get_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from there."""
        self._held = state
        self.starts.set_state(state["starts"])
