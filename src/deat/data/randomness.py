"""The global random state, lent to code that draws from it and then put back."""

from types import TracebackType

import torch


class PrivateState:
    """A context in which torch's global generator continues a stream of its own.

    Data sets and loaders draw shuffles and transforms from the global generator. Inside this context
    those draws are a pure function of the seed, and outside it nobody notices them.
    """

    def __init__(self, seed: int) -> None:
        self._own = torch.Generator().manual_seed(seed).get_state()

    def __enter__(self) -> None:
        self._outer = torch.get_rng_state()
        torch.set_rng_state(self._own)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._own = torch.get_rng_state()
        torch.set_rng_state(self._outer)
