"""Files that are there whole or not at all, whatever happens while they are written, and in their own folder."""

import json
import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from deat.errors import CheckpointError

NO_FOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
"""Opens no symbolic link, where the system can tell."""


def write_atomic(path: Path, data: bytes, *, make_folder: bool = True) -> None:
    """Write a file under a temporary name, wait until it is on the disk, and only then give it its own."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
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
    """Add to a file, and wait until that is on the disk; it fails where the name is a link, which may lead anywhere."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | NO_FOLLOW, 0o666), "ab") as file:
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def check_no_symlinks(paths: Iterable[Path]) -> None:
    """Refuse names that are symbolic links, by which a folder from elsewhere could have any file written or removed."""
    for path in paths:
        if path.is_symlink():
            raise CheckpointError(
                f"{str(path)!r} is a symbolic link, through which deat would write outside its folder; nothing was "
                "changed. Remove the link, or put what it leads to in its place."
            )


def is_temporary_file(path: Path) -> bool:
    """Whether a file is the beginning of one that was never finished."""
    return path.name.startswith(".") and path.suffix == ".tmp"


def link_atomic(source: Path, target: Path) -> None:
    """Give a finished file a second name in another folder, in place of whatever has it; a copy where links fail."""
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    target.parent.mkdir(exist_ok=True)
    try:
        os.link(source, temporary)
    except OSError:
        write_atomic(target, source.read_bytes(), make_folder=False)
        return
    temporary.replace(target)
    fsync_folder(target.parent)


def write_json(path: Path, value: Any, *, make_folder: bool = True) -> None:
    """Write a JSON file, whole or not at all; a NaN in it is an error, since JSON has none."""
    write_atomic(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode(), make_folder=make_folder)


def fsync_folder(folder: Path) -> None:
    """Wait until the folder's list of names is on the disk, without which a rename can be lost."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
