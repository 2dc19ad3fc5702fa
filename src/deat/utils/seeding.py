"""Random draws that depend only on the seed and on where in a run they happen, so that a resumed run repeats them."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from types import TracebackType
from typing import Any

import numpy as np
import torch

from deat.errors import UsageError
from deat.utils.distributed import SINGLE_PROCESS, Distributed

_isolation_lock = threading.RLock()
"""Held while a training uses torch's global generators; a thread that holds it may train in a callback too."""


def derive_seed(seed: int, stream: str, *counters: int) -> int:
    """Derive the seed of one draw.

    Args:
        seed: The seed of the run.
        stream: A name for the purpose of the draw.
        counters: Where the draw happens, such as its epoch and step.

    Returns:
        An integer of 63 bits.
    """
    text = ":".join((str(seed), stream, *map(str, counters)))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class PrivateRngState:
    """A context with its own state of the global generators of torch, NumPy and Python.

    Data sets and loaders use these generators for shuffles and transforms. Inside the context their draws depend only
    on the seed, and they continue where the context was left before. Outside, the generators are unchanged.

    Args:
        seed: The seed of all three generators.
    """

    def __init__(self, seed: int) -> None:
        self._inner_states: tuple[Any, ...] = (
            torch.Generator().manual_seed(seed).get_state(),
            np.random.RandomState(seed % 2**32).get_state(),
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
    """Seeds the generator of perturbations and the global ones of torch before every batch.

    Args:
        seed: The seed of the run.
        start_generator: The generator of the perturbations that attacks start from.
        distributed: The processes of the run.
    """

    def __init__(self, seed: int, start_generator: torch.Generator, distributed: Distributed = SINGLE_PROCESS) -> None:
        self.seed, self.start_generator = seed, start_generator
        self.rank_counters = (distributed.rank,) if distributed.is_multiprocess else ()
        self._loaded_state: dict[str, torch.Tensor] = {}

    def seek(self, epoch: int, step: int) -> None:
        """Seed all generators for a batch.

        Args:
            epoch: The epoch of the batch.
            step: The number of the batch in its epoch.
        """
        self.start_generator.manual_seed(derive_seed(self.seed, "start", epoch, step))
        # Each process needs different dropout, since a network draws it for the rows of its process only.
        seed = derive_seed(self.seed, "dropout", epoch, step, *self.rank_counters)
        if self.start_generator.device.type == "cpu":
            torch.default_generator.manual_seed(seed)  # torch.manual_seed records a stack for every unused backend
        else:
            torch.manual_seed(seed)

    @contextmanager
    def isolated_rng(self, device: torch.device) -> Iterator[None]:
        """Restore the caller's state of torch's generators at the end of the with statement.

        Args:
            device: The device that training uses.

        Raises:
            UsageError: Another thread of this process trains. Both would draw from the same generators.
        """
        if not _isolation_lock.acquire(blocking=False):
            raise UsageError(
                "a training runs in another thread of this process. Both would draw dropout from torch's one generator and "
                "set its threads, so neither would be reproducible. Train one after the other, or in processes."
            )
        devices = [device] if device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=devices):
                if self._loaded_state:
                    torch.set_rng_state(self._loaded_state["torch"])
                yield
        finally:
            _isolation_lock.release()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the states of the generators, for a checkpoint."""
        return {"torch": torch.get_rng_state(), "starts": self.start_generator.get_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restore the states that `state_dict` returned."""
        self._loaded_state = state
        self.start_generator.set_state(state["starts"])
