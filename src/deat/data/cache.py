"""Folders of derived files, written whole or not at all, verified before use."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_MANIFEST = "manifest.json"


def find(root: Path, key: str) -> Path | None:
    """The entry of this key if it is complete and unchanged; a damaged one is removed."""
    entry = root / key
    if not entry.is_dir():
        return None
    if _is_sound(entry):
        return entry
    drop(root, key)
    return None


@contextmanager
def build(root: Path, key: str) -> Iterator[Path]:
    """A folder to fill; it becomes the entry of this key when the block ends without an error."""
    root.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=root))
    try:
        yield fresh
        files = {file.name: _describe(file) for file in sorted(fresh.iterdir())}
        (fresh / _MANIFEST).write_text(json.dumps(files))
        # Another process may have built the same entry first; either one serves.
        with suppress(OSError):
            os.rename(fresh, root / key)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def drop(root: Path, key: str) -> None:
    """Removes an entry."""
    shutil.rmtree(root / key, ignore_errors=True)


def _describe(file: Path) -> list[Any]:
    with file.open("rb") as stream:
        return [file.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest()]


def _is_sound(entry: Path) -> bool:
    try:
        files = json.loads((entry / _MANIFEST).read_text())
        return bool(files) and all(_describe(entry / name) == known for name, known in files.items())
    except (OSError, ValueError, AttributeError, RecursionError):
        return False
