"""Writing a checkpoint: a folder that gets its name only when all of it, hashes included, is on the disk."""

import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from io import BufferedReader
from pathlib import Path

from deat.errors import CheckpointError
from deat.utils.files import NO_FOLLOW, fsync_folder

MANIFEST_FILE = "MANIFEST.json"
CHECKPOINT_NAME_PATTERN = re.compile(r"ckpt-(\d{6,})")
TEMPORARY_PREFIX = ".tmp-"


def checkpoint_name(number: int) -> str:
    """The folder's name of a run's n-th checkpoint."""
    return f"ckpt-{number:06}"


def list_checkpoints(parent: Path) -> list[Path]:
    """Whatever is named as a checkpoint, oldest first, valid or not."""
    found = [
        (int(match[1]), path) for path in parent.iterdir() if (match := CHECKPOINT_NAME_PATTERN.fullmatch(path.name))
    ]
    return [path for _, path in sorted(found)]


def write_checkpoint(parent: Path, name: str, files: Mapping[str, bytes]) -> Path:
    """Write a checkpoint beside its place, wait until it is on the disk, then rename it; on failure nothing is left."""
    temporary = parent / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
    try:
        temporary.mkdir(0o700)  # fails where something is there already, a link included
        try:
            _write_files(temporary, files)
            _commit(temporary, parent / name)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except (OSError, RuntimeError, ValueError) as error:  # a full disk shows itself in many ways
        raise CheckpointError(f"cannot write the checkpoint {str(parent / name)!r}: {error}") from error
    fault_point("after rename")
    return parent / name


def remove_temporary_files(parent: Path) -> None:
    """Delete what writers that were killed have left, here and one folder down."""
    left = [path for path in parent.iterdir() if path.name.startswith(TEMPORARY_PREFIX)]
    folders = [parent, *(path for path in parent.iterdir() if not path.is_symlink())]  # a link leads elsewhere
    left += [path for folder in folders for path in folder.glob(".*.tmp")]
    for path in left:
        try_remove(path)


def try_remove(path: Path) -> bool:
    """Delete a folder and say whether it is gone; deleting never ends a run."""
    try:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    except OSError:
        return False
    return True


def prune_checkpoints(parent: Path, keep_names: set[str]) -> list[str]:
    """Delete all checkpoints but the kept ones; the names of those that could not be deleted."""
    with suppress(OSError):
        return [path.name for path in list_checkpoints(parent) if path.name not in keep_names and not try_remove(path)]
    return []


def fault_point(name: str) -> None:
    """Nothing: a moment of a save, named so that tests can put something in its place."""


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    fault_point("before data")
    for name, data in files.items():
        _write_file(folder / name, data)
    fault_point("before manifest")
    entries = {name: {"size": len(data), "sha256": sha256(data).hexdigest()} for name, data in files.items()}
    _write_file(folder / MANIFEST_FILE, (json.dumps({"schema": 1, "files": entries}, indent=2) + "\n").encode())
    os.chmod(folder, folder.parent.stat().st_mode & 0o777)
    fsync_folder(folder)


def _write_file(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        half = len(data) // 2
        file.write(data[:half])
        fault_point("mid file")
        file.write(data[half:])
        file.flush()
        os.fsync(file.fileno())


def _commit(temporary: Path, target: Path) -> None:
    fault_point("before rename")
    if target.exists():  # one that did not verify, or it would not be written again
        try_remove(target)
    temporary.rename(target)
    fsync_folder(target.parent)


CHECKPOINT_FILE_PATTERN = re.compile(r"[a-z]+\.(safetensors|json)")
REQUIRED_FILES = ("model.safetensors", "optim.safetensors", "rng.safetensors", "state.json")
MAX_MANIFEST_BYTES = 1 << 20


@dataclass(frozen=True)
class CheckpointSearch:
    """What was found in a folder: the newest whole checkpoint, if any, and what is wrong with newer ones."""

    newest: Path | None = None
    problems: list[str] = field(default_factory=list)


def find_newest_checkpoint(parent: Path) -> CheckpointSearch:
    """Look for the newest checkpoint that verifies; every newer one is reported."""
    problems: list[str] = []
    for path in reversed(list_checkpoints(parent)):
        try:
            verify_checkpoint(path)
        except CheckpointError as error:
            problems.append(str(error))
        else:
            return CheckpointSearch(path, problems)
    return CheckpointSearch(None, problems)


def verify_checkpoint(path: Path) -> None:
    """Raise unless every file of a checkpoint is there with the size and hash that its manifest says."""
    files = _read_manifest(path)
    for name in (*REQUIRED_FILES, *files):
        if name not in files:
            raise CheckpointError(f"{path.name} has no {name}")
        _verify_file(path / name, files[name])


def list_manifest_files(path: Path) -> set[str]:
    """The files that a checkpoint's manifest names."""
    return set(_read_manifest(path))


def _read_manifest(path: Path) -> dict[str, tuple[int, str]]:
    if path.is_symlink() or not path.is_dir():
        raise CheckpointError(f"{path.name} is not a folder of its own")
    data = _read_regular_file(path / MANIFEST_FILE, MAX_MANIFEST_BYTES)
    try:
        files = json.loads(data)["files"]
        entries = {str(name): (int(entry["size"]), str(entry["sha256"])) for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{path.name}/{MANIFEST_FILE} is damaged") from None
    outside = [name for name in entries if not CHECKPOINT_FILE_PATTERN.fullmatch(name)]
    if outside:
        raise CheckpointError(f"{path.name}/{MANIFEST_FILE} names {outside[0]!r}, which is no file of a checkpoint")
    return entries


def _read_regular_file(path: Path, max_bytes: int) -> bytes:
    _check_regular_file(path, None)
    with _open_without_links(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise CheckpointError(f"{path.parent.name}/{path.name} is larger than any manifest")
    return data


def _verify_file(path: Path, expected: tuple[int, str]) -> None:
    size, wanted = expected
    _check_regular_file(path, size)
    with _open_without_links(path) as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wanted:
        raise CheckpointError(f"{path.parent.name}/{path.name} is damaged: its hash differs from the manifest's")


def _check_regular_file(path: Path, size: int | None) -> None:
    shown = f"{path.parent.name}/{path.name}"
    try:
        found = path.lstat()
    except OSError as error:
        raise CheckpointError(f"{shown} cannot be read ({error.strerror})") from None
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{shown} is not a plain file")
    if size is not None and found.st_size != size:
        raise CheckpointError(f"{shown} has {found.st_size:,} bytes instead of {size:,}")


def _open_without_links(path: Path) -> BufferedReader:
    try:
        handle = os.open(path, os.O_RDONLY | NO_FOLLOW)
        return os.fdopen(handle, "rb")
    except OSError as error:
        raise CheckpointError(f"{path.parent.name}/{path.name} cannot be read ({error.strerror})") from None
