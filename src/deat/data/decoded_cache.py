"""Sets of image files decoded whole, and kept as arrays for the next start."""

import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deat.data.archives import FileCollection
from deat.data.decode import centre_crop, open_image, read_image_size, to_tensor
from deat.data.folder_layout import FilesAndLabels
from deat.data.image_set import ImageSet
from deat.data.streaming import DEFAULT_SIDE_PIXELS
from deat.errors import DataError

_MANIFEST_NAME = "manifest.json"


def find_entry(cache_dir: Path, key: str) -> Path | None:
    """The entry of this key if it is complete and unchanged; a damaged one is removed."""
    entry = cache_dir / key
    if not entry.is_dir():
        return None
    if _is_intact(entry):
        return entry
    remove_entry(cache_dir, key)
    return None


@contextmanager
def create_entry(cache_dir: Path, key: str) -> Iterator[Path]:
    """A folder to fill; it becomes the entry of this key when the block ends without an error."""
    cache_dir.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=cache_dir))
    try:
        yield fresh
        files = {file.name: _size_and_hash(file) for file in sorted(fresh.iterdir())}
        (fresh / _MANIFEST_NAME).write_text(json.dumps(files))
        # Another process may have built the same entry first; either one serves.
        with suppress(OSError):
            os.rename(fresh, cache_dir / key)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def remove_entry(cache_dir: Path, key: str) -> None:
    """Removes an entry."""
    shutil.rmtree(cache_dir / key, ignore_errors=True)


def _size_and_hash(file: Path) -> list[Any]:
    with file.open("rb") as stream:
        return [file.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest()]


def _is_intact(entry: Path) -> bool:
    try:
        files = json.loads((entry / _MANIFEST_NAME).read_text())
        return bool(files) and all(_size_and_hash(entry / name) == known for name, known in files.items())
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


SIZE_SAMPLE_IMAGES = 100
"""About so many images tell whether nearly all share one size."""
MIN_COMMON_SIZE_SHARE = 0.9
MAX_COMMON_SIDE_PIXELS = 512
"""Larger images are seldom meant to be trained on as they are."""
MAX_LISTED_SIZES = 5


def describe_odd_sizes(files: FileCollection, members: Sequence[int], max_bytes: int) -> str | None:
    """Which few images differ from all others in size, and what to do about it; None where sizes are mixed.

    Every file is looked at only of a set that would have at most so many bytes if it had one size.
    """
    looked_at = members[:: max(1, len(members) // SIZE_SAMPLE_IMAGES)]
    common, count = Counter(_try_read_size(files, member) for member in looked_at).most_common(1)[0]
    if common is None or count < MIN_COMMON_SIZE_SHARE * len(looked_at) or max(common) > MAX_COMMON_SIDE_PIXELS:
        return None
    if 3 * common[0] * common[1] * len(members) > max_bytes:
        return None
    sizes = ((files.names[member], _try_read_size(files, member)) for member in members)
    odd = (f"{name!r} ({_format_size(size)})" for name, size in sizes if size and size != common)
    shown = list(islice(odd, MAX_LISTED_SIZES + 1))
    return _odd_sizes_message(shown, common) if shown else None


def _odd_sizes_message(odd: list[str], common: tuple[int, int]) -> str:
    more = ", ..." if len(odd) > MAX_LISTED_SIZES else ""
    return (
        f"nearly all images are {_format_size(common)}, but not {', '.join(odd[:MAX_LISTED_SIZES])}{more}, so all are resized to "
        f"{DEFAULT_SIDE_PIXELS}x{DEFAULT_SIDE_PIXELS}. If that is not meant, say --size {min(common)} (size={min(common)}), or remove what differs."
    )


def _try_read_size(files: FileCollection, member: int) -> tuple[int, int] | None:
    """An image's width and height; None of one that cannot be read, which is said when it is decoded."""
    try:
        return read_image_size(files.read(member), files.names[member])
    except DataError:
        return None


def _format_size(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


MAX_DECODED_BYTES = 4 << 30
_CHUNK_IMAGES = 256
# Below this, threads wait for the interpreter's lock longer than Pillow works without it.
_MIN_IMAGE_BYTES_FOR_THREADS = 3 * 128 * 128

_MAX_LISTED_UNREADABLE = 10
"""Images that cannot be read are named up to so many."""

DecodeErrors = dict[str, DataError]
"""What is wrong with images that cannot be read, by their names."""


def decode_splits(
    files: FileCollection, classes: tuple[str, ...], parts: dict[str, FilesAndLabels], size: int | None
) -> dict[str, ImageSet] | None:
    """All parts decoded, or None if the images differ in size or would not fit in memory."""
    shape = _guess_common_shape(files, parts["train"], size)
    members = torch.cat([part[0] for part in parts.values()]).tolist()
    if shape and len(members) * shape.numel() > MAX_DECODED_BYTES:
        return None
    held, broken = dict[str, ImageSet](), DecodeErrors()
    for name, part in parts.items():
        found = _decode_split(files, part, classes, shape, size, broken) if shape else None
        if found is None:
            break
        held[name] = found
    if broken:
        raise _unreadable_error(broken)
    if held.keys() != parts.keys():
        _warn_of_odd_sizes(files, members)
        return None
    return held


def _guess_common_shape(files: FileCollection, train: FilesAndLabels, size: int | None) -> torch.Size | None:
    """The shape all images are likely to have, from the first of each class that can be read."""
    if size is not None:
        return torch.Size((3, size, size))
    _, first = np.unique(train[1].numpy(), return_index=True)
    sizes, broken = set(), DecodeErrors()
    for member in train[0][first].tolist():
        try:
            sizes.add(read_image_size(files.read(member), files.names[member]))
        except DataError as error:
            broken[files.names[member]] = error
    if broken and len(sizes) != 1:
        raise _unreadable_error(broken)
    return torch.Size((3, *reversed(sizes.pop()))) if len(sizes) == 1 else None


def _decode_image(files: FileCollection, member: int, size: int | None) -> Tensor:
    image = open_image(files.read(member), files.names[member])
    return to_tensor(centre_crop(image, size) if size else image)


def _decode_split(
    files: FileCollection,
    part: FilesAndLabels,
    classes: tuple[str, ...],
    shape: torch.Size,
    size: int | None,
    errors: DecodeErrors,
) -> ImageSet | None:
    """One part decoded, or None as soon as an image has another shape; what cannot be read is added to broken."""
    members, labels = part
    out = torch.empty((len(members), *shape), dtype=torch.uint8)

    def fill(start: int) -> tuple[bool, DecodeErrors]:
        """Decode one chunk of images: whether they all have the same size, and those that cannot be read."""
        bad = DecodeErrors()
        for row, member in enumerate(members[start : start + _CHUNK_IMAGES].tolist(), start):
            try:
                pixels = _decode_image(files, member, size)
            except DataError as error:
                bad[files.names[member]] = error
                continue
            if pixels.shape != shape:
                return False, bad
            out[row] = pixels
        return True, bad

    # Pillow decodes without the interpreter's lock, so threads are enough.
    threads = min(8, os.cpu_count() or 1) if shape.numel() >= _MIN_IMAGE_BYTES_FOR_THREADS else 1
    with ThreadPoolExecutor(threads) as pool:
        for alike, bad in pool.map(fill, range(0, len(members), _CHUNK_IMAGES)):
            errors.update(bad)
            if not alike:
                return None
    return ImageSet(out, labels, classes)


def _unreadable_error(errors: DecodeErrors) -> DataError:
    """What is wrong with the images that cannot be read: the first one in words, several by their names."""
    first, names = next(iter(errors.values())), list(map(repr, errors))
    if len(names) == 1:
        return first
    more = f" and {len(names) - _MAX_LISTED_UNREADABLE:,} more" if len(names) > _MAX_LISTED_UNREADABLE else ""
    return DataError(
        f"{len(names):,} images cannot be read: {', '.join(names[:_MAX_LISTED_UNREADABLE])}{more}. The first: {first}"
    )


def _warn_of_odd_sizes(files: FileCollection, members: list[int]) -> None:
    text = describe_odd_sizes(files, members, MAX_DECODED_BYTES)
    if text:
        warnings.warn(text, stacklevel=7)  # who called load


def save_splits(cache_dir: Path, key: str, parts: dict[str, ImageSet], messages: list[str]) -> None:
    """Keeps decoded parts under a key, with what a person is told of them."""
    with create_entry(cache_dir, key) as entry:
        for name, part in parts.items():
            np.save(entry / f"{name}_images.npy", part.images.numpy())
            np.save(entry / f"{name}_labels.npy", part.labels.numpy())
        (entry / "classes.json").write_text(json.dumps(parts["train"].classes))
        (entry / "remarks.json").write_text(json.dumps(messages))


def load_splits(cache_dir: Path, key: str) -> tuple[dict[str, ImageSet], list[str]] | None:
    """The parts kept under a key, mapped from disk, and what is said of them; or None."""
    entry = find_entry(cache_dir, key)
    if entry is None:
        return None
    classes = tuple(json.loads((entry / "classes.json").read_text()))
    names = [name for name in ("train", "test", "val") if (entry / f"{name}_images.npy").exists()]
    parts = {name: _load_split(entry, name, classes) for name in names}
    return parts, json.loads((entry / "remarks.json").read_text())


def _load_split(entry: Path, name: str, classes: tuple[str, ...]) -> ImageSet:
    # Copy on write: torch wants memory it may write to, and the file must never change.
    images = np.load(entry / f"{name}_images.npy", mmap_mode="c", allow_pickle=False)
    labels = np.load(entry / f"{name}_labels.npy", allow_pickle=False)
    return ImageSet(torch.from_numpy(images), torch.from_numpy(labels), classes)
