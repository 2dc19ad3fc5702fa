"""Sets of image files decoded whole, and kept as arrays for the next start."""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deat.data import cache
from deat.data.decode import fit_centre, open_image, to_tensor
from deat.data.files import Files
from deat.data.imageset import ImageSet

MAX_DECODED = 4 << 30
_CHUNK = 256
# Below this, threads wait for the interpreter's lock longer than Pillow works without it.
_WORTH_THREADS = 3 * 128 * 128

Members = tuple[Tensor, Tensor]


def decode(
    files: Files, classes: tuple[str, ...], train: Members, test: Members | None, size: int | None
) -> tuple[ImageSet, ImageSet | None] | None:
    """Both parts decoded, or None if the images differ in size or would not fit in memory."""
    shape = _common_shape(files, train, size)
    count = len(train[0]) + (len(test[0]) if test else 0)
    if shape is None or count * shape.numel() > MAX_DECODED:
        return None
    held = _decode_part(files, train, classes, shape, size)
    other = _decode_part(files, test, classes, shape, size) if held and test else None
    if held is None or (test and other is None):
        return None
    return held, other


def _common_shape(files: Files, train: Members, size: int | None) -> torch.Size | None:
    """The shape all images are likely to have, from the first of each class."""
    if size is not None:
        return torch.Size((3, size, size))
    _, first = np.unique(train[1].numpy(), return_index=True)
    shapes = {_pixels(files, int(train[0][i]), None).shape for i in first}
    return shapes.pop() if len(shapes) == 1 else None


def _pixels(files: Files, member: int, size: int | None) -> Tensor:
    image = open_image(files.read(member), files.names[member])
    return to_tensor(fit_centre(image, size) if size else image)


def _decode_part(
    files: Files, part: Members, classes: tuple[str, ...], shape: torch.Size, size: int | None
) -> ImageSet | None:
    members, labels = part
    out = torch.empty((len(members), *shape), dtype=torch.uint8)

    def fill(start: int) -> bool:
        """Decode one chunk of images; whether they all have the same size."""
        for row, member in enumerate(members[start : start + _CHUNK].tolist(), start):
            pixels = _pixels(files, member, size)
            if pixels.shape != shape:
                return False
            out[row] = pixels
        return True

    # Pillow decodes without the interpreter's lock, so threads are enough.
    threads = min(8, os.cpu_count() or 1) if shape.numel() >= _WORTH_THREADS else 1
    with ThreadPoolExecutor(threads) as pool:
        alike = all(pool.map(fill, range(0, len(members), _CHUNK)))
    return ImageSet(out, labels, classes) if alike else None


def save(store: Path, key: str, train: ImageSet, test: ImageSet | None) -> None:
    """Keeps decoded parts under a key."""
    with cache.build(store, key) as entry:
        for name, part in _named(train, test):
            np.save(entry / f"{name}_images.npy", part.images.numpy())
            np.save(entry / f"{name}_labels.npy", part.labels.numpy())
        (entry / "classes.json").write_text(json.dumps(train.classes))


def _named(train: ImageSet, test: ImageSet | None) -> Iterator[tuple[str, ImageSet]]:
    yield "train", train
    if test is not None:
        yield "test", test


def load(store: Path, key: str) -> tuple[ImageSet, ImageSet | None] | None:
    """The parts kept under a key, mapped from disk, or None."""
    entry = cache.find(store, key)
    if entry is None:
        return None
    classes = tuple(json.loads((entry / "classes.json").read_text()))
    train = _load_part(entry, "train", classes)
    return train, _load_part(entry, "test", classes) if (entry / "test_images.npy").exists() else None


def _load_part(entry: Path, name: str, classes: tuple[str, ...]) -> ImageSet:
    # Copy on write: torch wants memory it may write to, and the file must never change.
    images = np.load(entry / f"{name}_images.npy", mmap_mode="c", allow_pickle=False)
    labels = np.load(entry / f"{name}_labels.npy", allow_pickle=False)
    return ImageSet(torch.from_numpy(images), torch.from_numpy(labels), classes)
