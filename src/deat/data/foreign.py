"""Batches that come from somebody else's loader or data set."""

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from deat.data.ahead import EpochBatches, EpochLoader
from deat.data.content import check_fits, check_images, check_labels, hashed, to_unit
from deat.data.randomness import PrivateState
from deat.data.resident import batch_length
from deat.errors import DataError
from deat.ranks import Share
from deat.seeding import derive

_PAIR = "Each batch must be a pair (images, labels) of tensors."


class Survey(NamedTuple):
    """What one pass over a loader finds out."""

    num_examples: int
    num_batches: int
    num_classes: int
    batch_size: int


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

    The order is the loader's own; what it draws from torch's generators is fixed by (seed, epoch).
    Without num_classes, or a length, one pass over the loader finds them out. An EpochLoader begins anywhere.
    """

    def __init__(
        self,
        loader: Iterable[Any] | EpochLoader,
        *,
        device: torch.device | str,
        seed: int,
        num_classes: int | None = None,
        training: bool = True,
    ) -> None:
        self.loader, self.seed, self.training, self.device = loader, seed, training, torch.device(device)
        self.share = Share()
        try:
            self._first = self._look()
            found = _declared(loader, num_classes) or self._survey(num_classes)
        finally:
            self.dismiss()  # it may be long until training begins, if it does
        self.shape = tuple(self._first[0].shape[1:])
        self.num_examples, self._len, self.num_classes, self.batch_size = found

    @cached_property
    def digest(self) -> str | None:
        """A hash of the first labels, by which a data set is known again; None of a loader, which has its own order."""
        return hashed(self._first[1], b"") if self.begins_anywhere else None

    @property
    def begins_anywhere(self) -> bool:
        """A data set's items, in an order of ours, do; a loader of one's own is drawn from its first batch on."""
        return isinstance(self.loader, EpochLoader)

    def __len__(self) -> int:
        return self._len

    def check(self) -> None:
        """Refuses a first batch that cannot be trained on, and a set smaller than a training batch."""
        check_fits(self.num_examples, self.batch_size, self.training)
        check_labels(self._first[1], self.num_classes)
        check_images(self._first[0])

    def epoch(self, epoch: int, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The epoch's batches: x float32 in [0, 1] and y int64, on the device; from the first-th on, if it can."""
        seen = 0
        for x, y in self._shared(epoch, first):
            if y.device.type == "cpu":  # reading labels back from a GPU would stall it
                check_labels(y, self.num_classes, seen)
            self._check_shape(x, seen)
            seen += len(y)
            x, y = (t.to(self.device, non_blocking=True) for t in (x, y))
            yield to_unit(x), y.to(torch.int64)
        if not seen and not first:
            raise DataError(
                f"the loader gave no batches in epoch {epoch}, as one that can be read only once does."
                " Pass a loader that starts again, or a Dataset."
            )

    def dismiss(self) -> None:
        """End a data set's workers; whatever is asked for next has new ones. A loader of one's own is left as it is."""
        if isinstance(self.loader, EpochLoader):
            self.loader.dismiss()

    def _shared(self, epoch: int, first: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's rows of every batch: the only ones loaded where the order is ours, else cut out."""
        if self.begins_anywhere or self.share.size == 1:
            yield from self._host(epoch, first)
            return
        self._check_divisible()
        for step, (x, y) in enumerate(self._host(epoch)):
            self._check_length(len(y), step)
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

    def _check_shape(self, x: Tensor, first: int) -> None:
        if tuple(x.shape[1:]) != self.shape:
            raise DataError(f"image {first} has shape {tuple(x.shape[1:])}; the first one has {self.shape}.")

    def _look(self) -> tuple[Tensor, Tensor]:
        first = next(self._host(0), None)
        if first is None:
            raise DataError("the loader gave no batches; it must hold at least one image.")
        return first

    def _host(self, epoch: int, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The loader's batches; of a data set's, this process's rows from the first-th on."""
        if isinstance(self.loader, EpochLoader):
            return map(_pair, self.loader.epoch(epoch, first, self.share))
        return self._drawn(self.loader, epoch)

    def _drawn(self, loader: Iterable[Any], epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        state = PrivateState(derive(self.seed, "loader", epoch))
        with state:
            _set_epoch(loader, epoch, self.seed)
            batches = iter(loader)
        while True:
            with state:
                batch = next(batches, None)
            if batch is None:
                return
            yield _pair(batch)

    def _survey(self, num_classes: int | None) -> Survey:
        sizes, top = [], 0
        for _, y in self._host(0):
            sizes.append(len(y))
            top = max(top, int(y.max()) + 1 if len(y) else 0)
        return Survey(sum(sizes), len(sizes), num_classes or max(top, 1), _batch_size(self.loader) or max(sizes))


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


def _pair(batch: Any) -> tuple[Tensor, Tensor]:
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        raise DataError(f"a batch is a {type(batch).__name__}, not a pair. {_PAIR}")
    x, y = (torch.from_numpy(part) if isinstance(part, np.ndarray) else part for part in batch)
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        raise DataError(f"a batch holds {type(x).__name__} and {type(y).__name__}. {_PAIR}")
    if x.ndim != 4 or len(x) != len(y):
        shapes = f"{tuple(x.shape)} and {tuple(y.shape)}"
        raise DataError(f"a batch has shapes {shapes}; expected images (B, C, H, W) and labels (B,).")
    return x, y
