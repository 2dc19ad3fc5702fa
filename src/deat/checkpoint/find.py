"""Finding a checkpoint: the newest one whose every byte is what its manifest says."""

import hashlib
import json
import os
import re
import stat
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path

from deat.checkpoint.store import MANIFEST, listed
from deat.errors import CheckpointError
from deat.writing import NO_FOLLOW

FILE = re.compile(r"[a-z]+\.(safetensors|json)")
NEEDED = ("model.safetensors", "optim.safetensors", "rng.safetensors", "state.json")
LARGEST_MANIFEST = 1 << 20


@dataclass(frozen=True)
class Search:
    """What was found in a folder: the newest whole checkpoint, if any, and what is wrong with newer ones."""

    newest: Path | None = None
    problems: list[str] = field(default_factory=list)


def search(parent: Path) -> Search:
    """Look for the newest checkpoint that verifies; every newer one is reported."""
    problems: list[str] = []
    for path in reversed(listed(parent)):
        try:
            verify(path)
        except CheckpointError as error:
            problems.append(str(error))
        else:
            return Search(path, problems)
    return Search(None, problems)


def verify(path: Path) -> None:
    """Raise unless every file of a checkpoint is there with the size and hash that its manifest says."""
    files = _manifest(path)
    for name in (*NEEDED, *files):
        if name not in files:
            raise CheckpointError(f"{path.name} has no {name}")
        _verify_file(path / name, files[name])


def files_of(path: Path) -> set[str]:
    """The files that a checkpoint's manifest names."""
    return set(_manifest(path))


def _manifest(path: Path) -> dict[str, tuple[int, str]]:
    if path.is_symlink() or not path.is_dir():
        raise CheckpointError(f"{path.name} is not a folder of its own")
    data = _regular(path / MANIFEST, LARGEST_MANIFEST)
    try:
        files = json.loads(data)["files"]
        entries = {str(name): (int(entry["size"]), str(entry["sha256"])) for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{path.name}/{MANIFEST} is damaged") from None
    outside = [name for name in entries if not FILE.fullmatch(name)]
    if outside:
        raise CheckpointError(f"{path.name}/{MANIFEST} names {outside[0]!r}, which is no file of a checkpoint")
    return entries


def _regular(path: Path, most: int) -> bytes:
    _check_regular(path, None)
    with _open(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise CheckpointError(f"{path.parent.name}/{path.name} is larger than any manifest")
    return data


def _verify_file(path: Path, expected: tuple[int, str]) -> None:
    size, wanted = expected
    _check_regular(path, size)
    with _open(path) as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wanted:
        raise CheckpointError(f"{path.parent.name}/{path.name} is damaged: its hash differs from the manifest's")


def _check_regular(path: Path, size: int | None) -> None:
    shown = f"{path.parent.name}/{path.name}"
    try:
        found = path.lstat()
    except OSError as error:
        raise CheckpointError(f"{shown} cannot be read ({error.strerror})") from None
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{shown} is not a plain file")
    if size is not None and found.st_size != size:
        raise CheckpointError(f"{shown} has {found.st_size:,} bytes instead of {size:,}")


def _open(path: Path) -> BufferedReader:
    try:
        handle = os.open(path, os.O_RDONLY | NO_FOLLOW)
        return os.fdopen(handle, "rb")
    except OSError as error:
        raise CheckpointError(f"{path.parent.name}/{path.name} cannot be read ({error.strerror})") from None
