"""Test images that are copies of training images, on which a network is not judged but remembered."""

from collections.abc import Iterator
from hashlib import blake2b

from torch import Tensor

from deat.data.files import Files
from deat.data.imageset import ImageSet


def copied(train: ImageSet, test: ImageSet) -> list[tuple[int, int]]:
    """The test images that are equal to a training image pixel by pixel, each with that image's number."""
    known = {key: row for row, key in enumerate(_keys(train.images))}
    return [(row, known[key]) for row, key in enumerate(_keys(test.images)) if key in known]


def _keys(images: Tensor) -> Iterator[bytes]:
    """A hash of each image's bytes."""
    return (blake2b(image.data, digest_size=16).digest() for image in images.numpy())


def remarks(files: Files, train: tuple[ImageSet, Tensor], test: tuple[ImageSet, Tensor]) -> list[str]:
    """What is said of copies between two parts, of which the images and their file numbers are given."""
    found = copied(train[0], test[0])
    if not found:
        return []
    mine, theirs = (files.names[int(part[1][row])] for part, row in zip((test, train), found[0], strict=True))
    return [
        f"{len(found):,} of {len(test[0]):,} test images are copies of training images, such as {mine!r} of "
        f"{theirs!r}, so accuracy on them also shows what was learnt by heart. Remove them from one of the parts."
    ]
