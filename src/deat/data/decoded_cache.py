"""A cache on disk for decoded images and unpacked archives. Every entry has a manifest with the hashes of its files."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deat.data.image_set import ImageSet

_MANIFEST_NAME = "manifest.json"


def find_entry(cache_dir: Path, key: str) -> Path | None:
    """Find an entry of the cache; a damaged one is removed.

    Args:
        cache_dir: The folder with the cache.
        key: The entry's name.

    Returns:
        The entry's folder, or None if there is no complete and unchanged entry.
    """
    entry = cache_dir / key
    if not entry.is_dir():
        return None
    if _is_intact(entry):
        return entry
    remove_entry(cache_dir, key)
    return None


@contextmanager
def create_entry(cache_dir: Path, key: str) -> Iterator[Path]:
    """Create an entry of the cache.

    Args:
        cache_dir: The folder with the cache.
        key: The entry's name.

    Yields:
        A folder to write files to. It becomes the entry when the context ends without an error.
    """
    cache_dir.mkdir(parents=True, exist_ok=True)
    new_entry = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=cache_dir))
    try:
        yield new_entry
        files = {file.name: _size_and_hash(file) for file in sorted(new_entry.iterdir())}
        (new_entry / _MANIFEST_NAME).write_text(json.dumps(files))
        # Another process may have created the same entry first; either one can be used.
        with suppress(OSError):
            os.rename(new_entry, cache_dir / key)
    finally:
        shutil.rmtree(new_entry, ignore_errors=True)


def remove_entry(cache_dir: Path, key: str) -> None:
    """Remove an entry of the cache, if it exists."""
    shutil.rmtree(cache_dir / key, ignore_errors=True)


def _size_and_hash(file: Path) -> list[Any]:
    with file.open("rb") as stream:
        return [file.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest()]


def _is_intact(entry: Path) -> bool:
    try:
        manifest = json.loads((entry / _MANIFEST_NAME).read_text())
        return bool(manifest) and all(_size_and_hash(entry / name) == expected for name, expected in manifest.items())
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def save_splits(cache_dir: Path, key: str, splits: dict[str, ImageSet], messages: list[str]) -> None:
    """Save decoded images.

    Args:
        cache_dir: The folder with the cache.
        key: The entry's name.
        splits: The images by split.
        messages: Warnings about the images, which are shown each time they are loaded.
    """
    with create_entry(cache_dir, key) as entry:
        for name, image_set in splits.items():
            np.save(entry / f"{name}_images.npy", image_set.images.numpy())
            np.save(entry / f"{name}_labels.npy", image_set.labels.numpy())
        (entry / "classes.json").write_text(json.dumps(splits["train"].classes))
        (entry / "remarks.json").write_text(json.dumps(messages))


def load_splits(cache_dir: Path, key: str) -> tuple[dict[str, ImageSet], list[str]] | None:
    """Load decoded images, mapped from disk.

    Args:
        cache_dir: The folder with the cache.
        key: The entry's name.

    Returns:
        The images by split and the saved warnings, or None if there is no complete and unchanged entry.
    """
    entry = find_entry(cache_dir, key)
    if entry is None:
        return None
    classes = tuple(json.loads((entry / "classes.json").read_text()))
    names = [name for name in ("train", "test", "val") if (entry / f"{name}_images.npy").exists()]
    splits = {name: _load_split(entry, name, classes) for name in names}
    return splits, json.loads((entry / "remarks.json").read_text())


def _load_split(entry: Path, name: str, classes: tuple[str, ...]) -> ImageSet:
    # Copy on write: torch needs writable memory, and the file must never change.
    images = np.load(entry / f"{name}_images.npy", mmap_mode="c", allow_pickle=False)
    labels = np.load(entry / f"{name}_labels.npy", allow_pickle=False)
    return ImageSet(torch.from_numpy(images), torch.from_numpy(labels), classes)
