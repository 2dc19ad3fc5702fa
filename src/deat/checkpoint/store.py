"""Writing a checkpoint: a folder that gets its name only when all of it, hashes included, is on the disk."""

import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from deat.errors import CheckpointError
from deat.writing import sync_folder

MANIFEST = "MANIFEST.json"
NAME = re.compile(r"ckpt-(\d{6,})")
TEMPORARY = ".tmp-"


def name_of(number: int) -> str:
    """The folder's name of a run's n-th checkpoint."""
    return f"ckpt-{number:06}"


def listed(parent: Path) -> list[Path]:
    """Whatever is named as a checkpoint, oldest first, valid or not."""
    found = [(int(match[1]), path) for path in parent.iterdir() if (match := NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def write(parent: Path, name: str, files: Mapping[str, bytes]) -> Path:
    """Write a checkpoint beside its place, wait until it is on the disk, then rename it; on failure nothing is left."""
    temporary = parent / f"{TEMPORARY}{secrets.token_hex(8)}"
    try:
        temporary.mkdir(0o700)  # fails where something is there already, a link included
        try:
            _fill(temporary, files)
            _commit(temporary, parent / name)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except (OSError, RuntimeError, ValueError) as error:  # a full disk shows itself in many ways
        raise CheckpointError(f"cannot write the checkpoint {str(parent / name)!r}: {error}") from error
    fault_point("after rename")
    return parent / name


def remove_temporaries(parent: Path) -> None:
    """Delete what writers that were killed have left, here and one folder down."""
    left = [path for path in parent.iterdir() if path.name.startswith(TEMPORARY)]
    folders = [parent, *(path for path in parent.iterdir() if not path.is_symlink())]  # a link leads elsewhere
    left += [path for folder in folders for path in folder.glob(".*.tmp")]
    for path in left:
        remove(path)


def remove(path: Path) -> bool:
    """Delete a folder and say whether it is gone; deleting never ends a run."""
    try:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    except OSError:
        return False
    return True


def prune(parent: Path, kept: set[str]) -> list[str]:
    """Delete all checkpoints but the kept ones; the names of those that could not be deleted."""
    with suppress(OSError):
        return [path.name for path in listed(parent) if path.name not in kept and not remove(path)]
    return []


def fault_point(name: str) -> None:
    """Nothing: a moment of a save, named so that tests can put something in its place."""


def _fill(folder: Path, files: Mapping[str, bytes]) -> None:
    fault_point("before data")
    for name, data in files.items():
        _write_file(folder / name, data)
    fault_point("before manifest")
    entries = {name: {"size": len(data), "sha256": sha256(data).hexdigest()} for name, data in files.items()}
    _write_file(folder / MANIFEST, (json.dumps({"schema": 1, "files": entries}, indent=2) + "\n").encode())
    os.chmod(folder, folder.parent.stat().st_mode & 0o777)
    sync_folder(folder)


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
        remove(target)
    temporary.rename(target)
    sync_folder(target.parent)
