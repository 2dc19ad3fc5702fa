"""Batches that come from somebody else's loader or data set."""

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from operator import add
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

from deat.data.ahead import EpochBatches, EpochLoader, Place
from deat.data.batch import Batch, collated, pair_of
from deat.data.content import check_fits, check_images, check_labels, hashed, to_unit
from deat.data.order import batch_length
from deat.data.randomness import PrivateState
from deat.errors import DataError
from deat.ranks import Share
from deat.seeding import derive


class Survey(NamedTuple):
    """What one pass over a loader finds out."""

    num_examples: int
    num_batches: int
    num_classes: int
    batch_size: int


class Portion(Subset[Any]):
    """A part of a data set that was divided here, whose images go by their numbers in the whole."""


def kind_of(data: object) -> str:
    """The type of what a user gave, whatever part of it this is."""
    return kind_of(data.dataset) if isinstance(data, Portion) else type(data).__name__


class Items(Dataset[Any]):
    """A map-style data set whose random transforms depend on (seed, epoch, index) alone."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, index = key
        with PrivateState(derive(self.seed, "augment", epoch, index)):
            return self.dataset[index]


def load_items(
    dataset: Any, batch_size: int, seed: int, shuffle: bool, workers: int, device: torch.device | str
) -> EpochLoader:
    """A loader over a map-style data set, its order a pure function of (seed, epoch)."""
    batches = EpochBatches(len(dataset), batch_size, seed, shuffle)
    return EpochLoader(Items(dataset, seed), batches, workers=workers, device=device)


class Batches:
    """A re-iterable of (images, labels) batches as a Source, its labels checked before each transfer.

    Images are checked as they are first seen, as long as they are in host memory: a GPU is not read.
    The order is the loader's own; what it draws from torch's generators is fixed by (seed, epoch).
    Without num_classes, or a length, one pass over the loader finds them out. An EpochLoader begins anywhere.
    """

    def __init__(
        self,
        loader: Iterable[Any] | EpochLoader,
        *,
        device: torch.device | str,
        seed: int,
        num_classes: int | None,
        training: bool,
    ) -> None:
        self.loader, self.seed, self.training, self.device = loader, seed, training, torch.device(device)
        self.share = Share()
        self._trusted = False
        self.largest_at: int | None = None
        try:
            self._first = self._look()
            self._doubtful = self._first
            found = _declared(loader, num_classes) or self._survey(num_classes)
        finally:
            self.dismiss()  # it may be long until training begins, if it does
        self.shape = tuple(self._first.x.shape[1:])
        self.num_examples, self._len, self.num_classes, self.batch_size = found

    @cached_property
    def digest(self) -> str | None:
        """A hash of the first labels, by which a data set is known again; None of a loader, which has its own order."""
        return hashed(self._first.y, b"") if self.begins_anywhere else None

    @property
    def begins_anywhere(self) -> bool:
        """A data set's items, in an order of ours, do; a loader of one's own is drawn from its first batch on."""
        return isinstance(self.loader, EpochLoader)

    def __len__(self) -> int:
        return self._len

    def check(self) -> None:
        """Refuses a batch that was found not to be trainable on, and a set smaller than a training batch."""
        check_fits(self.num_examples, self.batch_size, self.training)
        for batch in (self._first, self._doubtful):
            self._check(batch, on_device=True)

    def epoch(self, epoch: int, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The epoch's batches: x float32 in [0, 1] and y int64, on the device; from the first-th on, if it can."""
        some = first > 0
        for x, y in self._shared(epoch, first):
            some = True
            x, y = (t.to(self.device, non_blocking=True) for t in (x, y))
            yield to_unit(x), y.to(torch.int64)
        if not some:
            raise DataError(
                f"the loader gave no batches in epoch {epoch}, as one that can be read only once does."
                " Pass a loader that starts again, or a Dataset."
            )
        self._trusted = self._trusted or not first

    def dismiss(self) -> None:
        """End a data set's workers; whatever is asked for next has new ones. A loader of one's own is left as it is."""
        if isinstance(self.loader, EpochLoader):
            self.loader.dismiss()

    def _shared(self, epoch: int, first: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's rows of every batch: the only ones loaded where the order is ours, else cut out."""
        if self.begins_anywhere or self.share.size == 1:
            yield from ((batch.x, batch.y) for batch in self._checked(epoch, first))
            return
        self._check_divisible()
        for x, y, place, _ in self._checked(epoch):
            self._check_length(len(y), place.number)
            rows = self.share.rows(len(y))
            yield x[rows], y[rows]

    def _check_divisible(self) -> None:
        if isinstance(getattr(self.loader, "sampler", None), DistributedSampler):
            raise DataError(
                "the loader's DistributedSampler divides the data already. Pass the Dataset itself, or a loader that "
                "gives every process the whole batch: deat takes each one's share."
            )

    def _check_length(self, found: int, step: int) -> None:
        expected = batch_length(self.num_examples, self.batch_size, step)
        if found != expected:
            raise DataError(
                f"batch {step + 1} holds {found} images, not {expected}: several processes can only share batches of "
                "one size. Pass the Dataset itself."
            )

    def _checked(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """The epoch's batches, none of which is refused; images that were all seen before are taken as they are."""
        for batch in self._host(epoch, first):
            self._check(batch, pixels=not self._trusted)
            yield batch

    def _check(self, batch: Batch, pixels: bool = True, on_device: bool = False) -> None:
        """Refuse a batch that cannot be trained on, by its image; what is on a GPU is read only where it may be."""
        number, shape = self._numbers_at(batch.place, batch.before), tuple(batch.x.shape[1:])
        try:
            if len(batch.y) == 0:
                raise DataError("it is empty; let every batch hold an image.")
            if on_device or batch.y.device.type == "cpu":
                check_labels(batch.y, self.num_classes, number)
            if pixels and (on_device or batch.x.device.type == "cpu"):
                check_images(batch.x, number)
            if shape != self.shape:
                raise DataError(f"image {number(0)} has shape {shape}; the first one has {self.shape}.")
        except DataError as error:
            if self.begins_anywhere:
                raise
            text = f"batch {batch.place.number + 1} of the data: {error} Images are counted as the loader gives them."
            raise DataError(text) from None

    def _numbers_at(self, place: Place, before: int) -> Callable[[int], int]:
        """What a batch's images are known by: their numbers in the data set, or in a loader's own order."""
        if not isinstance(self.loader, EpochLoader):
            return partial(add, before)
        items, sampler = self.loader.dataset, self.loader.batch_sampler
        return lambda row: _number_in_whole(items, int(sampler.indices(place)[row]))

    def _look(self) -> Batch:
        first = next(self._host(0), None)
        if first is None:
            raise DataError("the loader gave no batches; it must hold at least one image.")
        return first

    def _host(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """The loader's batches; of a data set's, this process's rows from the first-th on."""
        place, before = Place(epoch, first if self.begins_anywhere else 0, self.share), 0
        batches = self._loaded(epoch, first)
        while True:
            with collated(self._numbers_at(place, before)):
                batch = next(batches, None)
            if batch is None:
                return
            x, y = pair_of(batch)
            yield Batch(x, y, place, before)
            place, before = place._replace(number=place.number + 1), before + len(y)

    def _loaded(self, epoch: int, first: int) -> Iterator[Any]:
        if isinstance(self.loader, EpochLoader):
            return self.loader.epoch(epoch, first, self.share)
        return self._drawn(self.loader, epoch)

    def _drawn(self, loader: Iterable[Any], epoch: int) -> Iterator[Any]:
        state = PrivateState(derive(self.seed, "loader", epoch))
        with state:
            _set_epoch(loader, epoch, self.seed)
            batches = iter(loader)
        while True:
            with state:
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _survey(self, num_classes: int | None) -> Survey:
        sizes, top = [], 0
        for batch in self._host(0):
            sizes.append(len(batch.y))
            if len(batch.y) and int(batch.y.max()) >= top:
                top = int(batch.y.max()) + 1
                self._note_largest(batch)
            if self._doubtful is self._first and batch.is_doubtful:
                self._doubtful = batch
        self._trusted = self._doubtful is self._first
        return Survey(sum(sizes), len(sizes), num_classes or max(top, 1), _batch_size(self.loader) or max(sizes))

    def _note_largest(self, batch: Batch) -> None:
        """Keep which image of a data set has the largest label; a loader's own numbers say nothing to a person."""
        if self.begins_anywhere and batch.y.ndim == 1:
            self.largest_at = self._numbers_at(batch.place, batch.before)(int(batch.y.argmax()))


def _declared(loader: Iterable[Any] | EpochLoader, num_classes: int | None) -> Survey | None:
    """What a loader says of itself, or nothing if a pass is needed."""
    dataset = getattr(loader, "dataset", None)
    if not isinstance(loader, DataLoader | EpochLoader) or not hasattr(dataset, "__len__"):
        return None
    num_classes = num_classes or declared_classes(dataset.dataset if isinstance(dataset, Items) else dataset)
    batches, batch_size = len(loader), _batch_size(loader)
    if not num_classes or not batch_size:
        return None
    count = len(dataset) if isinstance(loader, EpochLoader) else len(loader.sampler)  # type: ignore[arg-type]
    return Survey(min(count, batches * batch_size), batches, num_classes, batch_size)


def _batch_size(loader: Any) -> int | None:
    """The batch size a loader, or its batch sampler, states."""
    sizes = (getattr(owner, "batch_size", None) for owner in (loader, getattr(loader, "batch_sampler", None)))
    return next((size for size in sizes if isinstance(size, int)), None)


def declared_classes(dataset: Any) -> int | None:
    """The number of classes a data set names (`classes`) or labels (`targets`), if it does."""
    classes = getattr(dataset, "classes", None)
    if isinstance(classes, list | tuple) and classes:
        return len(classes)
    targets = getattr(dataset, "targets", None)
    if isinstance(targets, list | tuple | np.ndarray | Tensor) and len(targets):
        return int(np.asarray(targets).max()) + 1
    return None


def _set_epoch(loader: Any, epoch: int, seed: int) -> None:
    for owner in (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        if owner is not None and hasattr(owner, "set_epoch"):
            owner.set_epoch(epoch)
    generator = getattr(loader, "generator", None)
    if isinstance(generator, torch.Generator):
        generator.manual_seed(derive(seed, "loader", epoch))


def _number_in_whole(dataset: Any, index: int) -> int:
    """An image's number in the data set that it was given with."""
    while isinstance(dataset, Items | Portion):
        index = dataset.indices[index] if isinstance(dataset, Portion) else index
        dataset = dataset.dataset
    return index
