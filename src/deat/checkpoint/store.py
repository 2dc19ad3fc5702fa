"""Folders of checkpoints. A checkpoint gets its name after all files and their hashes are on the disk."""

import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import file_digest, sha256
from io import BufferedReader
from pathlib import Path

from deat.errors import CheckpointError
from deat.utils.safe_write import NO_FOLLOW, fsync_folder

MANIFEST_FILE = "MANIFEST.json"
CHECKPOINT_NAME_PATTERN = re.compile(r"ckpt-(\d{6,})")
TEMPORARY_PREFIX = ".tmp-"


def checkpoint_name(number: int) -> str:
    """Return the folder name of a run's n-th checkpoint."""
    return f"ckpt-{number:06}"


def list_checkpoints(parent: Path) -> list[Path]:
    """List all checkpoints of a folder by their names, oldest first, valid or not."""
    numbered = [
        (int(match[1]), path) for path in parent.iterdir() if (match := CHECKPOINT_NAME_PATTERN.fullmatch(path.name))
    ]
    return [path for _, path in sorted(numbered)]


def write_checkpoint(parent: Path, name: str, files: Mapping[str, bytes]) -> Path:
    """Write a checkpoint atomically: to a temporary folder, which is renamed after a sync.

    Args:
        parent: The folder of checkpoints.
        name: The checkpoint's name.
        files: The content of its files by name, without the manifest.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: Writing failed; the temporary folder is deleted.
    """
    temporary = parent / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
    try:
        temporary.mkdir(0o700)  # fails if the path exists, also as a link
        try:
            _write_files(temporary, files)
            _commit(temporary, parent / name)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except (OSError, RuntimeError, ValueError) as error:  # a full disk raises several types
        raise CheckpointError(f"cannot write the checkpoint {str(parent / name)!r}: {error}") from error
    fault_point("after rename")
    return parent / name


def remove_temporary_files(parent: Path) -> None:
    """Delete temporary files and folders that killed processes have left, also one folder down."""
    leftovers = [path for path in parent.iterdir() if path.name.startswith(TEMPORARY_PREFIX)]
    folders = [parent, *(path for path in parent.iterdir() if not path.is_symlink())]  # links may point elsewhere
    leftovers += [path for folder in folders for path in folder.glob(".*.tmp")]
    for path in leftovers:
        try_remove(path)


def try_remove(path: Path) -> bool:
    """Delete a folder or file; return whether that worked. It never raises, since a leftover file must not end a run."""
    try:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    except OSError:
        return False
    return True


def prune_checkpoints(parent: Path, keep_names: set[str]) -> list[str]:
    """Delete old checkpoints.

    Args:
        parent: The folder of checkpoints.
        keep_names: The names of those to keep.

    Returns:
        The names of checkpoints that could not be deleted.
    """
    with suppress(OSError):
        return [path.name for path in list_checkpoints(parent) if path.name not in keep_names and not try_remove(path)]
    return []


def fault_point(name: str) -> None:
    """Do nothing; tests replace this to make a save fail at a named point."""


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
    if target.exists():  # a damaged checkpoint: a good one of this number would not be written again
        try_remove(target)
    temporary.rename(target)
    fsync_folder(target.parent)


CHECKPOINT_FILE_PATTERN = re.compile(r"[a-z]+\.(safetensors|json)")
REQUIRED_FILES = ("model.safetensors", "optim.safetensors", "rng.safetensors", "state.json")
MAX_MANIFEST_BYTES = 1 << 20


@dataclass(frozen=True)
class CheckpointSearch:
    """The result of a search for the newest valid checkpoint.

    Attributes:
        newest: Its folder, or None.
        problems: What is wrong with each newer checkpoint.
    """

    newest: Path | None = None
    problems: list[str] = field(default_factory=list)


def find_newest_checkpoint(parent: Path) -> CheckpointSearch:
    """Find the newest checkpoint of a folder that is valid."""
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
    """Check that a checkpoint has every file, with the size and hash of its manifest.

    Args:
        path: The checkpoint's folder.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    files = _read_manifest(path)
    for name in (*REQUIRED_FILES, *files):
        if name not in files:
            raise CheckpointError(f"{path.name} has no {name}")
        _verify_file(path / name, files[name])


def list_manifest_files(path: Path) -> set[str]:
    """Return the names of the files in a checkpoint's manifest."""
    return set(_read_manifest(path))


def _read_manifest(path: Path) -> dict[str, tuple[int, str]]:
    if path.is_symlink() or not path.is_dir():
        raise CheckpointError(f"{path.name} is not a folder")
    data = _read_regular_file(path / MANIFEST_FILE, MAX_MANIFEST_BYTES)
    try:
        files = json.loads(data)["files"]
        entries = {str(name): (int(entry["size"]), str(entry["sha256"])) for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{path.name}/{MANIFEST_FILE} is damaged") from None
    outside = [name for name in entries if not CHECKPOINT_FILE_PATTERN.fullmatch(name)]
    if outside:
        raise CheckpointError(f"{path.name}/{MANIFEST_FILE} names {outside[0]!r}, which is not a file of a checkpoint")
    return entries


def _read_regular_file(path: Path, max_bytes: int) -> bytes:
    _check_regular_file(path, None)
    with _open_without_links(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise CheckpointError(f"{path.parent.name}/{path.name} is larger than any manifest")
    return data


def _verify_file(path: Path, expected: tuple[int, str]) -> None:
    size, expected_hash = expected
    _check_regular_file(path, size)
    with _open_without_links(path) as file:
        digest = file_digest(file, "sha256").hexdigest()
    if digest != expected_hash:
        raise CheckpointError(f"{path.parent.name}/{path.name} is damaged: its hash differs from the manifest's")


def _check_regular_file(path: Path, size: int | None) -> None:
    name = f"{path.parent.name}/{path.name}"
    try:
        status = path.lstat()
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read ({error.strerror})") from None
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{name} is not a plain file")
    if size is not None and status.st_size != size:
        raise CheckpointError(f"{name} has {status.st_size:,} bytes instead of {size:,}")


def _open_without_links(path: Path) -> BufferedReader:
    try:
        handle = os.open(path, os.O_RDONLY | NO_FOLLOW)
        return os.fdopen(handle, "rb")
    except OSError as error:
        raise CheckpointError(f"{path.parent.name}/{path.name} cannot be read ({error.strerror})") from None
