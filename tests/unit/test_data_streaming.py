import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deat.data import LazyImages, StreamingSource, image_folder
from deat.data.image_decoding import open_image, to_tensor
from deat.errors import DataError
from deat.utils.distributed import BatchShard
from helpers.data_sets import load, png, tree, write_folder, write_zip


@pytest.fixture
def lazy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LazyImages:
    monkeypatch.setattr(image_folder, "MAX_DECODED_BYTES", 0)
    path = write_folder(tmp_path / "set", tree(6, width=20, height=16))
    train = load(path, tmp_path / "root", size=12).train
    assert isinstance(train, LazyImages)
    return train


def batches(images: LazyImages, epoch: int = 0, **options: object) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(StreamingSource(images, 5, **{"seed": 1, "workers": 0, **options}).epoch(epoch))  # type: ignore[arg-type]


def same(one: list[tuple[torch.Tensor, torch.Tensor]], two: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    pairs = zip(one, two, strict=True)
    return all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in pairs)


def test_batches_are_decoded_scaled_and_complete(lazy):
    first_epoch = batches(lazy)
    assert [tuple(x.shape) for x, _ in first_epoch] == [(5, 3, 12, 12), (5, 3, 12, 12), (2, 3, 12, 12)]
    x = torch.cat([x for x, _ in first_epoch])
    assert x.dtype == torch.float32
    assert 0 <= float(x.min()) < float(x.max()) <= 1
    assert sorted(torch.cat([y for _, y in first_epoch]).tolist()) == [0] * 6 + [1] * 6


def test_the_repr_is_one_line_without_file_names(lazy):
    assert repr(lazy) == "LazyImages(12 of 3x12x12, 2 classes)"


def test_each_process_decodes_only_its_own_rows(lazy):
    whole = batches(lazy, 1)
    for rank in range(2):
        stream = StreamingSource(lazy, 5, seed=1, workers=0)
        stream.shard = BatchShard(rank, 2)
        assert same(list(stream.epoch(1)), [(x[rank::2], y[rank::2]) for x, y in whole])


@pytest.mark.parametrize("workers", [1, 2])
def test_the_number_of_workers_changes_nothing(workers, lazy):
    stream = StreamingSource(lazy, 5, seed=1, workers=workers)
    assert same(list(stream.epoch(0)), batches(lazy, 0))
    assert same(list(stream.epoch(3)), batches(lazy, 3))


def test_workers_stay_for_the_next_epoch_and_forget_an_unfinished_one(lazy):
    stream = StreamingSource(lazy, 5, seed=1, workers=2)
    first = stream.epoch(0)
    next(first)
    working = {child.pid for child in multiprocessing.active_children()}
    assert len(working) == 2
    first.close()
    for epoch in (0, 3):
        assert same(list(stream.epoch(epoch)), batches(lazy, epoch))
    assert {child.pid for child in multiprocessing.active_children()} == working


def test_batches_are_a_pure_function_of_seed_and_epoch(lazy):
    stream = StreamingSource(lazy, 5, seed=1, workers=0)
    first = list(stream.epoch(2))
    next(stream.epoch(0))
    torch.manual_seed(5)
    assert same(list(stream.epoch(2)), first)
    assert not same(batches(lazy, 3), first)
    assert not same(batches(lazy, 2, seed=2), first)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_that_starts_in_the_middle_decodes_nothing_before_it(workers, lazy, monkeypatch):
    whole, stream, read = batches(lazy, 2), StreamingSource(lazy, 5, seed=1, workers=workers), []
    real = LazyImages.decode
    monkeypatch.setattr(LazyImages, "decode", lambda self, i, *rest: (read.append(i), real(self, i, *rest))[1])
    assert same(list(stream.epoch(2, 1)), whole[1:])
    assert len(read) == (0 if workers else 7)  # what a worker reads is not seen here
    assert list(stream.epoch(2, 3)) == []
    assert same(list(stream.epoch(2)), whole)


def test_indices_are_those_of_the_images_in_a_batch_also_where_a_process_reads_a_part(lazy):
    stream = StreamingSource(lazy, 5, seed=1, augment=False, workers=0)
    for step, (x, y) in enumerate(stream.epoch(3)):
        index = stream.batch_indices(3, step)
        assert torch.equal(lazy.labels[index], y)
        assert torch.allclose(torch.stack([lazy.decode(i) for i in index.tolist()]) / 255, x)
    stream.shard = BatchShard(1, 2)
    (_, y), *_ = stream.epoch(3)
    assert torch.equal(lazy.labels[stream.batch_indices(3, 0)][1::2], y)


def test_streaming_does_not_touch_the_global_generator(lazy):
    before = torch.get_rng_state()
    batches(lazy)
    assert torch.equal(torch.get_rng_state(), before)


def test_evaluation_gets_centre_crops_in_order(lazy):
    in_order = batches(lazy, augment=False, shuffle=False)
    assert torch.cat([y for _, y in in_order]).tolist() == [0] * 6 + [1] * 6
    assert torch.equal(in_order[0][0][3], lazy.decode(3).float() * (1 / 255))
    assert same(batches(lazy, 7, augment=False, shuffle=False), in_order)


def test_images_have_the_given_size(lazy):
    smaller = replace(lazy, size=9)
    assert StreamingSource(smaller, 5, workers=0).shape == (3, 9, 9)
    assert batches(smaller)[0][0].shape == (5, 3, 9, 9)


def test_split_is_disjoint_and_fixed_by_the_seed(lazy):
    train, val = lazy.split(4, seed=0)
    assert sorted([*train.file_indices.tolist(), *val.file_indices.tolist()]) == lazy.file_indices.tolist()
    assert val.file_indices.tolist() == lazy.split(4, seed=0)[1].file_indices.tolist()
    assert (len(train), len(val), val.num_classes) == (8, 4, 2)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_breaks_while_training_is_named_without_a_traceback(workers, lazy, tmp_path):
    (tmp_path / "set" / "train" / "dog" / "3.png").write_bytes(b"broken")
    with pytest.raises(DataError) as caught:
        batches(lazy, workers=workers)
    assert "train/dog/3.png" in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_a_file_that_is_removed_while_training_is_named(lazy, tmp_path):
    (tmp_path / "set" / "train" / "cat" / "0.png").unlink()
    with pytest.raises(DataError, match=r"cannot read 'train/cat/0\.png'"):
        batches(lazy)


def test_a_changed_zip_is_refused_when_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(image_folder, "MAX_DECODED_BYTES", 0)
    path = write_zip(tmp_path / "set.zip", tree())
    train = load(path, tmp_path, size=8).train
    data = path.read_bytes()
    path.write_bytes(data[:100] + b"\0" * 400 + data[500:])
    with pytest.raises(DataError, match="damaged"):
        batches(train)


def test_check_refuses_too_few_images_and_an_unreadable_first_image(lazy, tmp_path):
    with pytest.raises(DataError, match=r"12 examples.*one batch of 64"):
        StreamingSource(lazy, 64, workers=0).check()
    (tmp_path / "set" / "train" / "cat" / "0.png").write_bytes(png()[:50])
    with pytest.raises(DataError, match=r"'train/cat/0\.png'"):
        StreamingSource(lazy, 4, workers=0).check()


def test_an_image_that_already_fits_is_cropped_without_resampling(tmp_path, monkeypatch):
    monkeypatch.setattr(image_folder, "MAX_DECODED_BYTES", 0)
    path = write_folder(tmp_path / "set", tree(1, width=32, height=32))
    train = load(path, tmp_path / "root", size=28).train
    whole = to_tensor(open_image(png(0, 32, 32), "x"))
    assert torch.equal(train.decode(0), whole[:, 2:30, 2:30])
