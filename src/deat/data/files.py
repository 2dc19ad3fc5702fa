"""Image files wherever they lie: in a folder, in a tar, in a zip, or packed one after another.

Nothing keeps a file open, so every object here can be copied into worker processes.
"""

import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from deat.errors import DataError

MAX_FILE = 64 << 20


class Files(Protocol):
    """Named files that can be read by number, in any order, from any process."""

    @property
    def names(self) -> tuple[str, ...]:
        """The files' names, relative to the set."""

    def size(self, index: int) -> int:
        """How many bytes a file has."""

    def read(self, index: int) -> bytes:
        """One file's content."""


@dataclass(frozen=True, eq=False)
class Loose:
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
                data = file.read(MAX_FILE + 1)
        except OSError as error:
            raise DataError(f"cannot read {self.names[index]!r} ({error.strerror}).") from None
        check_size(self.names[index], len(data))
        return data


@dataclass(frozen=True, eq=False)
class Slices:
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
        return cut(self.source, self.offsets[index], self.sizes[index], self.names[index])


@dataclass(frozen=True)
class ZipEntry:
    """Where a member of a zip lies and how it is stored."""

    header: int
    packed: int
    size: int
    crc: int
    deflated: bool


@dataclass(frozen=True, eq=False)
class Zipped:
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
        header = cut(self.source, entry.header, 30, name)
        skip = 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        data = cut(self.source, entry.header + skip, entry.packed, name)
        if entry.deflated:
            data = _inflate(data, entry.size, name)
        if len(data) != entry.size or zlib.crc32(data) != entry.crc:
            raise DataError(f"{name!r} in {self.source.name!r} is damaged; get the archive again.")
        return data


def check_size(name: str, size: int) -> None:
    """Refuses a file too large to be an image of a data set."""
    if size > MAX_FILE:
        raise DataError(f"{name!r} holds {size:,} bytes or more; at most {MAX_FILE:,} are read. Remove the file.")


def cut(source: Path | bytes, offset: int, size: int, name: str) -> bytes:
    """A stretch of a file or of bytes, complete or a DataError."""
    check_size(name, size)
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
