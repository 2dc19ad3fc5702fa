"""Archives of image files, listed and read without extracting anything."""

import bz2
import gzip
import io
import lzma
import os
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Protocol

from deat.data.decode import IMAGE_SUFFIXES
from deat.errors import DataError

MAX_FILE_BYTES = 64 << 20


class FileCollection(Protocol):
    """Named files that can be read by number, in any order, from any process."""

    @property
    def names(self) -> tuple[str, ...]:
        """The files' names, relative to the set."""

    def size(self, index: int) -> int:
        """How many bytes a file has."""

    def read(self, index: int) -> bytes:
        """One file's content."""


@dataclass(frozen=True, eq=False)
class FolderFiles:
    """Files in a folder."""

    root: Path
    names: tuple[str, ...]

    def size(self, index: int) -> int:
        """How many bytes a file has; none where it is gone."""
        try:
            return (self.root / self.names[index]).stat().st_size
        except OSError:
            return 0

    def read(self, index: int) -> bytes:
        """One file's content."""
        path = self.root / self.names[index]
        try:
            with path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise DataError(f"cannot read {self.names[index]!r} ({error.strerror}).") from None
        check_file_size(self.names[index], len(data))
        return data


@dataclass(frozen=True, eq=False)
class PackedFiles:
    """Files that are stretches of one uncompressed file, or of bytes in memory."""

    source: Path | bytes
    names: tuple[str, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    folders: tuple[str, ...] = ()
    """All folders of the archive, with images or without."""

    def size(self, index: int) -> int:
        """How many bytes a file has."""
        return self.sizes[index]

    def read(self, index: int) -> bytes:
        """One file's content."""
        return read_range(self.source, self.offsets[index], self.sizes[index], self.names[index])


@dataclass(frozen=True)
class ZipEntry:
    """Where a member of a zip lies and how it is stored."""

    header_offset: int
    compressed_size: int
    size: int
    crc: int
    is_deflated: bool


@dataclass(frozen=True, eq=False)
class ZipFiles:
    """Files in a zip archive, stored or deflated."""

    source: Path
    names: tuple[str, ...]
    entries: tuple[ZipEntry, ...]
    folders: tuple[str, ...] = ()
    """All folders of the archive, with images or without."""

    def size(self, index: int) -> int:
        """How many bytes a file has."""
        return self.entries[index].size

    def read(self, index: int) -> bytes:
        """One file's content, its checksum verified."""
        entry, name = self.entries[index], self.names[index]
        header = read_range(self.source, entry.header_offset, 30, name)
        skip = 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        data = read_range(self.source, entry.header_offset + skip, entry.compressed_size, name)
        if entry.is_deflated:
            data = _inflate(data, entry.size, name)
        if len(data) != entry.size or zlib.crc32(data) != entry.crc:
            raise DataError(f"{name!r} in {self.source.name!r} is damaged; get the archive again.")
        return data


def check_file_size(name: str, size: int) -> None:
    """Refuses a file too large to be an image of a data set."""
    if size > MAX_FILE_BYTES:
        raise DataError(f"{name!r} holds {size:,} bytes or more; at most {MAX_FILE_BYTES:,} are read. Remove the file.")


def read_range(source: Path | bytes, offset: int, size: int, name: str) -> bytes:
    """A stretch of a file or of bytes, complete or a DataError."""
    check_file_size(name, size)
    stop = offset + size
    data = source[offset:stop] if isinstance(source, bytes) else _pread(source, offset, size, name)
    if len(data) != size:
        raise DataError(f"{name!r} is cut short: {len(data)} of {size} bytes; get the archive again.")
    return data


def _pread(path: Path, offset: int, size: int, name: str) -> bytes:
    try:
        with path.open("rb", buffering=0) as file:
            return os.pread(file.fileno(), size, offset)
    except OSError as error:
        raise DataError(f"cannot read {name!r} from {path.name!r} ({error.strerror}).") from None


def _inflate(data: bytes, size: int, name: str) -> bytes:
    try:
        return zlib.decompressobj(-15).decompress(data, size + 1)
    except zlib.error as error:
        raise DataError(f"{name!r} is damaged ({error}); get the archive again.") from None


class ByteStream(Protocol):
    """What is needed of a decompressed stream."""

    def read(self, size: int = -1, /) -> bytes:
        """The next bytes."""

    def seek(self, offset: int, /) -> int:
        """Moves to a position."""

    def tell(self) -> int:
        """The position."""

    def close(self) -> None:
        """Gives up the file."""


_DECOMPRESSORS: dict[str, Callable[[Path], ByteStream]] = {
    ".tar.gz": gzip.open,
    ".tgz": gzip.open,
    ".tar.xz": lzma.open,
    ".txz": lzma.open,
    ".tar.bz2": bz2.open,
}
ARCHIVE_SUFFIXES = (".tar", ".tar.gz", ".tar.xz", ".tar.bz2", ".zip")

# Photographs hardly compress; an archive that grows far more than this is an attack, not a data set.
_MAX_EXPANSION_RATIO = 200
_EXPANSION_ALLOWANCE_BYTES = 64 << 20

_ARCHIVE_ERRORS = (tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, zlib.error, EOFError, OSError, ValueError)


class CappedStream(io.RawIOBase):
    """A forward-only view of a decompressed stream that stops at a cap."""

    def __init__(self, stream: ByteStream, max_bytes: int, name: str) -> None:
        self._stream, self._max_bytes, self._name = stream, max_bytes, name

    def read(self, size: int = -1) -> bytes:
        """The next bytes, or a DataError beyond the cap."""
        self._check(size)
        data = self._stream.read(size)
        self._check(0)
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Moves ahead by reading, as far as the cap."""
        if whence != io.SEEK_SET or offset > self._max_bytes:
            self._raise_too_large()
        return self._stream.seek(offset)

    def tell(self) -> int:
        """Bytes given out so far."""
        return self._stream.tell()

    def _check(self, num_bytes: int) -> None:
        if num_bytes < 0 or self._stream.tell() + num_bytes > self._max_bytes:
            self._raise_too_large()

    def _raise_too_large(self) -> None:
        raise DataError(
            f"{self._name!r} unpacks to more than {self._max_bytes:,} bytes, as no set of images does; remove it."
        )


def is_compressed_tar(path: Path) -> bool:
    """Whether the archive is a compressed tar, which can only be read from front to back."""
    return path.name.lower().endswith(tuple(_DECOMPRESSORS))


def normalize_image_name(name: str) -> str | None:
    """A member's name in plain form, None if it is no image, a DataError if it points outside."""
    path = PurePosixPath(name.replace("\\", "/"))
    if not path.name.lower().endswith(IMAGE_SUFFIXES):
        return None
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise DataError(f"the archive holds {name!r}, which points outside it; do not use this archive.")
    return None if is_hidden(str(path)) else str(path)


def is_hidden(path: str) -> bool:
    """Whether a file or folder, or one that it lies in, is not meant to be seen."""
    return any(part.startswith(".") or part == "__MACOSX" for part in path.split("/"))


def list_archive(path: Path) -> PackedFiles | ZipFiles:
    """The images of an uncompressed tar or a zip."""
    with wrap_archive_errors(path):
        return _list_zip(path) if zipfile.is_zipfile(path) else _list_tar(path)


def pack_tar_images(
    path: Path, out: BinaryIO
) -> tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...], tuple[str, ...]]:
    """Writes the images of a compressed tar one after another; returns names, offsets and sizes, and all folders."""
    found: dict[str, tuple[int, int]] = {}
    folders: set[str] = set()
    opener = next(o for suffix, o in _DECOMPRESSORS.items() if path.name.lower().endswith(suffix))
    with wrap_archive_errors(path), closing(opener(path)) as stream:
        capped = CappedStream(stream, _max_unpacked_bytes(path), path.name)
        with tarfile.open(fileobj=capped, mode="r:") as tar:
            for name, member in _iter_tar_images(tar, folders):
                content = tar.extractfile(member)
                assert content is not None
                found[name] = (out.tell(), out.write(content.read()))
        # To the end, so that the compressed stream's own checksum is verified.
        while capped.read(1 << 20):
            pass
    names = tuple(sorted(found))
    return names, tuple(found[n][0] for n in names), tuple(found[n][1] for n in names), tuple(sorted(folders))


def _list_tar(path: Path) -> PackedFiles:
    folders: set[str] = set()
    with tarfile.open(path, mode="r:") as tar:
        found = {name: (member.offset_data, member.size) for name, member in _iter_tar_images(tar, folders)}
        end = tar.offset
    with path.open("rb") as file:
        file.seek(end)
        # Every tar ends in blocks of zeros; anything else is a damaged header or a cut.
        if file.read(512) != bytes(512):
            raise DataError(f"{path.name!r} is damaged at byte {end}; get the archive again.")
    names = tuple(sorted(found))
    offsets, sizes = (tuple(found[n][i] for n in names) for i in (0, 1))
    return PackedFiles(path, names, offsets, sizes, tuple(sorted(folders)))


def _iter_tar_images(tar: tarfile.TarFile, folders: set[str]) -> Iterator[tuple[str, tarfile.TarInfo]]:
    """The images of a tar; all folders are added to those given."""
    seen: set[str] = set()
    for member in tar:
        folders |= _enclosing_folders(member.name, member.isdir())
        name = normalize_image_name(member.name)
        if member.isreg():
            check_file_size(member.name, member.size)
        if name is None or member.isdir():
            continue
        if not member.isreg() or member.issparse():
            raise DataError(f"{member.name!r} in the archive is a link or a device; only plain files are read.")
        _check_unique(name, seen)
        yield name, member


def _list_zip(path: Path) -> ZipFiles:
    folders: set[str] = set()
    with zipfile.ZipFile(path) as archive:
        found = dict(_iter_zip_images(archive.infolist(), folders))
    total = sum(entry.size for entry in found.values())
    if total > _max_unpacked_bytes(path):
        raise DataError(
            f"{path.name!r} unpacks to {total:,} bytes; at most {_max_unpacked_bytes(path):,} are read from it."
        )
    names = tuple(sorted(found))
    return ZipFiles(path, names, tuple(found[name] for name in names), tuple(sorted(folders)))


def _iter_zip_images(members: Iterable[zipfile.ZipInfo], folders: set[str]) -> Iterator[tuple[str, ZipEntry]]:
    """The images of a zip; all folders are added to those given."""
    seen: set[str] = set()
    for info in members:
        folders |= _enclosing_folders(info.filename, info.is_dir())
        name = None if info.is_dir() else normalize_image_name(info.filename)
        if name is None:
            continue
        if stat.S_ISLNK(info.external_attr >> 16):
            raise DataError(f"{info.filename!r} in the archive is a link; only plain files are read.")
        if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise DataError(f"{info.filename!r} is encrypted or packed in a way that is not read; zip it again.")
        check_file_size(info.filename, info.file_size)
        _check_unique(name, seen)
        deflated = info.compress_type == zipfile.ZIP_DEFLATED
        yield name, ZipEntry(info.header_offset, info.compress_size, info.file_size, info.CRC, deflated)


def _enclosing_folders(name: str, is_folder: bool) -> set[str]:
    """The folders that a member lies in, and itself where it is one."""
    path = PurePosixPath(name.replace("\\", "/"))
    return {str(folder) for folder in (path, *path.parents)[0 if is_folder else 1 :]} - {".", "/"}


def _check_unique(name: str, seen: set[str]) -> None:
    if name in seen:
        raise DataError(f"the archive holds {name!r} twice; make it anew with each image once.")
    seen.add(name)


def _max_unpacked_bytes(path: Path) -> int:
    return _EXPANSION_ALLOWANCE_BYTES + _MAX_EXPANSION_RATIO * path.stat().st_size


@contextmanager
def wrap_archive_errors(path: Path) -> Iterator[None]:
    """Turns what a damaged archive raises into a DataError."""
    try:
        yield
    except DataError:
        raise
    except _ARCHIVE_ERRORS as error:
        raise DataError(f"cannot read the archive {path.name!r} ({error}); get it again.") from None
