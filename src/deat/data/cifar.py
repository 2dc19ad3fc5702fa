"""CIFAR-10 and CIFAR-100 from either official release, as an archive or a folder. No pickle is executed."""

import gzip
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from os.path import isdir, isfile  # unlike Path's methods, they return False for any path that cannot be read
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deat.data.download import download_file, verify_file
from deat.data.image_archives import CappedStream, wrap_archive_errors
from deat.data.image_set import ImageSet
from deat.data.safe_pickle import load_plain_pickle, to_uint8_array
from deat.errors import DataError

BASE_URL = "https://www.cs.toronto.edu/~kriz/"
_IMAGE_BYTES = 3 * 32 * 32
_MAX_META_BYTES = 1 << 16


@dataclass(frozen=True)
class CifarRelease:
    """One official archive and how to read its files.

    Args:
        archive: The archive's file name.
        folder: The folder in the archive.
        size: The archive's size in bytes.
        sha256: The archive's SHA-256 hash.
        train: Training files, each with its number of images.
        test: Test files, each with its number of images.
        meta_file: The file with the class names.
        names_key: Key of the class names in a pickled `meta_file`.
        labels_key: Key of the labels in a pickled batch; empty for the binary release.
        label_bytes: Bytes before each image of the binary release; the last of them is the label.
    """

    archive: str
    folder: str
    size: int
    sha256: str
    train: dict[str, int]
    test: dict[str, int]
    meta_file: str
    names_key: bytes
    labels_key: bytes = b""
    label_bytes: int = 1

    @property
    def is_binary(self) -> bool:
        """Whether images are plain bytes rather than pickled arrays."""
        return not self.labels_key

    @property
    def file_names(self) -> tuple[str, ...]:
        """All files of the release."""
        return (*self.train, *self.test, self.meta_file)

    def max_file_bytes(self, name: str) -> int:
        """Return the most bytes a file may have; for images of the binary release the exact size."""
        count = self.train.get(name) or self.test.get(name)
        if count is None:
            return _MAX_META_BYTES
        if self.is_binary:
            return count * (_IMAGE_BYTES + self.label_bytes)
        return count * (_IMAGE_BYTES + 64) + (1 << 20)


RELEASES: dict[str, tuple[CifarRelease, ...]] = {
    "cifar10": (
        CifarRelease(
            archive="cifar-10-binary.tar.gz",
            folder="cifar-10-batches-bin",
            size=170_052_171,
            sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            train={f"data_batch_{i}.bin": 10_000 for i in range(1, 6)},
            test={"test_batch.bin": 10_000},
            meta_file="batches.meta.txt",
            names_key=b"",
        ),
        CifarRelease(
            archive="cifar-10-python.tar.gz",
            folder="cifar-10-batches-py",
            size=170_498_071,
            sha256="6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
            train={f"data_batch_{i}": 10_000 for i in range(1, 6)},
            test={"test_batch": 10_000},
            meta_file="batches.meta",
            names_key=b"label_names",
            labels_key=b"labels",
        ),
    ),
    "cifar100": (
        CifarRelease(
            archive="cifar-100-binary.tar.gz",
            folder="cifar-100-binary",
            size=168_513_733,
            sha256="58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            train={"train.bin": 50_000},
            test={"test.bin": 10_000},
            meta_file="fine_label_names.txt",
            names_key=b"",
            label_bytes=2,
        ),
        CifarRelease(
            archive="cifar-100-python.tar.gz",
            folder="cifar-100-python",
            size=169_001_437,
            sha256="85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
            train={"train": 50_000},
            test={"test": 10_000},
            meta_file="meta",
            names_key=b"fine_label_names",
            labels_key=b"fine_labels",
        ),
    ),
}


def find_release(name: str, root: Path) -> tuple[CifarRelease, Path] | None:
    """Find a release on disk; a folder is preferred to its archive, and the binary release to the pickled one.

    Args:
        name: "cifar10" or "cifar100".
        root: The folder to search. It need not exist.

    Returns:
        The release and the path of its folder or archive, or None.
    """
    for release in RELEASES[name]:
        if isdir(root / release.folder):
            return release, root / release.folder
        if isfile(root / release.archive):
            return release, root / release.archive
    return None


def read_cifar(name: str, root: Path, download: bool = False) -> tuple[ImageSet, ImageSet]:
    """Read CIFAR from disk.

    Args:
        name: "cifar10" or "cifar100".
        root: The folder with the release.
        download: Whether to download the binary release to `root` if no release is there.

    Returns:
        The training and the test images.

    Raises:
        DataError: If there is no release, or it is damaged.
    """
    release_and_path = find_release(name, root)
    if release_and_path is None:
        release = RELEASES[name][0]
        release_and_path = release, root / release.archive
        if not download:
            expected = " or ".join(f"{r.archive} or the folder {r.folder}" for r in RELEASES[name])
            raise DataError(
                f"{name} is not in {str(root)!r}; put {expected} there, or allow the download"
                " (download=True, --download)."
            )
        download_file(BASE_URL + release.archive, root / release.archive, release.size, release.sha256)
    release, path = release_and_path
    files = _read_folder(release, path) if isdir(path) else _read_archive(release, path)
    return _parse_release(release, files, num_classes=int(name.removeprefix("cifar")))


def _read_folder(release: CifarRelease, folder: Path) -> dict[str, bytes]:
    contents = {}
    for name in release.file_names:
        try:
            with (folder / name).open("rb") as file:
                contents[name] = file.read(release.max_file_bytes(name) + 1)
        except OSError as error:
            raise DataError(f"cannot read {name!r} in {release.folder!r} ({error.strerror}).") from None
        _check_file_size(release, name, len(contents[name]))
    return contents


def _read_archive(release: CifarRelease, path: Path) -> dict[str, bytes]:
    """Verify the archive and read the release's files, each by its exact name."""
    names = {f"{release.folder}/{name}": name for name in release.file_names}
    contents: dict[str, bytes] = {}
    with wrap_archive_errors(path), path.open("rb") as file:
        verify_file(file, path.name, release.size, release.sha256)
        max_bytes = 2 * sum(map(release.max_file_bytes, release.file_names))
        with (
            gzip.open(file) as stream,
            tarfile.open(fileobj=CappedStream(stream, max_bytes, path.name), mode="r:") as tar,
        ):
            for member in tar:
                name = names.get(member.name)
                if name is not None:
                    contents[name] = _read_member(release, tar, member, name)
    missing = sorted(set(release.file_names) - set(contents))
    if missing:
        raise DataError(f"{path.name!r} lacks {missing[0]!r}; get the official archive.")
    return contents


def _read_member(release: CifarRelease, tar: tarfile.TarFile, member: tarfile.TarInfo, name: str) -> bytes:
    _check_file_size(release, name, member.size)
    content = tar.extractfile(member) if member.isreg() else None
    if content is None:
        raise DataError(f"{name!r} in {release.archive!r} is not a plain file; get the official archive.")
    return content.read()


def _check_file_size(release: CifarRelease, name: str, size: int) -> None:
    if size > release.max_file_bytes(name):
        raise DataError(f"{name!r} has {size} bytes or more; at most {release.max_file_bytes(name)} are expected.")


def _parse_release(release: CifarRelease, files: dict[str, bytes], num_classes: int) -> tuple[ImageSet, ImageSet]:
    classes = _parse_class_names(release, files[release.meta_file], num_classes)
    train, test = (_parse_split(release, files, counts, classes) for counts in (release.train, release.test))
    train.check()
    test.check()
    return train, test


def _parse_class_names(release: CifarRelease, data: bytes, num_classes: int) -> tuple[str, ...]:
    if release.is_binary:
        names: Iterable[Any] = [line.strip() for line in data.splitlines() if line.strip()]
    else:
        names = load_plain_pickle(data, release.meta_file).get(release.names_key, ())
    classes = tuple(n.decode("utf-8", "replace") if isinstance(n, bytes) else str(n) for n in names)
    if len(classes) != num_classes:
        raise DataError(
            f"{release.meta_file!r} names {len(classes)} classes; expected {num_classes}. Get the official release."
        )
    return classes


def _parse_split(
    release: CifarRelease, files: dict[str, bytes], counts: dict[str, int], classes: tuple[str, ...]
) -> ImageSet:
    parse_file = _parse_binary_file if release.is_binary else _parse_pickle_file
    pairs = [parse_file(release, files[name], name, count) for name, count in counts.items()]
    images = torch.from_numpy(np.concatenate([images for images, _ in pairs])).view(-1, 3, 32, 32)
    labels = torch.from_numpy(np.concatenate([labels for _, labels in pairs]))
    return ImageSet(images, labels, classes)


def _parse_binary_file(
    release: CifarRelease, data: bytes, name: str, count: int
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    if len(data) != release.max_file_bytes(name):
        raise DataError(
            f"{name!r} has {len(data)} bytes; {count} images take {release.max_file_bytes(name)}. Get it again."
        )
    rows = np.frombuffer(data, dtype=np.uint8).reshape(count, release.label_bytes + _IMAGE_BYTES)
    # CIFAR-100 has two labels, the coarse one first.
    labels = rows[:, release.label_bytes - 1].astype(np.int64)
    return rows[:, release.label_bytes :].copy(), labels


def _parse_pickle_file(
    release: CifarRelease, data: bytes, name: str, count: int
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    batch = load_plain_pickle(data, name)
    labels = batch.get(release.labels_key)
    if not isinstance(labels, list) or len(labels) != count or not all(_is_int32(n) for n in labels):
        raise DataError(f"{name!r} does not hold {count} labels; get the official release.")
    return to_uint8_array(batch.get(b"data"), (count, _IMAGE_BYTES), name), np.asarray(labels, dtype=np.int64)


def _is_int32(value: Any) -> bool:
    return type(value) is int and abs(value) < 1 << 31
