"""The global random states, lent to code that draws from them and then put back."""

import random
from types import TracebackType
from typing import Any

import numpy as np
import torch


class PrivateState:
    """A context in which the global generators of torch, numpy and Python continue streams of their own.

    Data sets and loaders draw shuffles and transforms from them. Inside this context those draws are a pure
    function of the seed, and outside it nobody notices them.
    """

    def __init__(self, seed: int) -> None:
        legacy = np.random.RandomState(seed % 2**32).get_state()
        self._own: tuple[Any, ...] = (
            torch.Generator().manual_seed(seed).get_state(),
            legacy,
            random.Random(seed).getstate(),
        )

    def __enter__(self) -> None:
        self._outer = _states()
        _set_states(self._own)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._own = _states()
        _set_states(self._outer)


def _states() -> tuple[Any, ...]:
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def _set_states(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])
