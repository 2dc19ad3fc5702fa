"""Archives of image files, listed and read without extracting anything."""

import bz2
import gzip
import io
import lzma
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Protocol

from deat.data.decode import SUFFIXES
from deat.data.files import Slices, ZipEntry, Zipped, check_size
from deat.errors import DataError


class Readable(Protocol):
    """What is needed of a decompressed stream."""

    def read(self, size: int = -1, /) -> bytes:
        """The next bytes."""

    def seek(self, offset: int, /) -> int:
        """Moves to a position."""

    def tell(self) -> int:
        """The position."""

    def close(self) -> None:
        """Gives up the file."""


_OPENERS: dict[str, Callable[[Path], Readable]] = {
    ".tar.gz": gzip.open,
    ".tgz": gzip.open,
    ".tar.xz": lzma.open,
    ".txz": lzma.open,
    ".tar.bz2": bz2.open,
}
ACCEPTED = (".tar", ".tar.gz", ".tar.xz", ".tar.bz2", ".zip")

# Photographs hardly compress; an archive that grows far more than this is an attack, not a data set.
_RATIO = 200
_ALLOWANCE = 64 << 20

_BROKEN = (tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, zlib.error, EOFError, OSError, ValueError)


class Capped(io.RawIOBase):
    """A forward-only view of a decompressed stream that stops at a cap."""

    def __init__(self, stream: Readable, cap: int, name: str) -> None:
        self._stream, self._cap, self._name = stream, cap, name

    def read(self, size: int = -1) -> bytes:
        """The next bytes, or a DataError beyond the cap."""
        self._check(size)
        data = self._stream.read(size)
        self._check(0)
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Moves ahead by reading, as far as the cap."""
        if whence != io.SEEK_SET or offset > self._cap:
            self._refuse()
        return self._stream.seek(offset)

    def tell(self) -> int:
        """Bytes given out so far."""
        return self._stream.tell()

    def _check(self, wanted: int) -> None:
        if wanted < 0 or self._stream.tell() + wanted > self._cap:
            self._refuse()

    def _refuse(self) -> None:
        raise DataError(
            f"{self._name!r} unpacks to more than {self._cap:,} bytes, as no set of images does; remove it."
        )


def is_compressed(path: Path) -> bool:
    """Whether the archive is a compressed tar, which can only be read from front to back."""
    return path.name.lower().endswith(tuple(_OPENERS))


def image_name(name: str) -> str | None:
    """A member's name in plain form, None if it is no image, a DataError if it points outside."""
    path = PurePosixPath(name.replace("\\", "/"))
    if not path.name.lower().endswith(SUFFIXES):
        return None
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise DataError(f"the archive holds {name!r}, which points outside it; do not use this archive.")
    return None if is_hidden(str(path)) else str(path)


def is_hidden(path: str) -> bool:
    """Whether a file or folder, or one that it lies in, is not meant to be seen."""
    return any(part.startswith(".") or part == "__MACOSX" for part in path.split("/"))


def list_archive(path: Path) -> Slices | Zipped:
    """The images of an uncompressed tar or a zip."""
    with explained(path):
        return _list_zip(path) if zipfile.is_zipfile(path) else _list_tar(path)


def pack(path: Path, out: BinaryIO) -> tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...], tuple[str, ...]]:
    """Writes the images of a compressed tar one after another; returns names, offsets and sizes, and all folders."""
    found: dict[str, tuple[int, int]] = {}
    folders: set[str] = set()
    opener = next(o for suffix, o in _OPENERS.items() if path.name.lower().endswith(suffix))
    with explained(path), closing(opener(path)) as stream:
        capped = Capped(stream, _cap(path), path.name)
        with tarfile.open(fileobj=capped, mode="r:") as tar:
            for name, member in _tar_images(tar, folders):
                content = tar.extractfile(member)
                assert content is not None
                found[name] = (out.tell(), out.write(content.read()))
        # To the end, so that the compressed stream's own checksum is verified.
        while capped.read(1 << 20):
            pass
    names = tuple(sorted(found))
    return names, tuple(found[n][0] for n in names), tuple(found[n][1] for n in names), tuple(sorted(folders))


def _list_tar(path: Path) -> Slices:
    folders: set[str] = set()
    with tarfile.open(path, mode="r:") as tar:
        found = {name: (member.offset_data, member.size) for name, member in _tar_images(tar, folders)}
        end = tar.offset
    with path.open("rb") as file:
        file.seek(end)
        # Every tar ends in blocks of zeros; anything else is a damaged header or a cut.
        if file.read(512) != bytes(512):
            raise DataError(f"{path.name!r} is damaged at byte {end}; get the archive again.")
    names = tuple(sorted(found))
    offsets, sizes = (tuple(found[n][i] for n in names) for i in (0, 1))
    return Slices(path, names, offsets, sizes, tuple(sorted(folders)))


def _tar_images(tar: tarfile.TarFile, folders: set[str]) -> Iterator[tuple[str, tarfile.TarInfo]]:
    """The images of a tar; all folders are added to those given."""
    seen: set[str] = set()
    for member in tar:
        folders |= _folders(member.name, member.isdir())
        name = image_name(member.name)
        if member.isreg():
            check_size(member.name, member.size)
        if name is None or member.isdir():
            continue
        if not member.isreg() or member.issparse():
            raise DataError(f"{member.name!r} in the archive is a link or a device; only plain files are read.")
        _check_new(name, seen)
        yield name, member


def _list_zip(path: Path) -> Zipped:
    folders: set[str] = set()
    with zipfile.ZipFile(path) as archive:
        found = dict(_zip_images(archive.infolist(), folders))
    total = sum(entry.size for entry in found.values())
    if total > _cap(path):
        raise DataError(f"{path.name!r} unpacks to {total:,} bytes; at most {_cap(path):,} are read from it.")
    names = tuple(sorted(found))
    return Zipped(path, names, tuple(found[name] for name in names), tuple(sorted(folders)))


def _zip_images(members: Iterable[zipfile.ZipInfo], folders: set[str]) -> Iterator[tuple[str, ZipEntry]]:
    """The images of a zip; all folders are added to those given."""
    seen: set[str] = set()
    for info in members:
        folders |= _folders(info.filename, info.is_dir())
        name = None if info.is_dir() else image_name(info.filename)
        if name is None:
            continue
        if stat.S_ISLNK(info.external_attr >> 16):
            raise DataError(f"{info.filename!r} in the archive is a link; only plain files are read.")
        if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise DataError(f"{info.filename!r} is encrypted or packed in a way that is not read; zip it again.")
        check_size(info.filename, info.file_size)
        _check_new(name, seen)
        deflated = info.compress_type == zipfile.ZIP_DEFLATED
        yield name, ZipEntry(info.header_offset, info.compress_size, info.file_size, info.CRC, deflated)


def _folders(name: str, is_folder: bool) -> set[str]:
    """The folders that a member lies in, and itself where it is one."""
    path = PurePosixPath(name.replace("\\", "/"))
    return {str(folder) for folder in (path, *path.parents)[0 if is_folder else 1 :]} - {".", "/"}


def _check_new(name: str, seen: set[str]) -> None:
    if name in seen:
        raise DataError(f"the archive holds {name!r} twice; make it anew with each image once.")
    seen.add(name)


def _cap(path: Path) -> int:
    return _ALLOWANCE + _RATIO * path.stat().st_size


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turns what a damaged archive raises into a DataError."""
    try:
        yield
    except DataError:
        raise
    except _BROKEN as error:
        raise DataError(f"cannot read the archive {path.name!r} ({error}); get it again.") from None
