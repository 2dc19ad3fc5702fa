"""WebDataset shards: tar files of images KEY.jpg with their class numbers KEY.cls, read in any order."""

import re
import tarfile
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import torch

from deat.data.image_archives import PackedFiles, check_file_size, normalize_image_name, wrap_archive_errors
from deat.data.image_folder import load_or_stream
from deat.data.streaming import AnyImageSet
from deat.errors import DataError

CLASSES_FILE = "classes.txt"
"""Beside the shards: the names of the classes, one a line, in the order of their numbers."""
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
_MAX_SHARDS = 1_000_000


@dataclass(frozen=True, eq=False)
class JoinedFiles:
    """The files of several collections, one after the other.

    Args:
        parts: The collections.
    """

    parts: tuple[PackedFiles, ...]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The paths of the files."""
        return tuple(name for part in self.parts for name in part.names)

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(len(part.names) for part in self.parts))

    def size(self, index: int) -> int:
        """Return the size of a file in bytes."""
        part, inner = self._locate(index)
        return part.size(inner)

    def read(self, index: int) -> bytes:
        """Return the content of a file."""
        part, inner = self._locate(index)
        return part.read(inner)

    def _locate(self, index: int) -> tuple[PackedFiles, int]:
        number = bisect_right(self._ends, index)
        return self.parts[number], index - (self._ends[number - 1] if number else 0)


def read_shards(path: Path, size: int | None = None) -> Mapping[str, AnyImageSet]:
    """Read WebDataset shards. Nothing is unpacked: images are read from where they are in the tar files.

    Args:
        path: A folder of .tar files, whose names begin with train, val or test; or a pattern such as
            photos/train-{000..099}.tar or photos/*.tar.
        size: Side in pixels that images are resized to. By default images of one size keep it.

    Returns:
        The images of "train" and, if there are any, of "test" and "val". Shards without a known name are "train".

    Raises:
        DataError: There is no shard, or one is damaged, compressed, or has images without a class number.
    """
    shards = _find_shards(path)
    parts: dict[str, list[tuple[PackedFiles, list[int]]]] = {}
    for shard in shards:
        parts.setdefault(_split_of(shard), []).append(_index_shard(shard))
    if "train" not in parts:
        raise DataError(f"{str(path)!r} has no training shards, only {', '.join(parts)}. Add shards named train-*.tar.")
    files = JoinedFiles(tuple(part for entries in parts.values() for part, _ in entries))
    splits, start = {}, 0
    for name, entries in parts.items():
        labels = [label for _, numbers in entries for label in numbers]
        splits[name] = torch.arange(start, start + len(labels)), torch.tensor(labels, dtype=torch.int64)
        start += len(labels)
    classes = _read_class_names(shards[0].parent, max(int(labels.max()) for _, labels in splits.values()) + 1)
    return load_or_stream(files, classes, splits, size)


def _find_shards(path: Path) -> list[Path]:
    if path.is_dir():
        shards = sorted(path.glob("*.tar"))
        if not shards:
            raise DataError(f"{str(path)!r} has no .tar files; webdataset:PATH takes a folder of shards or a pattern.")
        return shards
    shards = [match for name in _expand_ranges(path.name) for match in _glob(path.parent, name)]
    if not shards:
        raise DataError(
            f"there are no shards {str(path)!r}. Give a folder of .tar files, or a pattern such as "
            "photos/train-{000..099}.tar or photos/*.tar."
        )
    return shards


def _expand_ranges(name: str) -> Iterator[str]:
    """Expand {000..012} to the numbers, with as many digits as the first has."""
    match = _RANGE.search(name)
    if match is None:
        yield name
        return
    first, last = int(match[1]), int(match[2])
    if not first <= last < first + _MAX_SHARDS:
        raise DataError(f"the range {match[0]} of {name!r} is empty or too long. Write it as {{000..099}}.")
    for number in range(first, last + 1):
        yield from _expand_ranges(f"{name[: match.start()]}{number:0{len(match[1])}d}{name[match.end() :]}")


def _glob(folder: Path, name: str) -> list[Path]:
    if any(sign in name for sign in "*?["):
        return sorted(folder.glob(name))
    if not (folder / name).is_file():
        raise DataError(f"the shard {str(folder / name)!r} is missing. Get it again, or leave it out of the pattern.")
    return [folder / name]


def _split_of(shard: Path) -> str:
    word = re.match(r"[A-Za-z]*", shard.name)
    return _SPLITS.get(word[0].lower() if word else "", "train")


def _index_shard(shard: Path) -> tuple[PackedFiles, list[int]]:
    """Where each image of a shard is, and its class number."""
    images: dict[str, tuple[str, int, int]] = {}
    labels: dict[str, int] = {}
    with wrap_archive_errors(shard), tarfile.open(shard, mode="r:") as tar:
        for member in tar:
            key, _, suffix = member.name.partition(".") if "/" not in member.name else _split_key(member.name)
            if not member.isreg():
                if member.isdir():
                    continue
                raise DataError(f"{member.name!r} in {shard.name!r} is a link or a device; only plain files are read.")
            check_file_size(member.name, member.size)
            if suffix.lower() == "cls":
                labels[key] = _read_class_number(tar, member, shard)
            elif normalize_image_name(member.name):
                if key in images:
                    raise DataError(f"{shard.name!r} has two images {key!r}. Keep one image for each key.")
                images[key] = member.name, member.offset_data, member.size
    if not images:
        raise DataError(f"{shard.name!r} has no images: a shard has KEY.jpg (or png, webp) and KEY.cls for each image.")
    without = next((key for key in images if key not in labels), None)
    if without is not None:
        raise DataError(
            f"image {images[without][0]!r} of {shard.name!r} has no class number: add {without}.cls, with the number as text."
        )
    names, offsets, sizes = zip(*images.values(), strict=True)
    located = tuple(f"{shard.name}/{name}" for name in names)
    return PackedFiles(shard, located, offsets, sizes), [labels[key] for key in images]


def _split_key(name: str) -> tuple[str, str, str]:
    """The key is all up to the first dot of the file's name, as WebDataset has it."""
    folder, _, base = name.rpartition("/")
    key, dot, suffix = base.partition(".")
    return f"{folder}/{key}", dot, suffix


def _read_class_number(tar: tarfile.TarFile, member: tarfile.TarInfo, shard: Path) -> int:
    content = tar.extractfile(member)
    text = content.read(64).decode("ascii", "replace").strip() if content else ""
    if not text.isdigit():
        raise DataError(f"{member.name!r} of {shard.name!r} is {text!r}; expected a class number from 0, such as 3.")
    return int(text)


def _read_class_names(folder: Path, count: int) -> tuple[str, ...]:
    file = folder / CLASSES_FILE
    if not file.is_file():
        return tuple(map(str, range(count)))
    names = tuple(line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip())
    if len(names) < count:
        raise DataError(
            f"{str(file)!r} names {len(names)} classes, and class number {count - 1} occurs. Name all of them."
        )
    return names
