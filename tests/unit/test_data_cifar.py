import hashlib
import pickle
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

from deat.data import cifar, load_data
from deat.data.download import download_file
from deat.errors import DataError, UsageError
from deat.recipes.recipe import get_recipe
from helpers.data_sets import Payload, add, cifar_archive, cifar_files, shrink, write_folder

NAMES = ["cifar10", "cifar100"]


def folder_of(name: str, binary: bool, root: Path) -> Path:
    return write_folder(root / cifar.RELEASES[name][0 if binary else 1].folder, cifar_files(name, binary))


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_archive_and_folder_of_each_release_give_the_same_images(name, binary, tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    archive = cifar_archive(name, binary, tmp_path / "a")
    shrink(monkeypatch, name, archive.read_bytes())
    folder_of(name, binary, tmp_path / "b")
    first, second = (load_data(name, root=tmp_path / where) for where in "ab")
    files = len(cifar.RELEASES[name][0].train)
    assert (len(first.train), len(first.test)) == (4 * files, 4)
    assert torch.equal(first.train.images, second.train.images)
    assert torch.equal(first.test.labels, second.test.labels)
    assert first.train.classes[3] == "class3"
    assert (first.eps, first.pad, first.flip) == (8 / 255, 4, True)


def test_a_name_with_a_folder_reads_the_set_from_there(tmp_path, monkeypatch):
    shrink(monkeypatch, "cifar10")
    folder_of("cifar10", True, tmp_path / "here")
    named = load_data(f"cifar10:{tmp_path / 'here'}")
    assert torch.equal(named.train.images, load_data("cifar10", root=tmp_path / "here").train.images)
    assert named.name == "cifar10"
    with pytest.raises(UsageError, match="Give one"):
        load_data(f"cifar10:{tmp_path / 'here'}", root=tmp_path)
    row = get_recipe("cifar10-fast").make_rows(["fgsm"], data=f"cifar10:{tmp_path / 'here'}")[0]
    assert (row.request.data, row.request.data_root) == ("cifar10", str(tmp_path / "here"))
    assert row.paper_row is not None


NORMALIZED_BY = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}


@pytest.mark.parametrize("name", NAMES)
def test_each_set_is_normalised_by_its_own_published_numbers(name, tmp_path, monkeypatch):
    shrink(monkeypatch, name)
    folder_of(name, True, tmp_path)
    splits = load_data(name, root=tmp_path)
    assert (splits.mean, splits.std) == NORMALIZED_BY[name]


@pytest.mark.parametrize("name", NAMES)
def test_both_releases_have_the_same_images(name, tmp_path, monkeypatch):
    shrink(monkeypatch, name)
    folder_of(name, True, tmp_path / "a")
    folder_of(name, False, tmp_path / "b")
    first, second = (load_data(name, root=tmp_path / where) for where in "ab")
    assert torch.equal(first.train.images, second.train.images)
    assert torch.equal(first.train.labels, second.train.labels)


def test_the_binary_release_is_preferred_so_that_no_pickle_is_opened(tmp_path, monkeypatch):
    shrink(monkeypatch, "cifar10")
    folder_of("cifar10", True, tmp_path)
    folder_of("cifar10", False, tmp_path)
    monkeypatch.setattr(cifar, "load_plain_pickle", lambda *_: pytest.fail("a pickle was opened"))
    load_data("cifar10", root=tmp_path)


def test_missing_data_is_refused_with_the_remedies_and_without_network(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar, "download_file", lambda *_: pytest.fail("network"))
    with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz.*cifar-10-batches-py.*--download"):
        load_data("cifar10", root=tmp_path)


@pytest.mark.promise("P41")
@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_a_damaged_local_archive_is_refused_unread_and_left_in_place(damage, tmp_path, monkeypatch):
    archive = cifar_archive("cifar10", True, tmp_path)
    data = archive.read_bytes()
    shrink(monkeypatch, "cifar10", data)
    bad = data[:-10] if damage == "cut" else data[:50] + bytes([data[50] ^ 1]) + data[51:]
    archive.write_bytes(bad)
    monkeypatch.setattr(tarfile, "open", lambda *_, **__: pytest.fail("parsed"))
    with pytest.raises(DataError, match=r"cifar-10-binary.*sha256.*get it again"):
        load_data("cifar10", root=tmp_path)
    assert archive.read_bytes() == bad


@pytest.mark.promise("P42")
@pytest.mark.parametrize("file", ["data_batch_2", "batches.meta"])
def test_a_malicious_pickle_is_refused_and_never_runs(file, tmp_path, monkeypatch):
    shrink(monkeypatch, "cifar10")
    folder = folder_of("cifar10", False, tmp_path)
    marker = tmp_path / "marker"
    (folder / file).write_bytes(pickle.dumps({b"data": Payload(marker)}))
    with pytest.raises(DataError, match=rf"'{file}'.*mkdir.*only plain data"):
        load_data("cifar10", root=tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize("protocol", range(5))
def test_the_protocol_of_a_pickle_does_not_change_the_images(protocol, tmp_path, monkeypatch):
    shrink(monkeypatch, "cifar10")
    folder = folder_of("cifar10", False, tmp_path)
    before = load_data("cifar10", root=tmp_path).test
    batch = pickle.loads((folder / "test_batch").read_bytes())
    (folder / "test_batch").write_bytes(pickle.dumps(batch, protocol=protocol))
    assert torch.equal(load_data("cifar10", root=tmp_path).test.images, before.images)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({b"data": np.zeros((4, 3071), np.uint8), b"labels": [0] * 4}, "4 images of 3072 bytes"),
        ({b"data": np.zeros((4, 3072), np.float32), b"labels": [0] * 4}, "4 images of 3072 bytes"),
        ({b"data": "text", b"labels": [0] * 4}, "4 images of 3072 bytes"),
        ({b"labels": [0] * 4}, "4 images of 3072 bytes"),
        ({b"data": np.zeros((4, 3072), np.uint8), b"labels": [0] * 3}, "4 labels"),
        ({b"data": np.zeros((4, 3072), np.uint8), b"labels": [0, 1, 2, 10**30]}, "4 labels"),
        ({b"data": np.zeros((4, 3072), np.uint8), b"labels": [0, 10, 0, 0]}, "label 1 is 10"),
        ([1, 2], "holds a list"),
    ],
)
def test_a_pickle_that_is_not_a_batch_is_refused(batch, words, tmp_path, monkeypatch):
    shrink(monkeypatch, "cifar10")
    folder = folder_of("cifar10", False, tmp_path)
    (folder / "test_batch").write_bytes(pickle.dumps(batch, protocol=2))
    with pytest.raises(DataError, match=words):
        load_data("cifar10", root=tmp_path)


def test_a_binary_file_of_the_wrong_length_or_label_is_refused(tmp_path, monkeypatch):
    shrink(monkeypatch, "cifar10")
    folder = folder_of("cifar10", True, tmp_path)
    good = (folder / "test_batch.bin").read_bytes()
    for data, words in (
        (good[:-1], "12291 bytes"),
        (good + b"x", "12293 bytes"),
        (b"\x0a" + good[1:], "label 0 is 10"),
    ):
        (folder / "test_batch.bin").write_bytes(data)
        with pytest.raises(DataError, match=words):
            load_data("cifar10", root=tmp_path)


def hostile(tar: tarfile.TarFile, kind: str) -> None:
    name = "cifar-10-batches-bin/test_batch.bin"
    if kind == "link":
        add(tar, name, type=tarfile.SYMTYPE, linkname="/etc/passwd")
    elif kind == "device":
        add(tar, name, type=tarfile.CHRTYPE)
    elif kind == "huge":
        add(tar, name, b"\0" * 20_000)
    else:
        add(tar, "../" + name, b"\0" * 12292)


@pytest.mark.parametrize("kind", ["link", "device", "huge", "outside"])
def test_only_plain_members_of_the_exact_name_and_size_are_read(kind, tmp_path, monkeypatch):
    files = cifar_files("cifar10", True)
    files.pop("test_batch.bin")
    root = tmp_path / "root"
    root.mkdir()
    with tarfile.open(root / "cifar-10-binary.tar.gz", "w:gz") as tar:
        for name, data in files.items():
            add(tar, f"cifar-10-batches-bin/{name}", data)
        hostile(tar, kind)
    shrink(monkeypatch, "cifar10", (root / "cifar-10-binary.tar.gz").read_bytes())
    with pytest.raises(DataError, match="test_batch"):
        load_data("cifar10", root=root)
    assert [p.name for p in tmp_path.rglob("*")] == ["root", "cifar-10-binary.tar.gz"]


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """A server of this folder on the loopback interface."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def test_a_set_is_downloaded_and_verified_once(tmp_path, monkeypatch):
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    archive = cifar_archive("cifar10", True, there)
    shrink(monkeypatch, "cifar10", archive.read_bytes())
    with served(there) as url:
        monkeypatch.setattr(cifar, "BASE_URL", url)
        data = load_data("cifar10", root=here, download=True)
    assert len(data.train) == 20
    assert [p.name for p in here.iterdir()] == ["cifar-10-binary.tar.gz"]
    assert len(load_data("cifar10", root=here, download=True).test) == 4


@pytest.mark.parametrize("damage", ["altered", "longer", "shorter"])
def test_a_wrong_download_is_refused_unread_and_saved_as_bad(damage, tmp_path, monkeypatch):
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    archive = cifar_archive("cifar10", True, there)
    data = archive.read_bytes()
    shrink(monkeypatch, "cifar10", data)
    wrong = {"altered": b"x" + data[1:], "longer": data + b"x" * (3 << 20), "shorter": data[:-1]}[damage]
    archive.write_bytes(wrong)
    monkeypatch.setattr(tarfile, "open", lambda *_, **__: pytest.fail("parsed"))
    with served(there) as url:
        monkeypatch.setattr(cifar, "BASE_URL", url)
        with pytest.raises(DataError, match=r"sha256.*cifar-10-binary\.tar\.gz\.bad"):
            load_data("cifar10", root=here, download=True)
    assert [p.name for p in here.iterdir()] == ["cifar-10-binary.tar.gz.bad"]
    assert (here / "cifar-10-binary.tar.gz.bad").stat().st_size <= len(data) + (1 << 20)


def test_a_failed_download_leaves_nothing_behind(tmp_path):
    with served(tmp_path) as url, pytest.raises(DataError, match=r"cannot download .*absent.*404"):
        download_file(url + "absent", tmp_path / "root" / "file", 1, "0" * 64)
    assert list((tmp_path / "root").iterdir()) == []


def test_a_link_at_the_target_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "file").write_bytes(b"data")
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    root = tmp_path / "root"
    root.mkdir()
    (root / "file").symlink_to(victim)
    with served(tmp_path) as url:
        download_file(url + "file", root / "file", 4, hashlib.sha256(b"data").hexdigest())
    assert victim.read_bytes() == b"precious"
    assert (root / "file").read_bytes() == b"data"
