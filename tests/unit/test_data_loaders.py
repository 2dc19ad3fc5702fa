"""Workers that load the next epoch ahead: the same bytes, sooner, and no worker left behind."""

import gc
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import deat
from deat.data import BatchSource, LazyImages, StreamingSource, as_source, dataloader_source, image_folder
from deat.data.batch_order import EpochBatchSampler
from deat.data.batch_source import stopping_workers
from deat.data.dataloader_source import EpochLoader
from deat.errors import DataError
from deat.utils.distributed import BatchShard
from deat.utils.seeding import derive_seed
from helpers.data_sets import tree, write_folder

KINDS = ["files", "a data set"]
AHEAD = 5 + 5 + 2 + 5
"""Images that two workers load ahead at an epoch's end: two batches each."""
Batch = tuple[Tensor, Tensor]


class Noisy(Dataset[Any]):
    """Twelve images that are random transforms; each read of one is logged as a byte in a file."""

    classes = ("a", "b")

    def __init__(self, log: Path, broken: int | None = None) -> None:
        self.log, self.broken = log, broken

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        log_read(self.log)
        image = torch.rand(3, 4, 4)
        if self.broken is not None and torch.equal(image, random_image(self.broken)):
            raise OSError("broken")
        return image, index % 2


def random_image(seed: int) -> Tensor:
    return torch.rand(3, 4, 4, generator=torch.Generator().manual_seed(seed))


def log_read(log: Path) -> None:
    with log.open("ab") as file:
        file.write(b".")


def count_reads(log: Path, at_least: int = 0) -> int:
    """The number of images read, after waiting up to a minute for `at_least`."""
    deadline = monotonic() + 60
    while log.stat().st_size < at_least and monotonic() < deadline:
        sleep(0.01)
    return log.stat().st_size


@pytest.fixture
def log(tmp_path: Path) -> Path:
    (tmp_path / "log").touch()
    return tmp_path / "log"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Path) -> LazyImages:
    monkeypatch.setattr(image_folder, "MAX_DECODED_BYTES", 0)
    path = write_folder(tmp_path / "set", tree(6, width=10, height=8))
    train = deat.load_data(f"folder:{path}", root=tmp_path / "root", size=6).train
    assert isinstance(train, LazyImages)
    real = LazyImages.decode
    monkeypatch.setattr(LazyImages, "decode", lambda self, *which: (log_read(log), real(self, *which))[1])
    return train


OpenSource = Callable[..., Any]


@pytest.fixture(params=KINDS)
def open_source(request: pytest.FixtureRequest, files: LazyImages, log: Path) -> OpenSource:
    """A function that makes a new source of the same twelve images."""

    def open_source(workers: int = 0, **options: Any) -> Any:
        options = {"batch_size": 5, "seed": 1, "workers": workers, **options}
        if request.param == "files":
            return StreamingSource(files, **options)
        source = as_source(Noisy(log), num_classes=2, **options)
        log.write_bytes(b"")  # the source has read its first batch
        return source

    return open_source


@pytest.fixture(autouse=True)
def _no_worker_is_left() -> Iterator[None]:
    before = set(multiprocessing.active_children())
    yield
    gc.collect()
    assert set(multiprocessing.active_children()) <= before  # workers of another test may have ended meanwhile


def same(first: list[Batch], second: list[Batch]) -> bool:
    return all(torch.equal(a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("share", [BatchShard(), BatchShard(1, 2)], ids=["alone", "shared"])
def test_consecutive_epochs_equal_those_of_new_sources_byte_for_byte(workers, share, open_source):
    source = open_source(workers)
    source.shard = share
    for epoch in range(3):
        whole = list(open_source().epoch(epoch))
        assert same(list(source.epoch(epoch)), [(x[share.rows(len(y))], y[share.rows(len(y))]) for x, y in whole])


@pytest.mark.parametrize("workers", [0, 2])
def test_any_epoch_can_be_read_from_any_batch_on(workers, open_source):
    source = open_source(workers)
    for epoch, first in [(1, 2), (2, 0), (2, 0), (1, 0), (2, 3), (2, 0), (3, 1), (0, 0), (1, 0), (3, 0)]:
        assert same(list(source.epoch(epoch, first)), list(open_source().epoch(epoch))[first:])


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unfinished_epoch_can_be_continued_while_another_is_read(workers, open_source):
    source = open_source(workers)
    unfinished = source.epoch(0)
    batches = [next(unfinished)]
    other = source.epoch(1)
    assert same([next(other)], list(open_source().epoch(1))[:1])
    batches += [*unfinished]
    assert same(batches, list(open_source().epoch(0)))
    assert same(list(other), list(open_source().epoch(1))[1:])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_new_share_applies_from_the_next_epoch_on(workers, open_source):
    source = open_source(workers)
    assert same(list(source.epoch(0)), list(open_source().epoch(0)))
    source.shard = BatchShard(1, 3)
    assert same(list(source.epoch(1)), [(x[1::3], y[1::3]) for x, y in open_source().epoch(1)])


def test_the_next_epoch_is_loaded_ahead_and_nothing_is_read_twice(open_source, log):
    source = open_source(2)
    for epoch in range(3):
        list(source.epoch(epoch))
        assert count_reads(log, 12 * (epoch + 1) + AHEAD) == 12 * (epoch + 1) + AHEAD


def test_without_workers_nothing_is_loaded_ahead(open_source, log):
    source = open_source(0)
    list(source.epoch(0))
    assert (len(source), count_reads(log)) == (3, 12)


def test_validation_images_are_not_loaded_ahead(open_source, log):
    source = open_source(2, shuffle=False)
    for epoch in range(2):
        assert same(list(source.epoch(epoch)), list(open_source(shuffle=False).epoch(epoch)))
    log.write_bytes(b"")
    list(source.epoch(2))
    assert count_reads(log) == 12


def test_the_length_of_an_endless_sampler_is_one_epoch():
    batches = EpochBatchSampler(12, 5, 1, shuffle=True)
    assert len(batches) == 3
    keys = [key for _, batch in zip(range(6), batches, strict=False) for key in batch]
    assert sorted(keys) == [(epoch, index) for epoch in range(2) for index in range(12)]
    assert len([*zip(range(6), EpochBatchSampler(12, 5, 1, shuffle=False), strict=False)]) == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_an_image_that_breaks_in_the_next_epoch_fails_only_that_epoch(workers, files, monkeypatch):
    broken, real = Random(derive_seed(1, "augment", 1, 3)).getstate(), LazyImages.decode

    def decode(self: LazyImages, index: int, random: Random) -> Tensor:
        if random.getstate() == broken:
            raise DataError(f"image {index} is broken")
        return real(self, index, random)

    monkeypatch.setattr(LazyImages, "decode", decode)
    stream = StreamingSource(files, 5, seed=1, workers=workers)
    assert len(list(stream.epoch(0))) == 3
    with pytest.raises(DataError, match="image 3 is broken"):
        list(stream.epoch(1))
    assert len(list(stream.epoch(2))) == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_set_that_fails_in_the_next_epoch_fails_only_that_epoch(workers, log):
    data = Noisy(log, broken=derive_seed(1, "augment", 1, 3))
    source = as_source(data, batch_size=5, seed=1, workers=workers)
    assert len(list(source.epoch(0))) == 3
    with pytest.raises(OSError, match="broken"):
        list(source.epoch(1))
    assert len(list(source.epoch(2))) == 3


def make_trainer(train: Any, **options: Any) -> deat.Trainer:
    size = 3 * 6 * 6 if isinstance(train, LazyImages) else 3 * 4 * 4
    settings = deat.TrainConfig(
        epochs=2, batch_size=5, lr=0.1, lr_schedule="flat", precision="fp32", workers=2, device="cpu"
    )
    net = nn.Sequential(nn.Flatten(), nn.Linear(size, 2))
    return deat.make_trainer(net, train, val=train, method="natural", config=settings, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_no_worker_is_left_after_training_and_its_data_can_still_be_read(kind, files, log):
    num_workers: list[int] = []

    class Counted:
        def on_epoch(self, *_: Any) -> None:
            num_workers.append(len(multiprocessing.active_children()))

    trainer = make_trainer(files if kind == "files" else Noisy(log), callbacks=[Counted()])
    assert multiprocessing.active_children() == []
    trainer.fit()
    assert num_workers == [4, 4], "two to train with and two to validate"
    assert multiprocessing.active_children() == []
    assert len(list(trainer.train.epoch(0))) == 3


def test_no_worker_is_left_after_failed_training_while_its_error_is_alive(log):
    trainer = make_trainer(Noisy(log, broken=derive_seed(0, "augment", 1, 3)))
    with pytest.raises(OSError, match="broken") as caught:
        trainer.fit()
    assert multiprocessing.active_children() == []
    assert caught.traceback


def test_workers_of_a_source_in_a_reference_cycle_end_without_being_killed(open_source, monkeypatch):
    killed: list[BaseProcess] = []
    real = BaseProcess.terminate
    monkeypatch.setattr(BaseProcess, "terminate", lambda self: (killed.append(self), real(self)))
    source = open_source(2)
    next(source.epoch(0))
    cycle: list[Any] = [source]
    cycle.append(cycle)
    del source, cycle
    gc.collect()
    assert multiprocessing.active_children() == []
    assert killed == []


def test_a_user_s_own_loader_keeps_its_workers(log):
    loader = DataLoader(Noisy(log), batch_size=5, num_workers=1, persistent_workers=True)
    source: BatchSource = as_source(loader, batch_size=5)
    before = multiprocessing.active_children()
    assert len(before) == 1
    with stopping_workers(source, None):
        list(source.epoch(0))
    assert multiprocessing.active_children() == before


@pytest.mark.parametrize(("device", "pinned"), [("cuda:1", True), ("cpu", False)])
def test_batches_for_a_gpu_are_in_pinned_memory(device, pinned, log, monkeypatch):
    loader_options: dict[str, Any] = {}
    monkeypatch.setattr(
        dataloader_source, "DataLoader", lambda data, **options: loader_options.update(options) or DataLoader(data)
    )
    next(EpochLoader(Noisy(log), EpochBatchSampler(12, 5, 0, True), workers=0, device=device).epoch(0, 0, BatchShard()))
    assert loader_options["pin_memory"] is pinned
