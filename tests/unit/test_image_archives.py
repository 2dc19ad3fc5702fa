import gzip
import tarfile
import zipfile
from pathlib import Path

import pytest

from deat.data import image_archives
from deat.errors import DataError
from helpers.data_sets import WRITERS, add, load, tree, write_tar, write_zip


def hostile_tar(path: Path, name: str, data: bytes = b"", **fields: object) -> Path:
    write_tar(path, tree())
    with tarfile.open(path, "a") as tar:
        add(tar, name, data, **fields)
    return path


@pytest.mark.promise("P43")
@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("../train/cat/x.png", {}, "points outside"),
        ("train/../../x.png", {}, "points outside"),
        ("/train/cat/x.png", {}, "points outside"),
        ("..\\train\\cat\\x.png", {}, "points outside"),
        ("train/cat/x.png", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}, "link"),
        ("train/cat/x.png", {"type": tarfile.LNKTYPE, "linkname": "train/cat/0.png"}, "link"),
        ("train/cat/x.png", {"type": tarfile.CHRTYPE}, "device"),
        ("train/cat/x.png", {"type": tarfile.FIFOTYPE}, "device"),
        ("train/cat/0.png", {}, "twice"),
    ],
)
def test_a_hostile_tar_is_refused_and_nothing_is_written(name, fields, words, tmp_path):
    path = hostile_tar(tmp_path / "set.tar", name, **fields)
    with pytest.raises(DataError, match=words):
        load(path, tmp_path / "root")
    assert [p.name for p in tmp_path.iterdir()] == ["set.tar"]


def test_a_hostile_compressed_tar_leaves_no_cache(tmp_path):
    path = tmp_path / "set.tar.gz"
    path.write_bytes(gzip.compress(hostile_tar(tmp_path / "set.tar", "../x.png").read_bytes()))
    with pytest.raises(DataError, match="points outside"):
        load(path, tmp_path / "root")
    assert list((tmp_path / "root" / "decoded").iterdir()) == []


@pytest.mark.promise("P43")
def test_a_hostile_zip_is_refused(tmp_path):
    link = zipfile.ZipInfo("train/cat/link.png")
    link.external_attr = 0o120777 << 16
    for name, data, words in (("../x.png", b"x", "points outside"), (link, b"/etc/passwd", "link")):
        path = write_zip(tmp_path / "set.zip", tree())
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(name, data)
        with pytest.raises(DataError, match=words):
            load(path, tmp_path / "root")


def bomb(path: Path, member: str, size: int) -> Path:
    """A small compressed tar with one member of many zeros."""
    info = tarfile.TarInfo(member)
    info.size = size
    with gzip.open(path, "wb", compresslevel=1) as out:
        out.write(info.tobuf())
        for _ in range(size >> 20):
            out.write(bytes(1 << 20))
    return path


@pytest.mark.promise("P44")
@pytest.mark.parametrize("member", ["train/cat/0.png", "notes.txt"])
def test_a_huge_member_is_stopped_at_its_header(member, tmp_path):
    path = bomb(tmp_path / "set.tar.gz", member, 128 << 20)
    with pytest.raises(DataError, match=rf"{member}.*at most 67,108,864"):
        load(path, tmp_path / "root")


@pytest.mark.promise("P44")
def test_many_members_that_unpack_too_far_are_stopped_at_the_cap(tmp_path, monkeypatch):
    monkeypatch.setattr(image_archives, "_EXPANSION_ALLOWANCE_BYTES", 1 << 20)
    path = write_tar(tmp_path / "set.tar.gz", {f"train/cat/{i}.bin": bytes(1 << 20) for i in range(20)}, "w:gz")
    with pytest.raises(DataError, match="unpacks to more than"):
        load(path, tmp_path / "root")


def test_a_huge_header_record_is_stopped_at_the_cap(tmp_path, monkeypatch):
    monkeypatch.setattr(image_archives, "_EXPANSION_ALLOWANCE_BYTES", 1 << 20)
    info = tarfile.TarInfo("pax")
    info.type, info.size = tarfile.XHDTYPE, 4 << 30
    path = tmp_path / "set.tar.gz"
    path.write_bytes(gzip.compress(info.tobuf() + bytes(1 << 20)))
    with pytest.raises(DataError, match="unpacks to more than"):
        load(path, tmp_path / "root")


@pytest.mark.promise("P41")
@pytest.mark.parametrize("kind", ["set.tar", "set.tar.gz", "set.tar.xz", "set.zip"])
def test_a_truncated_archive_is_refused(kind, tmp_path):
    path = WRITERS[kind](tmp_path / kind, tree(20))
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    with pytest.raises(DataError, match=r"get (it|the archive) again"):
        load(path, tmp_path / "root")


@pytest.mark.parametrize("kind", ["set.tar", "set.tar.gz", "set.tar.xz", "set.zip"])
def test_a_changed_byte_in_an_archive_is_refused(kind, tmp_path):
    path = WRITERS[kind](tmp_path / kind, tree(20))
    data = bytearray(path.read_bytes())
    data[len(data) // 2 // 512 * 512 + 3] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(DataError):
        load(path, tmp_path / "root")
