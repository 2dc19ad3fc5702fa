"""Several that open the same compressed archive for the first time do not get into each other's way."""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import torch

from deat.data import DataSplits, LazyImages, archives, decoded_cache
from deat.utils import locks
from deat.utils import locks as system
from helpers.children import Children
from helpers.data_sets import load, png, tree, write_tar


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    return write_tar(tmp_path / "set.tar.xz", tree(), "w:xz")


@pytest.fixture
def unpackings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of archives as they are unpacked."""
    seen: list[str] = []
    real = archives.pack_tar_images
    monkeypatch.setattr(archives, "pack_tar_images", lambda path, out: (seen.append(path.name), real(path, out))[1])
    return seen


def both(path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[DataSplits, DataSplits]:
    """What two find, the second of whom begins once the first has unpacked the set and read none of it."""
    real, second = decoded_cache.decode_splits, list[Future[DataSplits]]()
    with ThreadPoolExecutor(1) as pool:

        def decode(*arguments):
            if not second:
                second.append(pool.submit(load, path, root))
                wait(second, 0.5)  # whoever waits for nobody is done by then
            return real(*arguments)

        monkeypatch.setattr(decoded_cache, "decode_splits", decode)
        return load(path, root), second[0].result(60)


@pytest.mark.parametrize("locks", [True, False])
def test_what_one_has_unpacked_and_not_yet_read_is_not_removed_by_another(
    locks, packed, tmp_path, monkeypatch, unpackings
):
    if not locks:
        monkeypatch.setattr(system, "fcntl", None)
    one, other = both(packed, tmp_path / "root", monkeypatch)
    assert torch.equal(one.train.images, other.train.images)
    assert torch.equal(one.test.images, other.test.images)
    assert unpackings == ["set.tar.xz"]


def test_nothing_but_the_decoded_images_is_left_once_all_have_read_them(packed, tmp_path, monkeypatch):
    both(packed, tmp_path / "root", monkeypatch)
    (entry,) = (tmp_path / "root" / "decoded").iterdir()
    assert (entry / "train_images.npy").is_file()


def test_an_archive_that_is_streamed_stays_unpacked_for_all_who_read_it(tmp_path, monkeypatch, unpackings):
    path = write_tar(tmp_path / "set.tar.xz", {f"train/dog/{i}.png": png(i, 9 + i, 9) for i in range(3)}, "w:xz")
    for found in both(path, tmp_path / "root", monkeypatch):
        assert isinstance(found.train, LazyImages)
        assert found.train.decode(2).shape == (3, 224, 224)
    assert unpackings == ["set.tar.xz"]


def test_a_disk_without_locks_gives_a_turn_at_once_that_is_not_alone(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(system.fcntl, "flock", refuse)
    with locks.temporary_lock(tmp_path / "lock") as alone, locks.temporary_lock(tmp_path / "lock") as other:
        assert (alone, other) == (False, False)


def test_a_turn_that_a_dead_process_never_ended_is_taken(tmp_path):
    (tmp_path / "lock").touch()
    with locks.temporary_lock(tmp_path / "lock") as alone:
        assert alone
    assert not (tmp_path / "lock").exists()


@pytest.mark.parametrize("again", [True, False])  # made again by a third
def test_a_lock_whose_file_its_last_holder_removes_just_then_is_taken_on_a_new_one(again, tmp_path, monkeypatch):
    path, real, taken = tmp_path / "lock", system.fcntl.flock, []

    def flock(handle, kind):
        real(handle, kind)
        taken.append(handle)
        if len(taken) == 1:
            path.rename(tmp_path / "removed")
            if again:
                path.touch()

    monkeypatch.setattr(system.fcntl, "flock", flock)
    with locks.temporary_lock(path) as alone:
        assert alone
        assert len(taken) == 2


SLOW = """import sys, time
import deat
from deat.data import archives, decoded_cache

path, seconds = sys.argv[1], float(sys.argv[2])
pack, decode = archives.pack_tar_images, decoded_cache.decode_splits

def counted_pack(path, out):
    with open("unpacked", "a") as file:
        file.write("once\\n")
    return pack(path, out)

def slow_decode(*arguments):
    time.sleep(seconds)
    return decode(*arguments)

archives.pack_tar_images, decoded_cache.decode_splits = counted_pack, slow_decode
assert len(deat.load_data(f"folder:{path}", root="root").train) == 6
"""


def test_processes_that_open_an_archive_at_once_all_read_it_and_unpack_it_once(
    packed: Path, tmp_path: Path, children: Children
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    begun = [children.start_script(tmp_path / "slow.py", str(packed), str(n / 5), cwd=tmp_path) for n in range(4)]
    assert [children.wait(pid) for pid in begun] == [0] * 4, (tmp_path / "err").read_text()
    assert (tmp_path / "unpacked").read_text() == "once\n"
