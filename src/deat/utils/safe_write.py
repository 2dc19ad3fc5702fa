"""Files that are either complete or absent, whatever interrupts their writing, and that are written through no link."""

import json
import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from deat.errors import CheckpointError

NO_FOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
"""Flag of os.open that refuses a symbolic link, on systems that have it."""


def write_atomic(path: Path, data: bytes, *, make_folder: bool = True) -> None:
    """Write a file under a temporary name, flush it to disk, and rename it.

    Args:
        path: The file to create or replace.
        data: Its new content.
        make_folder: Whether to create the folder of the file if it does not exist.

    Raises:
        OSError: If the file cannot be written. The old content is unchanged then.
    """
    temporary = _temporary_path(path)
    if make_folder:
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        fsync_folder(path.parent)
    finally:
        with suppress(OSError):
            temporary.unlink()


def append_text(path: Path, text: str) -> None:
    """Append to a file and flush it to disk.

    Args:
        path: The file, which is created if it does not exist. If it has other names (hard links), this name first
            becomes a new file with the same content, so that the others do not change.
        text: What to append, written as UTF-8.

    Raises:
        OSError: If the file cannot be written, or its name is a symbolic link.
    """
    if path.is_file() and not path.is_symlink() and path.stat().st_nlink > 1:
        write_atomic(path, path.read_bytes())
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | NO_FOLLOW, 0o666), "ab") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def check_no_symlinks(paths: Iterable[Path]) -> None:
    """Refuse symbolic links, through which a folder from elsewhere could make deat write or remove any file.

    Args:
        paths: What will be written. Paths that do not exist are accepted.

    Raises:
        CheckpointError: If one of the paths is a symbolic link.
    """
    for path in paths:
        if path.is_symlink():
            raise CheckpointError(
                f"{str(path)!r} is a symbolic link, so deat would write outside its folder. Nothing was changed. "
                "Remove the link, or replace it with what it points to."
            )


def is_temporary_file(path: Path) -> bool:
    """Return whether a file is the unfinished one of an interrupted `write_atomic` or `link_atomic`."""
    return path.name.startswith(".") and path.suffix == ".tmp"


def link_atomic(source: Path, target: Path) -> None:
    """Give a finished file a second name in another folder, or copy it where the disk has no hard links.

    Args:
        source: The file.
        target: Its second name. A file of that name is replaced.

    Raises:
        OSError: If the file can be neither linked nor copied.
    """
    temporary = _temporary_path(target)
    target.parent.mkdir(exist_ok=True)
    try:
        os.link(source, temporary)
    except OSError:
        write_atomic(target, source.read_bytes(), make_folder=False)
        return
    temporary.replace(target)
    fsync_folder(target.parent)


def write_json(path: Path, value: Any, *, make_folder: bool = True) -> None:
    """Write a JSON file with `write_atomic`.

    Args:
        path: The file to create or replace.
        value: What the file will contain.
        make_folder: Whether to create the folder of the file if it does not exist.

    Raises:
        OSError: If the file cannot be written.
        ValueError: If the value contains a NaN or an infinity, which JSON does not have.
    """
    write_atomic(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode(), make_folder=make_folder)


def fsync_folder(folder: Path) -> None:
    """Flush a folder's list of names to disk. Without this, a power failure can undo a rename."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _temporary_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
