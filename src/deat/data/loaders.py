"""Batches that come from somebody else's loader or data set."""

import re
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import count
from operator import add
from typing import Any, NamedTuple
from weakref import finalize

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, Subset

from deat.data.checks import (
    check_dataset_size,
    check_images,
    check_labels,
    hash_labels_and_sample,
    is_valid_images,
    text_labels_error,
    to_unit_range,
)
from deat.data.resident import epoch_order, num_batches, num_images_in_batch
from deat.errors import DataError
from deat.utils.distributed import BatchShard
from deat.utils.seeding import PrivateRngState, derive_seed


class BatchPosition(NamedTuple):
    """A batch, or one process's share of it: its epoch, and its number there."""

    epoch: int
    number: int
    share: BatchShard


class EpochBatchSampler(Sampler[list[tuple[int, int]]]):
    """Batches of (epoch, index) from a place on, in an order by (seed, epoch) alone.

    Shuffled, and so trained on, they go on with the next epoch without end.
    """

    def __init__(self, num_examples: int, batch_size: int, seed: int, shuffle: bool) -> None:
        self.num_examples, self.batch_size, self.seed, self.shuffle = num_examples, batch_size, seed, shuffle
        self.place = BatchPosition(0, 0, BatchShard())

    def __len__(self) -> int:
        """Batches in an epoch."""
        return num_batches(self.num_examples, self.batch_size)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self._iter_from(self.place)

    def after(self, position: BatchPosition) -> BatchPosition | None:
        """What follows a batch, if anything does."""
        if position.number + 1 < len(self):
            return position._replace(number=position.number + 1)
        return position._replace(epoch=position.epoch + 1, number=0) if self.shuffle else None

    def indices(self, position: BatchPosition) -> Tensor:
        """The items of a batch, or of a share of it."""
        return self._take_share(self._epoch_order(position.epoch), position)

    def _iter_from(self, position: BatchPosition) -> Iterator[list[tuple[int, int]]]:
        first = position.number
        for epoch in count(position.epoch) if self.shuffle else (position.epoch,):
            order = self._epoch_order(epoch)
            for number in range(first, len(self)):
                batch = self._take_share(order, BatchPosition(epoch, number, position.share))
                yield [(epoch, index) for index in batch.tolist()]
            first = 0

    def _take_share(self, order: Tensor, position: BatchPosition) -> Tensor:
        batch = order[position.number * self.batch_size : (position.number + 1) * self.batch_size]
        return batch[position.share.rows(len(batch))]

    def _epoch_order(self, epoch: int) -> Tensor:
        return epoch_order(self.num_examples, self.seed, epoch, shuffle=self.shuffle)


class EpochLoader:
    """A data set's batches by epoch, loaded by workers that stay, and that work ahead over the end of an epoch.

    What follows the last batch is there already; asked for anything else, they begin anew.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_sampler: EpochBatchSampler,
        *,
        workers: int,
        device: torch.device | str,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.dataset, self.batch_sampler, self.workers, self.collate_fn = dataset, batch_sampler, workers, collate_fn
        self.pin_memory = torch.device(device).type == "cuda"
        self._loader: DataLoader[Any] | None = None
        self._running: Any = None
        self._next_position: BatchPosition | None = None
        self._shut_down: finalize[[], EpochLoader] | None = None

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self.batch_sampler)

    def epoch(self, epoch: int, first: int, share: BatchShard) -> Iterator[Any]:
        """The epoch's batches from the first-th on, or a share of each."""
        for number in range(first, len(self)):
            yield self._take(BatchPosition(epoch, number, share))

    def stop_workers(self) -> None:
        """End the workers, and drop what they did ahead; whatever is asked for next has new ones."""
        end, self._shut_down = self._shut_down, None
        self._loader = self._running = self._next_position = None
        if end:
            end()

    def _take(self, position: BatchPosition) -> Any:
        """The batch at this place; two epochs that are read in turns each begin anew, and stay right."""
        try:
            if self._running is None or position != self._next_position:
                self._begin(position)
            batch = next(self._running)
        except BaseException:
            self.stop_workers()  # one of them may be dead, and batches lost
            raise
        self._next_position = self.batch_sampler.after(position)
        return batch

    def _begin(self, position: BatchPosition) -> None:
        self.batch_sampler.place = position
        self._loader = self._loader or self._made()
        self._running = iter(self._loader)
        if self.workers and not self._shut_down:
            # Not left to the iterator's own end: a traceback may hold it, and collected in a cycle it waits in vain.
            self._shut_down = finalize(self, self._running._shutdown_workers)
            self._shut_down.atexit = False  # daemons end with the process, and not with one that was forked from it

    def _made(self) -> DataLoader[Any]:
        return DataLoader(
            self.dataset,
            batch_sampler=self.batch_sampler,
            num_workers=self.workers,
            persistent_workers=self.workers > 0,  # else every beginning would wait for new ones to start
            collate_fn=self.collate_fn,
            worker_init_fn=_ignore_interrupts,
            pin_memory=self.pin_memory,
            generator=torch.Generator().manual_seed(self.batch_sampler.seed),  # the global one is left alone
        )


def _ignore_interrupts(worker: int) -> None:
    """Leave Ctrl-C, which reaches every process of a terminal, to the one that trains and saves."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


_PAIR_HINT = "Each batch must be a pair (images, labels) of tensors, so a Dataset gives an image and its class number."


class HostBatch(NamedTuple):
    """A batch as its loader gives it, where that is, and how many images came before it."""

    x: Tensor
    y: Tensor
    place: BatchPosition
    before: int

    @property
    def is_suspect(self) -> bool:
        """Whether it holds what cannot be trained on, however many classes there are; images on a GPU are not read."""
        bad_images = self.x.device.type == "cpu" and not is_valid_images(self.x)
        return bad_images or len(self.y) == 0 or int(self.y.min()) < 0


@contextmanager
def wrap_collate_errors(dataset_index: Callable[[int], int]) -> Iterator[None]:
    """Says what to do about images that torch makes no batch of; number is what one of the batch is known by."""
    try:
        yield
    except RuntimeError as error:
        odd = _uneven_shapes_message(str(error), dataset_index)
        if not odd:
            raise
        raise DataError(
            f"{odd}, so that no batch can be made of them. Give all one size, with torchvision.transforms.Resize, say."
        ) from error
    except TypeError as error:
        found = re.search(r"default_collate: .*found <class '(.+)'>", str(error))
        if not found:
            raise
        raise DataError(
            f"the data set gives a {found[1]}, of which no batch can be made. Let it give each image as a tensor in "
            "[0, 1] or uint8, with transform=torchvision.transforms.ToTensor(), say, and its label as a number."
        ) from error


def _uneven_shapes_message(text: str, dataset_index: Callable[[int], int]) -> str:
    """Which images of a batch have not one size, by what torch says; nothing where it speaks of something else."""
    found = re.search(r"equal size, but got (\[.*?\]) at entry 0 and (\[.*?\]) at entry (\d+)", text)
    if found:
        return f"image {dataset_index(int(found[3]))} has shape {found[2]}, and image {dataset_index(0)} has {found[1]}"
    # What a worker process says, whose batch is a stretch of shared memory.
    unsized = "collate" in text and "resize storage that is not resizable" in text
    return f"image {dataset_index(0)} and others of its batch differ in shape" if unsized else ""


def unpack_batch(batch: Any) -> tuple[Tensor, Tensor]:
    """A batch's images and labels, of which there are as many."""
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        many = f" of {len(batch)}" if isinstance(batch, list | tuple) else ""
        named = f" with {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else ""
        raise DataError(f"a batch is a {type(batch).__name__}{many}{named}, not a pair. {_PAIR_HINT}")
    x, y = (torch.from_numpy(part) if isinstance(part, np.ndarray) else part for part in batch)
    if isinstance(x, Tensor) and isinstance(y, list | tuple) and y and isinstance(y[0], str):
        raise text_labels_error(y[0])
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        raise DataError(f"a batch holds {type(x).__name__} and {type(y).__name__}. {_PAIR_HINT}")
    if x.ndim != 4 or len(x) != len(y):
        shapes = f"{tuple(x.shape)} and {tuple(y.shape)}"
        raise DataError(f"a batch has shapes {shapes}; expected images (B, C, H, W) and labels (B,).")
    return x, y.long() if y.dtype == torch.bool else y


class LoaderStats(NamedTuple):
    """What one pass over a loader finds out."""

    num_examples: int
    num_batches: int
    num_classes: int
    batch_size: int


class DatasetPart(Subset[Any]):
    """A part of a data set that was divided here, whose images go by their numbers in the whole."""


def data_type_name(data: object) -> str:
    """The type of what a user gave, whatever part of it this is."""
    return data_type_name(data.dataset) if isinstance(data, DatasetPart) else type(data).__name__


class SeededDataset(Dataset[Any]):
    """A map-style data set whose random transforms depend on (seed, epoch, index) alone."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, index = key
        with PrivateRngState(derive_seed(self.seed, "augment", epoch, index)):
            return self.dataset[index]


def make_epoch_loader(
    dataset: Any, batch_size: int, seed: int, shuffle: bool, workers: int, device: torch.device | str
) -> EpochLoader:
    """A loader over a map-style data set, its order a pure function of (seed, epoch)."""
    batches = EpochBatchSampler(len(dataset), batch_size, seed, shuffle)
    return EpochLoader(SeededDataset(dataset, seed), batches, workers=workers, device=device)


class LoaderSource:
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
        self.share = BatchShard()
        self._pixels_checked = False
        self.largest_label_index: int | None = None
        try:
            self._first_batch = self._look()
            self._suspect_batch = self._first_batch
            found = _declared_stats(loader, num_classes) or self._scan_loader(num_classes)
        finally:
            self.stop_workers()  # it may be long until training begins, if it does
        self.shape = tuple(self._first_batch.x.shape[1:])
        self.num_examples, self._len, self.num_classes, self.batch_size = found

    @cached_property
    def digest(self) -> str | None:
        """A hash of the first labels, by which a data set is known again; None of a loader, which has its own order."""
        return hash_labels_and_sample(self._first_batch.y, b"") if self.can_seek else None

    @property
    def can_seek(self) -> bool:
        """A data set's items, in an order of ours, do; a loader of one's own is drawn from its first batch on."""
        return isinstance(self.loader, EpochLoader)

    def __len__(self) -> int:
        return self._len

    def check(self) -> None:
        """Refuses a batch that was found not to be trainable on, and a set smaller than a training batch."""
        check_dataset_size(self.num_examples, self.batch_size, self.training)
        for batch in (self._first_batch, self._suspect_batch):
            self._check(batch, on_device=True)

    def epoch(self, epoch: int, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The epoch's batches: x float32 in [0, 1] and y int64, on the device; from the first-th on, if it can."""
        some = first > 0
        for x, y in self._iter_shares(epoch, first):
            some = True
            x, y = (t.to(self.device, non_blocking=True) for t in (x, y))
            yield to_unit_range(x), y.to(torch.int64)
        if not some:
            raise DataError(
                f"the loader gave no batches in epoch {epoch}, as one that can be read only once does."
                " Pass a loader that starts again, or a Dataset."
            )
        self._pixels_checked = self._pixels_checked or not first

    def stop_workers(self) -> None:
        """End a data set's workers; whatever is asked for next has new ones. A loader of one's own is left as it is."""
        if isinstance(self.loader, EpochLoader):
            self.loader.stop_workers()

    def _iter_shares(self, epoch: int, first: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's rows of every batch: the only ones loaded where the order is ours, else cut out."""
        if self.can_seek or self.share.size == 1:
            yield from ((batch.x, batch.y) for batch in self._iter_checked(epoch, first))
            return
        self._check_not_distributed()
        for x, y, place, _ in self._iter_checked(epoch):
            self._check_batch_length(len(y), place.number)
            rows = self.share.rows(len(y))
            yield x[rows], y[rows]

    def _check_not_distributed(self) -> None:
        if isinstance(getattr(self.loader, "sampler", None), DistributedSampler):
            raise DataError(
                "the loader's DistributedSampler divides the data already. Pass the Dataset itself, or a loader that "
                "gives every process the whole batch: deat takes each one's share."
            )

    def _check_batch_length(self, length: int, step: int) -> None:
        expected = num_images_in_batch(self.num_examples, self.batch_size, step)
        if length != expected:
            raise DataError(
                f"batch {step + 1} holds {length} images, not {expected}: several processes can only share batches of "
                "one size. Pass the Dataset itself."
            )

    def _iter_checked(self, epoch: int, first: int = 0) -> Iterator[HostBatch]:
        """The epoch's batches, none of which is refused; images that were all seen before are taken as they are."""
        for batch in self._iter_host_batches(epoch, first):
            self._check(batch, pixels=not self._pixels_checked)
            yield batch

    def _check(self, batch: HostBatch, pixels: bool = True, on_device: bool = False) -> None:
        """Refuse a batch that cannot be trained on, by its image; what is on a GPU is read only where it may be."""
        number, shape = self._dataset_index_at(batch.place, batch.before), tuple(batch.x.shape[1:])
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
            if self.can_seek:
                raise
            text = f"batch {batch.place.number + 1} of the data: {error} Images are counted as the loader gives them."
            raise DataError(text) from None

    def _dataset_index_at(self, position: BatchPosition, before: int) -> Callable[[int], int]:
        """What a batch's images are known by: their numbers in the data set, or in a loader's own order."""
        if not isinstance(self.loader, EpochLoader):
            return partial(add, before)
        items, sampler = self.loader.dataset, self.loader.batch_sampler
        return lambda row: _index_in_full_dataset(items, int(sampler.indices(position)[row]))

    def _look(self) -> HostBatch:
        first = next(self._iter_host_batches(0), None)
        if first is None:
            raise DataError("the loader gave no batches; it must hold at least one image.")
        return first

    def _iter_host_batches(self, epoch: int, first: int = 0) -> Iterator[HostBatch]:
        """The loader's batches; of a data set's, this process's rows from the first-th on."""
        place, before = BatchPosition(epoch, first if self.can_seek else 0, self.share), 0
        batches = self._iter_raw_batches(epoch, first)
        while True:
            with wrap_collate_errors(self._dataset_index_at(place, before)):
                batch = next(batches, None)
            if batch is None:
                return
            x, y = unpack_batch(batch)
            yield HostBatch(x, y, place, before)
            place, before = place._replace(number=place.number + 1), before + len(y)

    def _iter_raw_batches(self, epoch: int, first: int) -> Iterator[Any]:
        if isinstance(self.loader, EpochLoader):
            return self.loader.epoch(epoch, first, self.share)
        return self._iter_seeded(self.loader, epoch)

    def _iter_seeded(self, loader: Iterable[Any], epoch: int) -> Iterator[Any]:
        state = PrivateRngState(derive_seed(self.seed, "loader", epoch))
        with state:
            _set_epoch(loader, epoch, self.seed)
            batches = iter(loader)
        while True:
            with state:
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _scan_loader(self, num_classes: int | None) -> LoaderStats:
        sizes, top = [], 0
        for batch in self._iter_host_batches(0):
            sizes.append(len(batch.y))
            if len(batch.y) and int(batch.y.max()) >= top:
                top = int(batch.y.max()) + 1
                self._record_largest_label(batch)
            if self._suspect_batch is self._first_batch and batch.is_suspect:
                self._suspect_batch = batch
        self._pixels_checked = self._suspect_batch is self._first_batch
        return LoaderStats(
            sum(sizes), len(sizes), num_classes or max(top, 1), _declared_batch_size(self.loader) or max(sizes)
        )

    def _record_largest_label(self, batch: HostBatch) -> None:
        """Keep which image of a data set has the largest label; a loader's own numbers say nothing to a person."""
        if self.can_seek and batch.y.ndim == 1:
            self.largest_label_index = self._dataset_index_at(batch.place, batch.before)(int(batch.y.argmax()))


def _declared_stats(loader: Iterable[Any] | EpochLoader, num_classes: int | None) -> LoaderStats | None:
    """What a loader says of itself, or nothing if a pass is needed."""
    dataset = getattr(loader, "dataset", None)
    if not isinstance(loader, DataLoader | EpochLoader) or not hasattr(dataset, "__len__"):
        return None
    num_classes = num_classes or declared_num_classes(
        dataset.dataset if isinstance(dataset, SeededDataset) else dataset
    )
    batches, batch_size = len(loader), _declared_batch_size(loader)
    if not num_classes or not batch_size:
        return None
    count = len(dataset) if isinstance(loader, EpochLoader) else len(loader.sampler)  # type: ignore[arg-type]
    return LoaderStats(min(count, batches * batch_size), batches, num_classes, batch_size)


def _declared_batch_size(loader: Any) -> int | None:
    """The batch size a loader, or its batch sampler, states."""
    sizes = (getattr(owner, "batch_size", None) for owner in (loader, getattr(loader, "batch_sampler", None)))
    return next((size for size in sizes if isinstance(size, int)), None)


def declared_num_classes(dataset: Any) -> int | None:
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
        generator.manual_seed(derive_seed(seed, "loader", epoch))


def _index_in_full_dataset(dataset: Any, index: int) -> int:
    """An image's number in the data set that it was given with."""
    while isinstance(dataset, SeededDataset | DatasetPart):
        index = dataset.indices[index] if isinstance(dataset, DatasetPart) else index
        dataset = dataset.dataset
    return index
