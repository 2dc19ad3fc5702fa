"""The rest of an epoch that goes on in its middle."""

from collections.abc import Iterator

from torch import Tensor

from deat.data.source import Seekable, Source
from deat.interruption import Interruption

Batch = tuple[Tensor, Tensor]


def remaining_batches(source: Source, epoch: int, step: int, interruption: Interruption) -> Iterator[tuple[int, Batch]]:
    """An epoch's batches from `step` on, each with its number; asked to stop, it stops before the next one.

    A source that can begin there does. Any other draws its first batches again, and they are left out.
    """
    first, batches = _begun(source, epoch, step)
    for number, batch in enumerate(batches, first):
        interruption.check()
        if number >= step:
            yield number, batch


def _begun(source: Source, epoch: int, step: int) -> tuple[int, Iterator[Batch]]:
    """The number of the first batch that is drawn, and the batches from it on."""
    if step and isinstance(source, Seekable) and source.begins_anywhere:
        return step, source.epoch(epoch, step)
    return 0, source.epoch(epoch)
