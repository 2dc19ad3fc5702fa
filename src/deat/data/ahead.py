"""Worker processes that load a set's batches, and go on to the next epoch's while this one's are trained on."""

import signal
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, NamedTuple
from weakref import finalize

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from deat.data.order import epoch_order, num_batches
from deat.ranks import Share


class Place(NamedTuple):
    """A batch, or one process's share of it: its epoch, and its number there."""

    epoch: int
    number: int
    share: Share


class EpochBatches(Sampler[list[tuple[int, int]]]):
    """Batches of (epoch, index) from a place on, in an order by (seed, epoch) alone.

    Shuffled, and so trained on, they go on with the next epoch without end.
    """

    def __init__(self, num_examples: int, batch_size: int, seed: int, shuffle: bool) -> None:
        self.num_examples, self.batch_size, self.seed, self.shuffle = num_examples, batch_size, seed, shuffle
        self.place = Place(0, 0, Share())

    def __len__(self) -> int:
        """Batches in an epoch."""
        return num_batches(self.num_examples, self.batch_size)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self._from(self.place)

    def after(self, place: Place) -> Place | None:
        """What follows a batch, if anything does."""
        if place.number + 1 < len(self):
            return place._replace(number=place.number + 1)
        return place._replace(epoch=place.epoch + 1, number=0) if self.shuffle else None

    def indices(self, place: Place) -> Tensor:
        """The items of a batch, or of a share of it."""
        return self._share(self._order(place.epoch), place)

    def _from(self, place: Place) -> Iterator[list[tuple[int, int]]]:
        first = place.number
        for epoch in count(place.epoch) if self.shuffle else (place.epoch,):
            order = self._order(epoch)
            for number in range(first, len(self)):
                batch = self._share(order, Place(epoch, number, place.share))
                yield [(epoch, index) for index in batch.tolist()]
            first = 0

    def _share(self, order: Tensor, place: Place) -> Tensor:
        batch = order[place.number * self.batch_size : (place.number + 1) * self.batch_size]
        return batch[place.share.rows(len(batch))]

    def _order(self, epoch: int) -> Tensor:
        return epoch_order(self.num_examples, self.seed, epoch, shuffle=self.shuffle)


class EpochLoader:
    """A data set's batches by epoch, loaded by workers that stay, and that work ahead over the end of an epoch.

    What follows the last batch is there already; asked for anything else, they begin anew.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_sampler: EpochBatches,
        *,
        workers: int,
        device: torch.device | str,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.dataset, self.batch_sampler, self.workers, self.collate = dataset, batch_sampler, workers, collate
        self.pinned = torch.device(device).type == "cuda"
        self._loader: DataLoader[Any] | None = None
        self._running: Any = None
        self._next: Place | None = None
        self._end: finalize[[], EpochLoader] | None = None

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self.batch_sampler)

    def epoch(self, epoch: int, first: int, share: Share) -> Iterator[Any]:
        """The epoch's batches from the first-th on, or a share of each."""
        for number in range(first, len(self)):
            yield self._take(Place(epoch, number, share))

    def dismiss(self) -> None:
        """End the workers, and drop what they did ahead; whatever is asked for next has new ones."""
        end, self._end = self._end, None
        self._loader = self._running = self._next = None
        if end:
            end()

    def _take(self, place: Place) -> Any:
        """The batch at this place; two epochs that are read in turns each begin anew, and stay right."""
        try:
            if self._running is None or place != self._next:
                self._begin(place)
            batch = next(self._running)
        except BaseException:
            self.dismiss()  # one of them may be dead, and batches lost
            raise
        self._next = self.batch_sampler.after(place)
        return batch

    def _begin(self, place: Place) -> None:
        self.batch_sampler.place = place
        self._loader = self._loader or self._made()
        self._running = iter(self._loader)
        if self.workers and not self._end:
            # Not left to the iterator's own end: a traceback may hold it, and collected in a cycle it waits in vain.
            self._end = finalize(self, self._running._shutdown_workers)
            self._end.atexit = False  # daemons end with the process, and not with one that was forked from it

    def _made(self) -> DataLoader[Any]:
        return DataLoader(
            self.dataset,
            batch_sampler=self.batch_sampler,
            num_workers=self.workers,
            persistent_workers=self.workers > 0,  # else every beginning would wait for new ones to start
            collate_fn=self.collate,
            worker_init_fn=_ignore_interrupts,
            pin_memory=self.pinned,
            generator=torch.Generator().manual_seed(self.batch_sampler.seed),  # the global one is left alone
        )


def _ignore_interrupts(worker: int) -> None:
    """Leave Ctrl-C, which reaches every process of a terminal, to the one that trains and saves."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
