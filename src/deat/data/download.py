"""Files fetched by name, with their size and hash known beforehand."""

import hashlib
import http.client
import os
import tempfile
import urllib.error
import urllib.request
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from deat.errors import DataError

TIMEOUT_SECONDS = 60.0
_CHUNK_BYTES = 1 << 20


def download_file(url: str, target: Path, size: int, sha256: str) -> None:
    """Downloads a file to target, which appears whole and verified; a wrong one is kept as NAME.bad."""
    handle, part = _create_part_file(target)
    try:
        with os.fdopen(handle, "wb") as out:
            count, digest = _download_to(url, out, size)
        if (count, digest) != (size, sha256):
            bad = target.with_name(target.name + ".bad")
            os.replace(part, bad)
            raise DataError(_mismatch_message(url, bad.name, (count, digest), (size, sha256)))
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def _create_part_file(target: Path) -> tuple[int, Path]:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    except OSError as error:
        raise DataError(
            f"cannot write to {str(target.parent)!r} ({error.strerror}); set DEAT_DATA to a folder with room."
        ) from None
    return handle, Path(name)


def _mismatch_message(url: str, saved_as: str, actual: tuple[int, str], expected: tuple[int, str]) -> str:
    return (
        f"{url} gave {actual[0]} bytes, sha256 {actual[1]}; expected {expected[0]} bytes, sha256 {expected[1]}."
        f" Nothing was read from it; it is kept as {saved_as!r}. Try again, or get the file elsewhere."
    )


def _download_to(url: str, out: BinaryIO, size: int) -> tuple[int, str]:
    """Bytes written, at most one chunk more than size, and their hash."""
    digest, count = hashlib.sha256(), 0
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer:
            while count <= size and (chunk := answer.read(_CHUNK_BYTES)):
                digest.update(chunk)
                count += out.write(chunk)
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        raise DataError(f"cannot download {url} ({error}); check the network, or put the file there.") from None
    return count, digest.hexdigest()


def verify_file(file: BufferedReader, name: str, size: int, sha256: str) -> None:
    """Refuses an open file that is not the pinned one, and rewinds it."""
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    count = file.tell()
    if (count, digest) != (size, sha256):
        raise DataError(
            f"{name!r} has {count} bytes, sha256 {digest}; the official file has {size} bytes, {sha256}."
            " Nothing was read from it. Remove it and get it again."
        )
    file.seek(0)
