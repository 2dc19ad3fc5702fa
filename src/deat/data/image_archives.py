"""Image files in a folder, a tar or a zip archive, read from where they are.

The files of a compressed tar cannot be read in any order, so its images are unpacked into the cache first.
"""

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
from typing import BinaryIO, NamedTuple, Protocol

from deat.data.image_decoding import IMAGE_SUFFIXES
from deat.errors import DataError

MAX_FILE_BYTES = 64 << 20


class FileCollection(Protocol):
    """Named files that any process can read by index, in any order."""

    @property
    def names(self) -> tuple[str, ...]:
        """The paths of the files, relative to the collection."""

    def size(self, index: int) -> int:
        """Return the size of a file in bytes."""

    def read(self, index: int) -> bytes:
        """Return the content of a file.

        Raises:
            DataError: If the file is missing, damaged or larger than `MAX_FILE_BYTES`.
        """


@dataclass(frozen=True, eq=False)
class FolderFiles:
    """Files in a folder.

    Args:
        root: The folder.
        names: Paths of the files, relative to `root`.
    """

    root: Path
    names: tuple[str, ...]

    def size(self, index: int) -> int:
        """Return the size of a file in bytes, 0 if it does not exist."""
        try:
            return (self.root / self.names[index]).stat().st_size
        except OSError:
            return 0

    def read(self, index: int) -> bytes:
        """Return the content of a file."""
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
    """Files that are byte ranges of one uncompressed file or of bytes in memory.

    Args:
        source: The file, or its content.
        names: Paths of the files.
        offsets: First byte of each file in `source`.
        sizes: Size of each file in bytes.
        folders: All folders of the archive, with or without images.
    """

    source: Path | bytes
    names: tuple[str, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    folders: tuple[str, ...] = ()

    def size(self, index: int) -> int:
        """Return the size of a file in bytes."""
        return self.sizes[index]

    def read(self, index: int) -> bytes:
        """Return the content of a file."""
        return _read_range(self.source, self.offsets[index], self.sizes[index], self.names[index])


@dataclass(frozen=True)
class ZipEntry:
    """Position, sizes, checksum and compression of one file in a zip archive."""

    header_offset: int
    compressed_size: int
    size: int
    crc: int
    is_deflated: bool


@dataclass(frozen=True, eq=False)
class ZipFiles:
    """Files in a zip archive, stored or deflated.

    Args:
        source: The archive.
        names: Paths of the files.
        entries: Where each file is in the archive.
        folders: All folders of the archive, with or without images.
    """

    source: Path
    names: tuple[str, ...]
    entries: tuple[ZipEntry, ...]
    folders: tuple[str, ...] = ()

    def size(self, index: int) -> int:
        """Return the uncompressed size of a file in bytes."""
        return self.entries[index].size

    def read(self, index: int) -> bytes:
        """Return the content of a file after verifying its checksum."""
        entry, name = self.entries[index], self.names[index]
        header = _read_range(self.source, entry.header_offset, 30, name)
        header_size = 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        data = _read_range(self.source, entry.header_offset + header_size, entry.compressed_size, name)
        if entry.is_deflated:
            data = _inflate(data, entry.size, name)
        if len(data) != entry.size or zlib.crc32(data) != entry.crc:
            raise DataError(f"{name!r} in {self.source.name!r} is damaged; get the archive again.")
        return data


def check_file_size(name: str, size: int) -> None:
    """Raise DataError for a file of more than `MAX_FILE_BYTES` bytes, which is too large for an image."""
    if size > MAX_FILE_BYTES:
        raise DataError(f"{name!r} has {size:,} bytes or more; at most {MAX_FILE_BYTES:,} are read. Remove the file.")


def _read_range(source: Path | bytes, offset: int, size: int, name: str) -> bytes:
    check_file_size(name, size)
    data = source[offset : offset + size] if isinstance(source, bytes) else _pread(source, offset, size, name)
    if len(data) != size:
        raise DataError(f"{name!r} is truncated: {len(data)} of {size} bytes; get the archive again.")
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


_DECOMPRESSORS: dict[str, Callable[[Path], io.BufferedIOBase]] = {
    ".tar.gz": gzip.open,
    ".tgz": gzip.open,
    ".tar.xz": lzma.open,
    ".txz": lzma.open,
    ".tar.bz2": bz2.open,
}
ARCHIVE_SUFFIXES = (".tar", ".tar.gz", ".tar.xz", ".tar.bz2", ".zip")
ALL_ARCHIVE_SUFFIXES = (*ARCHIVE_SUFFIXES, ".tgz", ".txz")
"""Also the short forms, which messages do not list."""

# Photographs hardly compress: an archive that expands far more than this is an attack, not a data set.
_MAX_EXPANSION_RATIO = 200
_EXPANSION_ALLOWANCE_BYTES = 64 << 20

_ARCHIVE_ERRORS = (tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, zlib.error, EOFError, OSError, ValueError)


class CappedStream(io.RawIOBase):
    """A forward-only view of a decompressed stream that raises DataError after a number of bytes.

    Args:
        stream: The decompressed stream.
        max_bytes: How many bytes may be read from it.
        name: The archive's name, for the message.
    """

    def __init__(self, stream: io.BufferedIOBase, max_bytes: int, name: str) -> None:
        self._stream, self._max_bytes, self._name = stream, max_bytes, name

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes."""
        self._check_limit(size)
        data = self._stream.read(size)
        self._check_limit(0)
        return data

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position, by reading up to it."""
        if whence != io.SEEK_SET or offset > self._max_bytes:
            self._raise_too_large()
        return self._stream.seek(offset)

    def tell(self) -> int:
        """Return the current position."""
        return self._stream.tell()

    def _check_limit(self, num_bytes: int) -> None:
        if num_bytes < 0 or self._stream.tell() + num_bytes > self._max_bytes:
            self._raise_too_large()

    def _raise_too_large(self) -> None:
        raise DataError(
            f"{self._name!r} unpacks to more than {self._max_bytes:,} bytes, which no set of images does. Remove it."
        )


def is_compressed_tar(path: Path) -> bool:
    """Return whether an archive is a compressed tar, which can only be read from front to back."""
    return path.name.lower().endswith(tuple(_DECOMPRESSORS))


def normalize_image_name(name: str) -> str | None:
    """Return the path of an image in an archive in plain form.

    Args:
        name: The path as the archive has it.

    Returns:
        The path with forward slashes, or None if the file is hidden or not an image.

    Raises:
        DataError: If an image's path points outside the archive.
    """
    path = PurePosixPath(name.replace("\\", "/"))
    if not path.name.lower().endswith(IMAGE_SUFFIXES):
        return None
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise DataError(f"the archive contains {name!r}, which points outside it. Do not use this archive.")
    return None if is_hidden(str(path)) else str(path)


def is_hidden(path: str) -> bool:
    """Return whether a file or one of its folders is hidden or was added by macOS."""
    return any(part.startswith(".") or part == "__MACOSX" for part in path.split("/"))


def list_archive(path: Path) -> PackedFiles | ZipFiles:
    """List the images of an uncompressed tar or a zip archive.

    Args:
        path: The archive.

    Returns:
        The images, sorted by name.

    Raises:
        DataError: If the archive is damaged or contains links, devices, duplicates or paths outside it.
    """
    with wrap_archive_errors(path):
        return _list_zip(path) if zipfile.is_zipfile(path) else _list_tar(path)


class PackIndex(NamedTuple):
    """Where images are in a packed file; `PackedFiles` takes these fields after its source."""

    names: tuple[str, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    folders: tuple[str, ...]


def pack_tar_images(path: Path, out: BinaryIO) -> PackIndex:
    """Write the images of a compressed tar one after another, so that they can be read in any order.

    Args:
        path: The archive.
        out: Where to write the images.

    Returns:
        Where each image is in `out`, and all folders of the archive.

    Raises:
        DataError: If the archive is damaged, unpacks to too many bytes, or contains links, devices, duplicates or
            paths outside it.
    """
    ranges: dict[str, tuple[int, int]] = {}
    folders: set[str] = set()
    decompress = next(opener for suffix, opener in _DECOMPRESSORS.items() if path.name.lower().endswith(suffix))
    with wrap_archive_errors(path), closing(decompress(path)) as stream:
        capped = CappedStream(stream, _max_unpacked_bytes(path), path.name)
        with tarfile.open(fileobj=capped, mode="r:") as tar:
            for name, member in _iter_tar_images(tar, folders):
                content = tar.extractfile(member)
                assert content is not None
                ranges[name] = (out.tell(), out.write(content.read()))
        # Read to the end, so that the checksum of the compressed stream is verified.
        while capped.read(1 << 20):
            pass
    return _make_index(ranges, folders)


def _make_index(ranges: dict[str, tuple[int, int]], folders: set[str]) -> PackIndex:
    names = tuple(sorted(ranges))
    offsets, sizes = (tuple(ranges[name][i] for name in names) for i in (0, 1))
    return PackIndex(names, offsets, sizes, tuple(sorted(folders)))


def _list_tar(path: Path) -> PackedFiles:
    folders: set[str] = set()
    with tarfile.open(path, mode="r:") as tar:
        ranges = {name: (member.offset_data, member.size) for name, member in _iter_tar_images(tar, folders)}
        end = tar.offset
    with path.open("rb") as file:
        file.seek(end)
        # Every tar ends with blocks of zeros; anything else is a damaged header or a truncated file.
        if file.read(512) != bytes(512):
            raise DataError(f"{path.name!r} is damaged at byte {end}; get the archive again.")
    return PackedFiles(path, *_make_index(ranges, folders))


def _iter_tar_images(tar: tarfile.TarFile, folders: set[str]) -> Iterator[tuple[str, tarfile.TarInfo]]:
    """Iterate over the images of a tar, and add all of its folders to `folders`."""
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
        entries = dict(_iter_zip_images(archive.infolist(), folders))
    total = sum(entry.size for entry in entries.values())
    if total > _max_unpacked_bytes(path):
        raise DataError(
            f"{path.name!r} unpacks to {total:,} bytes; at most {_max_unpacked_bytes(path):,} are read from it."
        )
    names = tuple(sorted(entries))
    return ZipFiles(path, names, tuple(entries[name] for name in names), tuple(sorted(folders)))


def _iter_zip_images(members: Iterable[zipfile.ZipInfo], folders: set[str]) -> Iterator[tuple[str, ZipEntry]]:
    """Iterate over the images of a zip, and add all of its folders to `folders`."""
    seen: set[str] = set()
    for info in members:
        folders |= _enclosing_folders(info.filename, info.is_dir())
        name = None if info.is_dir() else normalize_image_name(info.filename)
        if name is None:
            continue
        if stat.S_ISLNK(info.external_attr >> 16):
            raise DataError(f"{info.filename!r} in the archive is a link; only plain files are read.")
        if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise DataError(
                f"{info.filename!r} is encrypted or compressed by an unsupported method. Create the zip again, stored "
                "or deflated."
            )
        check_file_size(info.filename, info.file_size)
        _check_unique(name, seen)
        is_deflated = info.compress_type == zipfile.ZIP_DEFLATED
        yield name, ZipEntry(info.header_offset, info.compress_size, info.file_size, info.CRC, is_deflated)


def _enclosing_folders(name: str, is_folder: bool) -> set[str]:
    """Return the folders around an archive member, and the member itself if it is a folder."""
    path = PurePosixPath(name.replace("\\", "/"))
    return {str(folder) for folder in (path, *path.parents)[0 if is_folder else 1 :]} - {".", "/"}


def _check_unique(name: str, seen: set[str]) -> None:
    if name in seen:
        raise DataError(f"the archive contains {name!r} twice. Create it again with each image once.")
    seen.add(name)


def _max_unpacked_bytes(path: Path) -> int:
    return _EXPANSION_ALLOWANCE_BYTES + _MAX_EXPANSION_RATIO * path.stat().st_size


@contextmanager
def wrap_archive_errors(path: Path) -> Iterator[None]:
    """Convert the errors that a damaged archive raises into DataError.

    Args:
        path: The archive, for the message.

    Raises:
        DataError: If reading the archive fails inside the context.
    """
    try:
        yield
    except DataError:
        raise
    except _ARCHIVE_ERRORS as error:
        raise DataError(f"cannot read the archive {path.name!r} ({error}); get it again.") from None
