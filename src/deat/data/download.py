"""Download and verification of files whose size and hash are known."""

import hashlib
import http.client
import os
import tempfile
import urllib.error
import urllib.request
from io import BufferedReader
from pathlib import Path
from time import monotonic
from typing import BinaryIO

from deat.errors import DataError

_TIMEOUT_SECONDS = 60.0
"""How long a download may stand still."""
_MIN_BYTES_PER_SECOND = 10_000
"""A download that is slower on average ends: that of 170 MB takes at most five hours."""
_CHUNK_BYTES = 1 << 20


def download_file(url: str, target: Path, size: int, sha256: str) -> None:
    """Download a file and verify it; only a complete and correct file gets the name `target`.

    Args:
        url: Where to download from.
        target: Where to save the file. Links at this path are replaced, not followed.
        size: The expected size in bytes.
        sha256: The expected SHA-256 hash.

    Raises:
        DataError: If the download fails, the folder cannot be written, or the content is another, which is then saved
            as `target` with the suffix .bad.
    """
    handle, part = _create_part_file(target)
    try:
        with os.fdopen(handle, "wb") as out:
            actual = _download_to(url, out, size)
        if actual != (size, sha256):
            bad = target.with_name(target.name + ".bad")
            os.replace(part, bad)
            raise DataError(
                f"{url} gave {actual[0]} bytes, sha256 {actual[1]}; expected {size} bytes, sha256 {sha256}."
                f" Nothing was read from it; it is saved as {bad.name!r}. Try again, or get the file elsewhere."
            )
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def _create_part_file(target: Path) -> tuple[int, Path]:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    except OSError as error:
        raise DataError(
            f"cannot write to {str(target.parent)!r} ({error.strerror}). Set DEAT_DATA to a folder with free space."
        ) from None
    return handle, Path(name)


def _download_to(url: str, out: BinaryIO, size: int) -> tuple[int, str]:
    """Write the content, at most one chunk more than `size`; return its size and hash."""
    digest, count = hashlib.sha256(), 0
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as response:
            started = monotonic()
            while count <= size and (chunk := response.read1(_CHUNK_BYTES)):  # read would wait for the whole chunk
                digest.update(chunk)
                count += out.write(chunk)
                seconds = monotonic() - started
                if seconds > _TIMEOUT_SECONDS and count < seconds * _MIN_BYTES_PER_SECOND:
                    raise TimeoutError(f"only {count:,} of {size:,} bytes came in {seconds:.0f} s")
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        raise DataError(f"cannot download {url} ({error}). Check the network, or put the file there.") from None
    return count, digest.hexdigest()


def verify_file(file: BufferedReader, name: str, size: int, sha256: str) -> None:
    """Verify the size and hash of an open file, and rewind it.

    Args:
        file: The file, at its beginning.
        name: The file's name, for the message.
        size: The expected size in bytes.
        sha256: The expected SHA-256 hash.

    Raises:
        DataError: If the file is another.
    """
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    count = file.tell()
    if (count, digest) != (size, sha256):
        raise DataError(
            f"{name!r} has {count} bytes, sha256 {digest}; the official file has {size} bytes, {sha256}."
            " Nothing was read from it. Remove it and get it again."
        )
    file.seek(0)
