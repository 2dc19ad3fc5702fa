"""Workers that go on to the next epoch's images: the same bytes, sooner, and nobody left behind."""

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
from deat.data import LazyImages, Source, StreamingSource, as_source, decoded_cache, loaders
from deat.data.loaders import EpochBatchSampler, EpochLoader
from deat.errors import DataError
from deat.utils.distributed import BatchShard
from deat.utils.seeding import derive_seed
from helpers.data_sets import tree, write_folder

KINDS = ["files", "a data set"]
AHEAD = 5 + 5 + 2 + 5
"""Images that two workers read ahead at an epoch's end: two batches each."""
Batch = tuple[Tensor, Tensor]


class Noisy(Dataset[Any]):
    """Twelve images that are random transforms, each reading of one a byte in a file."""

    classes = ("a", "b")

    def __init__(self, log: Path, broken: int | None = None) -> None:
        self.log, self.broken = log, broken

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        note(self.log)
        image = torch.rand(3, 4, 4)
        if self.broken is not None and torch.equal(image, drawn(self.broken)):
            raise OSError("broken")
        return image, index % 2


def drawn(seed: int) -> Tensor:
    return torch.rand(3, 4, 4, generator=torch.Generator().manual_seed(seed))


def note(log: Path) -> None:
    with log.open("ab") as file:
        file.write(b".")


def read(log: Path, at_least: int = 0) -> int:
    """How many images were read, once there are enough of them; what never comes fails in the end."""
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
    monkeypatch.setattr(decoded_cache, "MAX_DECODED_BYTES", 0)
    path = write_folder(tmp_path / "set", tree(6, width=10, height=8))
    train = deat.load_data(f"folder:{path}", root=tmp_path / "root", size=6).train
    assert isinstance(train, LazyImages)
    real = LazyImages.decode
    monkeypatch.setattr(LazyImages, "decode", lambda self, *which: (note(log), real(self, *which))[1])
    return train


Opened = Callable[..., Any]


@pytest.fixture(params=KINDS)
def opened(request: pytest.FixtureRequest, files: LazyImages, log: Path) -> Opened:
    """A new source over the same twelve images."""

    def opened(workers: int = 0, **options: Any) -> Any:
        options = {"batch_size": 5, "seed": 1, "workers": workers, **options}
        if request.param == "files":
            return StreamingSource(files, **options)
        source = as_source(Noisy(log), num_classes=2, **options)
        log.write_bytes(b"")  # a look at the first batch is not counted
        return source

    return opened


@pytest.fixture(autouse=True)
def _nobody_is_left() -> Iterator[None]:
    before = set(multiprocessing.active_children())
    yield
    gc.collect()
    assert set(multiprocessing.active_children()) <= before  # of which another test's may have ended by now


def same(one: list[Batch], two: list[Batch]) -> bool:
    return all(torch.equal(a, b) for x, y in zip(one, two, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("share", [BatchShard(), BatchShard(1, 2)], ids=["alone", "shared"])
def test_epochs_in_a_row_are_those_of_new_sources_byte_for_byte(workers, share, opened):
    source = opened(workers)
    source.share = share
    for epoch in range(3):
        whole = list(opened().epoch(epoch))
        assert same(list(source.epoch(epoch)), [(x[share.rows(len(y))], y[share.rows(len(y))]) for x, y in whole])


@pytest.mark.parametrize("workers", [0, 2])
def test_any_epoch_can_be_asked_for_from_any_batch_on(workers, opened):
    source = opened(workers)
    for epoch, first in [(1, 2), (2, 0), (2, 0), (1, 0), (2, 3), (2, 0), (3, 1), (0, 0), (1, 0), (3, 0)]:
        assert same(list(source.epoch(epoch, first)), list(opened().epoch(epoch))[first:])


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_that_is_left_can_be_gone_on_with_while_another_is_read(workers, opened):
    source = opened(workers)
    left = source.epoch(0)
    found = [next(left)]
    other = source.epoch(1)
    assert same([next(other)], list(opened().epoch(1))[:1])
    found += [*left]
    assert same(found, list(opened().epoch(0)))
    assert same(list(other), list(opened().epoch(1))[1:])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_share_that_changes_is_taken_from_the_next_epoch_on(workers, opened):
    source = opened(workers)
    assert same(list(source.epoch(0)), list(opened().epoch(0)))
    source.share = BatchShard(1, 3)
    assert same(list(source.epoch(1)), [(x[1::3], y[1::3]) for x, y in opened().epoch(1)])


def test_the_next_epoch_is_read_while_this_one_ends_and_nothing_is_read_twice(opened, log):
    source = opened(2)
    for epoch in range(3):
        list(source.epoch(epoch))
        assert read(log, 12 * (epoch + 1) + AHEAD) == 12 * (epoch + 1) + AHEAD


def test_without_workers_nothing_is_read_ahead(opened, log):
    source = opened(0)
    list(source.epoch(0))
    assert (len(source), read(log)) == (3, 12)


def test_validation_images_are_read_when_they_are_asked_for(opened, log):
    source = opened(2, shuffle=False)
    for epoch in range(2):
        assert same(list(source.epoch(epoch)), list(opened(shuffle=False).epoch(epoch)))
    log.write_bytes(b"")
    list(source.epoch(2))
    assert read(log) == 12


def test_a_sampler_s_length_is_an_epoch_though_it_has_no_end():
    batches = EpochBatchSampler(12, 5, 1, shuffle=True)
    assert len(batches) == 3
    keys = [key for _, batch in zip(range(6), batches, strict=False) for key in batch]
    assert sorted(keys) == [(epoch, index) for epoch in range(2) for index in range(12)]
    assert len([*zip(range(6), EpochBatchSampler(12, 5, 1, shuffle=False), strict=False)]) == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_an_image_that_breaks_in_the_next_epoch_fails_that_one_alone(workers, files, monkeypatch):
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
def test_a_data_set_that_fails_in_the_next_epoch_fails_that_one_alone(workers, log):
    data = Noisy(log, broken=derive_seed(1, "augment", 1, 3))
    source = as_source(data, batch_size=5, seed=1, workers=workers)
    assert len(list(source.epoch(0))) == 3
    with pytest.raises(OSError, match="broken"):
        list(source.epoch(1))
    assert len(list(source.epoch(2))) == 3


def trainer_of(train: Any, **options: Any) -> deat.Trainer:
    size = 3 * 6 * 6 if isinstance(train, LazyImages) else 3 * 4 * 4
    settings = deat.TrainConfig(epochs=2, batch_size=5, lr=0.1, rate="flat", precision="fp32", workers=2, device="cpu")
    net = nn.Sequential(nn.Flatten(), nn.Linear(size, 2))
    return deat.make_trainer(net, train, val=train, method="natural", config=settings, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_no_worker_is_left_when_training_has_ended_and_it_can_be_gone_on_with(kind, files, log):
    working: list[int] = []

    class Counted:
        def on_epoch(self, *_: Any) -> None:
            working.append(len(multiprocessing.active_children()))

    trainer = trainer_of(files if kind == "files" else Noisy(log), callbacks=[Counted()])
    assert multiprocessing.active_children() == []
    trainer.fit()
    assert working == [4, 4], "two to train with and two to validate"
    assert multiprocessing.active_children() == []
    assert len(list(trainer.train.epoch(0))) == 3


def test_no_worker_is_left_when_training_has_failed_though_its_error_is_kept(log):
    trainer = trainer_of(Noisy(log, broken=derive_seed(0, "augment", 1, 3)))
    with pytest.raises(OSError, match="broken") as kept:
        trainer.fit()
    assert multiprocessing.active_children() == []
    assert kept.traceback


def test_a_source_that_is_forgotten_in_a_cycle_lets_its_workers_end_by_themselves(opened, monkeypatch):
    killed: list[BaseProcess] = []
    real = BaseProcess.terminate
    monkeypatch.setattr(BaseProcess, "terminate", lambda self: (killed.append(self), real(self)))
    source = opened(2)
    next(source.epoch(0))
    cycle: list[Any] = [source]
    cycle.append(cycle)
    del source, cycle
    gc.collect()
    assert multiprocessing.active_children() == []
    assert killed == []


def test_a_loader_of_one_s_own_keeps_its_workers(log):
    loader = DataLoader(Noisy(log), batch_size=5, num_workers=1, persistent_workers=True)
    source: Source = as_source(loader, batch_size=5)
    before = multiprocessing.active_children()
    assert len(before) == 1
    with deat.data.sources.stopping_workers(source, None):
        list(source.epoch(0))
    assert multiprocessing.active_children() == before


@pytest.mark.parametrize(("device", "pinned"), [("cuda:1", True), ("cpu", False)])
def test_batches_for_a_gpu_are_handed_over_in_pinned_memory(device, pinned, log, monkeypatch):
    made: dict[str, Any] = {}
    monkeypatch.setattr(loaders, "DataLoader", lambda data, **options: made.update(options) or DataLoader(data))
    next(EpochLoader(Noisy(log), EpochBatchSampler(12, 5, 0, True), workers=0, device=device).epoch(0, 0, BatchShard()))
    assert made["pin_memory"] is pinned
