"""Finds images that are in two splits of a data set, on which accuracy would be too high."""

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b

from torch import Tensor

from deat.data.folder_layout import FilesAndLabels
from deat.data.image_archives import FileCollection
from deat.data.image_set import ImageSet

MAX_COMPARED_FILES = 2000
"""The most files that are read to compare two splits that are not in memory."""
MAX_REFERENCE_FILES = 200_000
"""With more training files, looking up all of their sizes would take too long."""
_REMOVE_HINT = "Remove them from one of the splits"
_CONSEQUENCES = {
    ("test", "train"): f"so accuracy on them also measures memorisation. {_REMOVE_HINT}.",
    ("val", "train"): f"so the choice of the best epoch also rewards memorisation. {_REMOVE_HINT}.",
    (
        "test",
        "val",
    ): f"and no test image may choose the best epoch. {_REMOVE_HINT}; until then the val split is not used, "
    "and training images are held out to choose it.",
}

DuplicatePairs = list[tuple[int, int]]
"""Positions of equal images: the first in one split, the second in the other."""


def check_duplicates(
    files: FileCollection, splits: dict[str, FilesAndLabels], decoded: Mapping[str, ImageSet] | None
) -> list[str]:
    """Check for images that are in two splits.

    Args:
        files: The image files.
        splits: The images of each split. A val split that shares images with the test split is removed from it.
        decoded: The decoded images of each split; None if they are not in memory, and then files are compared.

    Returns:
        A warning for each pair of splits with equal images.
    """
    messages = []
    for (split, other), consequence in _CONSEQUENCES.items():
        if split not in splits or other not in splits:
            continue
        indices, other_indices = splits[split][0].tolist(), splits[other][0].tolist()
        if decoded:
            pairs = find_equal_images(decoded[other], decoded[split])
        else:
            pairs = find_equal_files(files, other_indices, indices)
        if not pairs:
            continue
        position, other_position = pairs[0]
        split_name, other_name = (name.replace("train", "training") for name in (split, other))
        messages.append(
            f"{len(pairs):,} of {len(indices):,} {split_name} images are copies of {other_name} images, such as "
            f"{files.names[indices[position]]!r} of {files.names[other_indices[other_position]]!r}, {consequence}"
        )
        if other == "val":
            del splits[other]
    return messages


def find_equal_images(reference: ImageSet, checked: ImageSet) -> DuplicatePairs:
    """Find images whose pixels equal those of a reference image.

    Args:
        reference: The images to compare with, such as the training images.
        checked: The images to check, such as the test images.

    Returns:
        For each such checked image its position and the position of a reference image.
    """
    positions = {key: position for position, key in enumerate(_hash_images(reference.images))}
    return [(position, positions[key]) for position, key in enumerate(_hash_images(checked.images)) if key in positions]


def _hash_images(images: Tensor) -> Iterator[bytes]:
    return (blake2b(image.data, digest_size=16).digest() for image in images.numpy())


def find_equal_files(files: FileCollection, reference: Sequence[int], checked: Sequence[int]) -> DuplicatePairs:
    """Find files whose bytes equal those of a reference file; a large data set is compared in part or not at all.

    At most `MAX_COMPARED_FILES` files are read, and none with more than `MAX_REFERENCE_FILES` reference files.

    Args:
        files: The image files.
        reference: Indices of the files to compare with, such as the training files.
        checked: Indices of the files to check, such as the test files.

    Returns:
        For each such checked file its position in `checked` and the position of an equal file in `reference`.
    """
    if len(reference) > MAX_REFERENCE_FILES:
        return []
    positions_by_size: dict[int, list[int]] = {}
    for position, index in enumerate(reference):
        positions_by_size.setdefault(files.size(index), []).append(position)
    pairs, num_left = DuplicatePairs(), MAX_COMPARED_FILES
    for position, index in enumerate(checked):
        candidates = positions_by_size.get(files.size(index), [])
        if not candidates:
            continue
        num_left -= 1 + len(candidates)
        if num_left < 0:
            break
        content = files.read(index)
        match = next((candidate for candidate in candidates if files.read(reference[candidate]) == content), None)
        if match is not None:
            pairs.append((position, match))
    return pairs
