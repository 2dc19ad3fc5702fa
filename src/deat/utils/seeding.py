"""Every random draw as a pure function of where it happens."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from types import TracebackType
from typing import Any

import numpy as np
import torch

from deat.utils.distributed import SINGLE_PROCESS, Distributed


def derive_seed(seed: int, stream: str, *counters: int) -> int:
    """A 63-bit seed for one draw, from the run's seed, the stream's name and its counters (epoch, step)."""
    text = ":".join((str(seed), stream, *map(str, counters)))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class PrivateRngState:
    """A context in which the global generators of torch, numpy and Python continue streams of their own.

    Data sets and loaders draw shuffles and transforms from them. Inside this context those draws are a pure
    function of the seed, and outside it nobody notices them.
    """

    def __init__(self, seed: int) -> None:
        legacy = np.random.RandomState(seed % 2**32).get_state()
        self._inner_states: tuple[Any, ...] = (
            torch.Generator().manual_seed(seed).get_state(),
            legacy,
            random.Random(seed).getstate(),
        )

    def __enter__(self) -> None:
        self._outer_states = _get_rng_states()
        _set_rng_states(self._inner_states)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inner_states = _get_rng_states()
        _set_rng_states(self._outer_states)


def _get_rng_states() -> tuple[Any, ...]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _set_rng_states(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


class RandomStreams:
    """Seeds the perturbation's generator and torch's own ones before every batch."""

    def __init__(self, seed: int, start_generator: torch.Generator, distributed: Distributed = SINGLE_PROCESS) -> None:
        self.seed, self.start_generator = seed, start_generator
        self.rank_counters = (distributed.rank,) if distributed.is_multiprocess else ()
        self._loaded_state: dict[str, torch.Tensor] = {}

    def seek(self, epoch: int, step: int) -> None:
        """Put every stream at the beginning of a batch."""
        self.start_generator.manual_seed(derive_seed(self.seed, "start", epoch, step))
        # A network draws dropout for the rows it sees, so that each process needs draws of its own.
        torch.manual_seed(derive_seed(self.seed, "dropout", epoch, step, *self.rank_counters))

    @contextmanager
    def isolated_rng(self, device: torch.device) -> Iterator[None]:
        """Inside, torch's generators are ours; afterwards they are the caller's again."""
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            if self._loaded_state:
                torch.set_rng_state(self._loaded_state["torch"])
            yield

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Where the streams are, in the middle of a batch too."""
        return {"torch": torch.get_rng_state(), "starts": self.start_generator.get_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from there."""
        self._loaded_state = state
        self.start_generator.set_state(state["starts"])
