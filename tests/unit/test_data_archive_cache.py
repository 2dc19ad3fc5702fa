"""Several processes that open the same compressed archive for the first time do not disturb each other."""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import torch

from deat.data import DataSplits, LazyImages, image_archives, image_folder
from helpers.children import Children
from helpers.data_sets import load, png, tree, write_tar
from helpers.locks import remove_locks


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    return write_tar(tmp_path / "set.tar.xz", tree(), "w:xz")


@pytest.fixture
def unpackings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of archives as they are unpacked."""
    seen: list[str] = []
    real = image_archives.pack_tar_images
    monkeypatch.setattr(
        image_archives, "pack_tar_images", lambda path, out: (seen.append(path.name), real(path, out))[1]
    )
    return seen


def both(path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[DataSplits, DataSplits]:
    """Load a set twice at once; the second call starts when the first has unpacked the archive and decoded nothing."""
    real, second = image_folder.decode_splits, list[Future[DataSplits]]()
    with ThreadPoolExecutor(1) as pool:

        def decode(*arguments):
            if not second:
                second.append(pool.submit(load, path, root))
                wait(second, 0.5)  # without a lock it finishes in this time
            return real(*arguments)

        monkeypatch.setattr(image_folder, "decode_splits", decode)
        return load(path, root), second[0].result(60)


@pytest.mark.parametrize("has_locks", [True, False])
def test_an_unpacked_archive_is_not_removed_while_another_process_needs_it(
    has_locks, packed, tmp_path, monkeypatch, unpackings
):
    if not has_locks:
        remove_locks(monkeypatch)
    one, other = both(packed, tmp_path / "root", monkeypatch)
    assert torch.equal(one.train.images, other.train.images)
    assert torch.equal(one.test.images, other.test.images)
    assert unpackings == ["set.tar.xz"]


def test_only_the_decoded_images_remain_once_all_have_read_the_archive(packed, tmp_path, monkeypatch):
    both(packed, tmp_path / "root", monkeypatch)
    (entry,) = (tmp_path / "root" / "decoded").iterdir()
    assert (entry / "train_images.npy").is_file()


def test_an_archive_that_is_streamed_stays_unpacked(tmp_path, monkeypatch, unpackings):
    path = write_tar(tmp_path / "set.tar.xz", {f"train/dog/{i}.png": png(i, 9 + i, 9) for i in range(3)}, "w:xz")
    for data in both(path, tmp_path / "root", monkeypatch):
        assert isinstance(data.train, LazyImages)
        assert data.train.decode(2).shape == (3, 224, 224)
    assert unpackings == ["set.tar.xz"]


@pytest.mark.parametrize("has_locks", [True, False])
def test_only_a_locked_archive_is_known_to_have_no_other_reader(has_locks, packed, tmp_path, monkeypatch):
    if not has_locks:
        remove_locks(monkeypatch)
    with image_folder._lock_archive(packed, tmp_path / "cache", "key") as is_locked:
        assert is_locked == has_locks


def test_a_lock_file_of_a_dead_process_can_be_locked_and_is_removed(packed, tmp_path):
    (tmp_path / ".key.lock").touch()
    with image_folder._lock_archive(packed, tmp_path, "key") as is_locked:
        assert is_locked
    assert not (tmp_path / ".key.lock").exists()


SLOW = """import sys, time
import deat
from deat.data import image_archives, image_folder

path, seconds = sys.argv[1], float(sys.argv[2])
pack, decode = image_archives.pack_tar_images, image_folder.decode_splits

def counted_pack(path, out):
    with open("unpacked", "a") as file:
        file.write("once\\n")
    return pack(path, out)

def slow_decode(*arguments):
    time.sleep(seconds)
    return decode(*arguments)

image_archives.pack_tar_images, image_folder.decode_splits = counted_pack, slow_decode
assert len(deat.load_data(f"folder:{path}", root="root").train) == 6
"""


def test_processes_that_open_an_archive_at_once_unpack_it_once(
    packed: Path, tmp_path: Path, children: Children
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    pids = [children.start_script(tmp_path / "slow.py", str(packed), str(n / 5), cwd=tmp_path) for n in range(3)]
    assert [children.wait(pid) for pid in pids] == [0] * 3, (tmp_path / "err").read_text()
    assert (tmp_path / "unpacked").read_text() == "once\n"
