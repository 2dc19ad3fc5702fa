"""Images that lie in two parts of a set, on which a network is not judged but remembered."""

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b

from torch import Tensor

from deat.data.archives import FileCollection
from deat.data.folder_layout import FilesAndLabels
from deat.data.image_set import ImageSet

MAX_COMPARED_FILES = 2000
"""Files that are read at most to compare two parts that are not held in memory."""
MAX_TRAIN_FILES = 200_000
"""Training files above which the sizes of all would take longer to look up than a start should."""
REMOVE_HINT = "Remove them from one of the parts"
CONSEQUENCES = {
    ("test", "train"): f"so accuracy on them also shows what was learnt by heart. {REMOVE_HINT}.",
    ("val", "train"): f"so the best epoch is chosen by what was learnt by heart. {REMOVE_HINT}.",
    (
        "test",
        "val",
    ): f"and no test image may choose the best epoch. {REMOVE_HINT}; until then that is chosen by images held "
    "out of the training part, and the val part is not used.",
}
"""What copies between two parts mean."""

DuplicatePairs = list[tuple[int, int]]
"""Images of one part, by number, each with the number of its copy in the other."""


def check_duplicates(
    files: FileCollection, splits: dict[str, FilesAndLabels], decoded: Mapping[str, ImageSet] | None
) -> list[str]:
    """What is said of copies between parts, held in memory or not; a val part with test images is taken away."""
    said = []
    for (one, other), meaning in CONSEQUENCES.items():
        if one in splits and other in splits:
            mine, theirs = splits[one][0].tolist(), splits[other][0].tolist()
            found = (
                find_equal_images(decoded[other], decoded[one]) if decoded else find_equal_files(files, theirs, mine)
            )
            said += [f"{_duplicates_message(files, found, mine, theirs, (one, other))}, {meaning}"] if found else []
            if found and other == "val":
                del splits[other]
    return said


def _duplicates_message(
    files: FileCollection, pairs: DuplicatePairs, mine: list[int], theirs: list[int], parts: tuple[str, str]
) -> str:
    one, other = (part.replace("train", "training") for part in parts)
    row, copy = pairs[0]
    return (
        f"{len(pairs):,} of {len(mine):,} {one} images are copies of {other} images, such as "
        f"{files.names[mine[row]]!r} of {files.names[theirs[copy]]!r}"
    )


def find_equal_images(train: ImageSet, test: ImageSet) -> DuplicatePairs:
    """The test images that are equal to a training image pixel by pixel, each with that image's number."""
    known = {key: row for row, key in enumerate(_hash_images(train.images))}
    return [(row, known[key]) for row, key in enumerate(_hash_images(test.images)) if key in known]


def _hash_images(images: Tensor) -> Iterator[bytes]:
    """A hash of each image's bytes."""
    return (blake2b(image.data, digest_size=16).digest() for image in images.numpy())


def find_equal_files(files: FileCollection, train: Sequence[int], test: Sequence[int]) -> DuplicatePairs:
    """The test files that are equal to a training file byte by byte; of many, among the first, of very many none."""
    sizes: dict[int, list[int]] = {}
    for row, member in enumerate(train if len(train) <= MAX_TRAIN_FILES else ()):
        sizes.setdefault(files.size(member), []).append(row)
    alike = [(row, sizes[size]) for row, member in enumerate(test) if (size := files.size(member)) in sizes]
    found, left = DuplicatePairs(), MAX_COMPARED_FILES
    for row, rivals in alike:
        left -= 1 + len(rivals)
        if left < 0:
            break
        content = files.read(test[row])
        found += [(row, rival) for rival in rivals if files.read(train[rival]) == content][:1]
    return found
