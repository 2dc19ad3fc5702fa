"""Batches of a Dataset or a DataLoader: worker processes, seeded transforms, checks of every batch."""

import re
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from operator import add
from typing import Any, NamedTuple
from weakref import finalize

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

from deat.data.batch_order import BatchPosition, EpochBatchSampler, num_images_in_batch
from deat.data.image_label_checks import (
    UNIT_BOX,
    Box,
    check_dataset_size,
    check_images,
    check_layout,
    is_valid_images,
    text_labels_error,
)
from deat.data.image_set import hash_labels_and_sample, to_unit_range
from deat.errors import DataError
from deat.tasks import CLASSIFICATION, Task
from deat.utils.distributed import BatchShard
from deat.utils.seeding import PrivateRngState, derive_seed

_PAIR_HINT = "Each batch must be a pair (images, labels) of tensors, so a Dataset gives an image and its class number."


class EpochLoader:
    """Batches of a data set by epoch, loaded by worker processes that stay alive.

    At the end of an epoch the workers load the first batches of the next one ahead, if the sampler continues. If any
    other batch is requested, they start there instead.

    Args:
        dataset: A data set of (epoch, index) keys.
        batch_sampler: The order of the keys.
        workers: Number of worker processes; 0 to load in this process.
        device: The device the batches are for; batches for a GPU are in pinned memory.
        collate_fn: Makes a batch of a list of examples; torch's default if None.
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
        self._iterator: Any = None
        self._next_position: BatchPosition | None = None
        self._shut_down: finalize[[], EpochLoader] | None = None

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return len(self.batch_sampler)

    def epoch(self, epoch: int, first: int, shard: BatchShard) -> Iterator[Any]:
        """Iterate over the batches of an epoch.

        Args:
            epoch: The epoch's number.
            first: The number of the batch to start at.
            shard: The rows of each batch to load.
        """
        for step in range(first, len(self)):
            yield self._load_batch(BatchPosition(epoch, step, shard))

    def stop_workers(self) -> None:
        """End the workers and drop what they have loaded ahead; the next batch starts new ones."""
        shut_down, self._shut_down = self._shut_down, None
        self._loader = self._iterator = self._next_position = None
        if shut_down:
            shut_down()

    def _load_batch(self, position: BatchPosition) -> Any:
        try:
            # Two epochs that are read in turns restart each other here; their batches stay the same.
            if self._iterator is None or position != self._next_position:
                self._start_at(position)
            batch = next(self._iterator)
        except BaseException:
            self.stop_workers()  # a worker may be dead, and batches lost
            raise
        self._next_position = self.batch_sampler.next_position(position)
        return batch

    def _start_at(self, position: BatchPosition) -> None:
        self.batch_sampler.start = position
        self._loader = self._loader or self._make_loader()
        self._iterator = iter(self._loader)
        if self.workers and not self._shut_down:
            # Not left to the iterator's __del__: a traceback may keep the iterator alive, and in a reference cycle
            # __del__ would wait for its timeout.
            self._shut_down = finalize(self, self._iterator._shutdown_workers)
            self._shut_down.atexit = False  # daemons end with the process that started them, not with a fork of it

    def _make_loader(self) -> DataLoader[Any]:
        return DataLoader(
            self.dataset,
            batch_sampler=self.batch_sampler,
            num_workers=self.workers,
            persistent_workers=self.workers > 0,  # else each restart would wait for new workers
            collate_fn=self.collate_fn,
            worker_init_fn=_ignore_interrupts,
            pin_memory=self.pin_memory,
            generator=torch.Generator().manual_seed(self.batch_sampler.seed),  # leaves the global generator alone
        )


def _ignore_interrupts(worker: int) -> None:
    """Ignore Ctrl-C, which every process of a terminal gets; the main process saves and stops the workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class SeededDataset(Dataset[Any]):
    """A map-style data set whose random transforms depend on seed, epoch and index only.

    Args:
        dataset: The data set.
        seed: The run's seed.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, index = key
        with PrivateRngState(derive_seed(self.seed, "augment", epoch, index)):
            return self.dataset[index]


class DatasetPart(Subset[Any]):
    """A part of the user's data set that deat split off; messages show indices in the whole data set."""


def data_type_name(data: object) -> str:
    """Return the name of the data's type; for a `DatasetPart` that of the whole data set."""
    return data_type_name(data.dataset) if isinstance(data, DatasetPart) else type(data).__name__


def make_epoch_loader(
    dataset: Any, batch_size: int, seed: int, shuffle: bool, workers: int, device: torch.device | str
) -> EpochLoader:
    """Create a loader of a map-style data set whose order and transforms depend on seed and epoch only.

    Args:
        dataset: The data set.
        batch_size: Images per batch.
        seed: The run's seed.
        shuffle: Whether to draw a random order for each epoch.
        workers: Number of worker processes; 0 to load in this process.
        device: The device the batches are for.
    """
    sampler = EpochBatchSampler(len(dataset), batch_size, seed, shuffle)
    return EpochLoader(SeededDataset(dataset, seed), sampler, workers=workers, device=device)


class HostBatch(NamedTuple):
    """A batch as its loader gives it.

    Attributes:
        x: The images.
        y: The labels.
        position: Which batch it is.
        images_before: Number of images in the batches before it.
    """

    x: Tensor
    y: Tensor
    position: BatchPosition
    images_before: int

    def is_suspect(self, task: Task, box: Box) -> bool:
        """Whether the batch cannot be trained on, whatever the number of classes; images on a GPU are not read."""
        has_bad_images = self.x.device.type == "cpu" and not is_valid_images(self.x, box)
        return has_bad_images or len(self.y) == 0 or not _has_valid_labels(self.y, task)


def _has_valid_labels(labels: Tensor, task: Task) -> bool:
    try:
        task.check_labels(labels, task.count_outputs(labels))
    except DataError:
        return False
    return True


class LoaderStats(NamedTuple):
    """The size of a loader's epoch."""

    num_examples: int
    num_batches: int
    num_classes: int
    batch_size: int


class LoaderSource:
    """Batches of a DataLoader, of any re-iterable of batches, or of an `EpochLoader`.

    Labels and images are checked on the host before they are copied to the device; images only in the first epoch.
    A user's own loader keeps its order; what it draws from the global random generators is seeded by epoch. If the
    loader does not state its number of classes or its length, one pass over it counts them.

    Args:
        loader: The loader. An `EpochLoader` can start an epoch at any batch.
        device: Device of the batches.
        seed: The run's seed.
        num_classes: Number of classes; counted if None.
        training: Whether the data must hold a full batch.
        task: What labels mean.
        box: The range of the images' values.

    Raises:
        DataError: If the loader gives no batches, or batches that are not pairs of images and labels.
    """

    def __init__(
        self,
        loader: Iterable[Any] | EpochLoader,
        *,
        device: torch.device | str,
        seed: int,
        num_classes: int | None,
        training: bool,
        task: Task = CLASSIFICATION,
        box: Box = UNIT_BOX,
    ) -> None:
        self.task, self.box = task, box
        self.loader, self.seed, self.training, self.device = loader, seed, training, torch.device(device)
        self.shard = BatchShard()
        self._pixels_checked = False
        self.largest_label_index: int | None = None
        try:
            self._first_batch = self._read_first_batch()
            self._suspect_batch = self._first_batch
            stats = _declared_stats(loader, num_classes, task) or self._scan_loader(num_classes)
        finally:
            self.stop_workers()  # training may begin much later, or never
        self.shape = tuple(self._first_batch.x.shape[1:])
        self.num_examples, self._len, self.num_classes, self.batch_size = stats

    @property
    def label_shape(self) -> tuple[int, ...]:
        """The shape of one example's label: () for a class number."""
        return tuple(self._first_batch.y.shape[1:])

    @cached_property
    def digest(self) -> str | None:
        """A hash of the first batch's labels, which identifies the data; None for a user's own loader."""
        return hash_labels_and_sample(self._first_batch.y, b"") if self.can_seek else None

    @property
    def can_seek(self) -> bool:
        """Whether an epoch can start at any batch: True for a Dataset, False for a user's own loader."""
        return isinstance(self.loader, EpochLoader)

    def __len__(self) -> int:
        return self._len

    def check(self) -> None:
        """Raise DataError if the data is smaller than a training batch, or a batch seen so far is bad."""
        check_dataset_size(self.num_examples, self.batch_size, self.training)
        for batch in (self._first_batch, self._suspect_batch):
            self._check_batch(batch, on_device=True)

    def epoch(self, epoch: int, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over the batches of an epoch.

        Args:
            epoch: The epoch's number.
            first: The number of the batch to start at, 0 unless `can_seek`.

        Yields:
            Images, float32 in [0, 1], and labels, int64, on the device.

        Raises:
            DataError: If a batch cannot be trained on, or there are none.
        """
        is_empty = first == 0
        for x, y in self._iter_shards(epoch, first):
            is_empty = False
            x, y = (tensor.to(self.device, non_blocking=True) for tensor in (x, self.task.prepare_labels(y)))
            yield to_unit_range(x), y
        if is_empty:
            raise DataError(
                f"the loader gave no batches in epoch {epoch}; it can probably be read only once."
                " Pass a loader that starts again, or a Dataset."
            )
        self._pixels_checked = self._pixels_checked or first == 0

    def batch_indices(self, epoch: int, step: int) -> Tensor | None:
        """Return the indices of the examples in a batch, over all processes; None for a user's own loader."""
        if not isinstance(self.loader, EpochLoader):
            return None
        return self.loader.batch_sampler.indices(BatchPosition(epoch, step, BatchShard()))

    def stop_workers(self) -> None:
        """End the worker processes of a Dataset; those of a user's own loader are left alone."""
        if isinstance(self.loader, EpochLoader):
            self.loader.stop_workers()

    def _iter_shards(self, epoch: int, first: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over this process's rows of each batch; a user's own loader loads all rows first."""
        if self.can_seek or self.shard.size == 1:
            yield from ((batch.x, batch.y) for batch in self._iter_checked(epoch, first))
            return
        self._check_not_distributed()
        for x, y, position, _ in self._iter_checked(epoch):
            self._check_batch_length(len(y), position.step)
            rows = self.shard.rows(len(y))
            yield x[rows], y[rows]

    def _check_not_distributed(self) -> None:
        if isinstance(getattr(self.loader, "sampler", None), DistributedSampler):
            raise DataError(
                "the loader's DistributedSampler divides the data already. Pass the Dataset itself, or a loader that "
                "gives every process the whole batch: deat selects the rows of each process."
            )

    def _check_batch_length(self, length: int, step: int) -> None:
        expected = num_images_in_batch(self.num_examples, self.batch_size, step)
        if length != expected:
            raise DataError(
                f"batch {step + 1} holds {length} images, not {expected}: several processes can only share batches of "
                "one size. Pass the Dataset itself."
            )

    def _iter_checked(self, epoch: int, first: int = 0) -> Iterator[HostBatch]:
        for batch in self._iter_host_batches(epoch, first):
            self._check_batch(batch, pixels=not self._pixels_checked)
            yield batch

    def _check_batch(self, batch: HostBatch, pixels: bool = True, on_device: bool = False) -> None:
        """Check labels, shape and, with `pixels`, images; what is on a GPU is read only with `on_device`."""
        dataset_index, shape = self._dataset_index_at(batch.position, batch.images_before), tuple(batch.x.shape[1:])
        try:
            if len(batch.y) == 0:
                raise DataError("it is empty; every batch must hold an image.")
            if on_device or batch.y.device.type == "cpu":
                self.task.check_labels(batch.y, self.num_classes, dataset_index)
            if pixels and (on_device or batch.x.device.type == "cpu"):
                check_images(batch.x, dataset_index, self.box)
            if shape != self.shape:
                raise DataError(f"image {dataset_index(0)} has shape {shape}; the first one has {self.shape}.")
        except DataError as error:
            if self.can_seek:
                raise
            raise DataError(
                f"batch {batch.position.step + 1} of the data: {error} Images are counted in the loader's order."
            ) from None

    def _dataset_index_at(self, position: BatchPosition, images_before: int) -> Callable[[int], int]:
        """Return a function from rows of a batch to indices in the data set, or in a user's own loader's order."""
        if not isinstance(self.loader, EpochLoader):
            return partial(add, images_before)
        dataset, sampler = self.loader.dataset, self.loader.batch_sampler
        return lambda row: _index_in_full_dataset(dataset, int(sampler.indices(position)[row]))

    def _read_first_batch(self) -> HostBatch:
        batch = next(self._iter_host_batches(0), None)
        if batch is None:
            raise DataError("the loader gave no batches; it must hold at least one image.")
        return batch

    def _iter_host_batches(self, epoch: int, first: int = 0) -> Iterator[HostBatch]:
        position, images_before = BatchPosition(epoch, first if self.can_seek else 0, self.shard), 0
        batches = self._iter_raw_batches(epoch, first)
        while True:
            with _wrap_collate_errors(self._dataset_index_at(position, images_before)):
                batch = next(batches, None)
            if batch is None:
                return
            x, y = _unpack_batch(batch)
            yield HostBatch(x, y, position, images_before)
            position, images_before = position._replace(step=position.step + 1), images_before + len(y)

    def _iter_raw_batches(self, epoch: int, first: int) -> Iterator[Any]:
        if isinstance(self.loader, EpochLoader):
            return self.loader.epoch(epoch, first, self.shard)
        return self._iter_seeded(self.loader, epoch)

    def _iter_seeded(self, loader: Iterable[Any], epoch: int) -> Iterator[Any]:
        """Iterate over a user's own loader, with the global random generators seeded while it runs."""
        rng_state = PrivateRngState(derive_seed(self.seed, "loader", epoch))
        with rng_state:
            _set_epoch(loader, epoch, self.seed)
            batches = iter(loader)
        while True:
            with rng_state:
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def _scan_loader(self, num_classes: int | None) -> LoaderStats:
        """Read the whole loader once to count images and classes and find a bad batch."""
        sizes, num_classes_seen = [], 0
        for batch in self._iter_host_batches(0):
            sizes.append(len(batch.y))
            if len(batch.y) and (count := self.task.count_outputs(batch.y)) > num_classes_seen:
                num_classes_seen = count
                self._record_largest_label(batch)
            if self._suspect_batch is self._first_batch and batch.is_suspect(self.task, self.box):
                self._suspect_batch = batch
        self._pixels_checked = self._suspect_batch is self._first_batch
        batch_size = _declared_batch_size(self.loader) or max(sizes)
        return LoaderStats(sum(sizes), len(sizes), num_classes or max(num_classes_seen, 1), batch_size)

    def _record_largest_label(self, batch: HostBatch) -> None:
        # The position in a shuffling loader's order would not help the user to find the image.
        if self.can_seek and batch.y.ndim == 1:
            dataset_index = self._dataset_index_at(batch.position, batch.images_before)
            self.largest_label_index = dataset_index(int(batch.y.argmax()))


@contextmanager
def _wrap_collate_errors(dataset_index: Callable[[int], int]) -> Iterator[None]:
    """Convert torch's errors about examples that do not make a batch into DataError."""
    try:
        yield
    except RuntimeError as error:
        if "sparse tensors are not currently supported" in str(error):
            raise DataError(
                "images or labels are sparse tensors; expected dense ones, such as of to_dense()."
            ) from error
        difference = _uneven_shapes_message(str(error), dataset_index)
        if not difference:
            raise
        raise DataError(
            f"{difference}; images of a batch must have one size. Resize them, for example with "
            "torchvision.transforms.Resize."
        ) from error
    except TypeError as error:
        match = re.search(r"default_collate: .*found <class '(.+)'>", str(error))
        if not match:
            raise
        raise DataError(
            f"the data set gives a {match[1]}, which cannot be batched. Give each image as a tensor in [0, 1] or uint8, "
            "for example with transform=torchvision.transforms.ToTensor(), and its label as a number."
        ) from error


def _uneven_shapes_message(text: str, dataset_index: Callable[[int], int]) -> str:
    """Describe the images that differ in shape, from torch's message; empty if it is about something else."""
    match = re.search(r"equal size, but got (\[.*?\]) at entry 0 and (\[.*?\]) at entry (\d+)", text)
    if match:
        return f"image {dataset_index(int(match[3]))} has shape {match[2]}, and image {dataset_index(0)} has {match[1]}"
    # The message of a worker process, which collates into shared memory.
    is_uneven = "collate" in text and "resize storage that is not resizable" in text
    return f"image {dataset_index(0)} and others of its batch differ in shape" if is_uneven else ""


def _unpack_batch(batch: Any) -> tuple[Tensor, Tensor]:
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        length = f" of {len(batch)}" if isinstance(batch, list | tuple) else ""
        keys = f" with {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else ""
        raise DataError(f"a batch is a {type(batch).__name__}{length}{keys}, not a pair. {_PAIR_HINT}")
    x, y = (torch.from_numpy(part) if isinstance(part, np.ndarray) else part for part in batch)
    if isinstance(x, Tensor) and isinstance(y, list | tuple) and y and isinstance(y[0], str):
        raise text_labels_error(y[0])
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        raise DataError(f"a batch holds {type(x).__name__} and {type(y).__name__}. {_PAIR_HINT}")
    check_layout(x, "images")
    check_layout(y, "labels")
    if x.ndim < 2 or y.ndim < 1 or len(x) != len(y):
        shapes = f"{tuple(x.shape)} and {tuple(y.shape)}"
        raise DataError(f"a batch has shapes {shapes}; expected images (B, C, H, W) and labels (B,).")
    return x, y.long() if y.dtype == torch.bool else y


def _declared_stats(loader: Iterable[Any] | EpochLoader, num_classes: int | None, task: Task) -> LoaderStats | None:
    """Return what a loader states about itself, None if it must be read to know."""
    dataset = getattr(loader, "dataset", None)
    if not isinstance(loader, DataLoader | EpochLoader) or not hasattr(dataset, "__len__"):
        return None
    num_classes = num_classes or _declared_num_classes(
        dataset.dataset if isinstance(dataset, SeededDataset) else dataset, task
    )
    num_batches, batch_size = len(loader), _declared_batch_size(loader)
    if not num_classes or not batch_size:
        return None
    num_examples = len(dataset) if isinstance(loader, EpochLoader) else len(loader.sampler)  # type: ignore[arg-type]
    return LoaderStats(min(num_examples, num_batches * batch_size), num_batches, num_classes, batch_size)


def _declared_batch_size(loader: Any) -> int | None:
    sizes = (getattr(owner, "batch_size", None) for owner in (loader, getattr(loader, "batch_sampler", None)))
    return next((size for size in sizes if isinstance(size, int)), None)


def _declared_num_classes(dataset: Any, task: Task) -> int | None:
    """Return the number of outputs by a data set's `classes` or `targets`, None if it has neither."""
    classes = getattr(dataset, "classes", None)
    if isinstance(classes, list | tuple) and classes:
        return len(classes)
    targets = getattr(dataset, "targets", None)
    if isinstance(targets, list | tuple | np.ndarray | Tensor) and len(targets):
        return task.count_outputs(torch.as_tensor(np.asarray(targets)))
    return None


def _set_epoch(loader: Any, epoch: int, seed: int) -> None:
    for owner in (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        if owner is not None and hasattr(owner, "set_epoch"):
            owner.set_epoch(epoch)
    generator = getattr(loader, "generator", None)
    if isinstance(generator, torch.Generator):
        generator.manual_seed(derive_seed(seed, "loader", epoch))


def _index_in_full_dataset(dataset: Any, index: int) -> int:
    while isinstance(dataset, SeededDataset | DatasetPart):
        index = dataset.indices[index] if isinstance(dataset, DatasetPart) else index
        dataset = dataset.dataset
    return index
