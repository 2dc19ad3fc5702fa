"""Small data sets, archives and checks for the data tests."""

import hashlib
import io
import os
import pickle
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode

from deat.data import DataSplits, cifar, load_data
from deat.data.image_set import ImageSet

REAL = Path(os.environ.get("DEAT_TEST_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")


def real_set(name: str) -> Path:
    """A real set's archive, or a skip."""
    path = REAL / name
    if not path.is_file():
        pytest.skip(f"{name} is not in the shared data (DEAT_TEST_DATA)")
    return path


def random_set(num: int = 20, classes: int = 4, shape: tuple[int, ...] = (3, 8, 8), seed: int = 0) -> ImageSet:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (num, *shape), generator=generator, dtype=torch.uint8)
    labels = torch.arange(num) % classes
    return ImageSet(images, labels, tuple(f"c{i}" for i in range(classes)))


def numbered_set(num: int = 23) -> ImageSet:
    """A set whose labels are the images' indices."""
    return ImageSet(torch.zeros(num, 1, 2, 2, dtype=torch.uint8), torch.arange(num), tuple(map(str, range(num))))


def png(seed: int = 0, width: int = 8, height: int = 8, suffix: str = "PNG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, suffix)
    return out.getvalue()


def tree(per_class: int = 3, test: str | None = "test", width: int = 8, height: int = 8) -> dict[str, bytes]:
    """Names and contents of a tiny set of two classes."""
    parts = ["train"] + ([test] if test else [])
    names = [f"{p}/{c}/{i}.png" for p in parts for c in ("cat", "dog") for i in range(per_class)]
    return {name: png(seed, width, height) for seed, name in enumerate(names)}


def write_folder(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def add(tar: tarfile.TarFile, name: str, data: bytes = b"", **fields: Any) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    tar.addfile(info, io.BytesIO(data))


def write_tar(path: Path, files: dict[str, bytes], mode: str = "w", folders: Iterable[str] = ()) -> Path:
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, data in files.items():
            add(tar, name, data)
        for folder in folders:
            add(tar, folder, type=tarfile.DIRTYPE)
    return path


def write_zip(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


WRITERS: dict[str, Callable[[Path, dict[str, bytes]], Path]] = {
    "set": write_folder,
    "set.tar": write_tar,
    "set.tar.gz": lambda path, files: write_tar(path, files, "w:gz"),
    "set.tar.xz": lambda path, files: write_tar(path, files, "w:xz"),
    "set.zip": write_zip,
}


def load(path: Path, root: Path, **options: object) -> DataSplits:
    return load_data(f"folder:{path}", root=root, **options)  # type: ignore[arg-type]


def cifar_files(name: str, binary: bool, count: int = 4) -> dict[str, bytes]:
    """The files of a release of CIFAR with `count` images in each."""
    release = cifar.RELEASES[name][0 if binary else 1]
    classes = int(name.removeprefix("cifar"))
    label_names = [f"class{i}" for i in range(classes)]
    files = {release.meta_file: ("\n".join(label_names) + "\n\n").encode()}
    if not binary:
        files[release.meta_file] = pickle.dumps({release.names_key.decode(): label_names}, protocol=2)
    for number, file in enumerate([*release.train, *release.test]):
        rng = np.random.default_rng(number)
        pixels = rng.integers(0, 256, (count, 3072), dtype=np.uint8)
        labels = rng.integers(0, classes, count).tolist()
        pack = _binary_batch if binary else _pickled_batch
        files[file] = pack(release, pixels, labels)
    return files


def _binary_batch(release: cifar.CifarRelease, pixels: Any, labels: list[int]) -> bytes:
    coarse = b"\0" * (release.label_bytes - 1)
    return b"".join(coarse + bytes([y]) + row.tobytes() for y, row in zip(labels, pixels, strict=True))


def _pickled_batch(release: cifar.CifarRelease, pixels: Any, labels: list[int]) -> bytes:
    return pickle.dumps({b"data": pixels, release.labels_key: labels, b"filenames": [b"x.png"]}, protocol=2)


def shrink(monkeypatch: pytest.MonkeyPatch, name: str, archive: bytes | None = None, count: int = 4) -> None:
    """Makes the library expect `count` images a file and, for every archive, this content."""
    known: dict[str, Any] = {}
    if archive is not None:
        known = {"size": len(archive), "sha256": hashlib.sha256(archive).hexdigest()}
    small = tuple(
        replace(r, train=dict.fromkeys(r.train, count), test=dict.fromkeys(r.test, count), **known)
        for r in cifar.RELEASES[name]
    )
    monkeypatch.setitem(cifar.RELEASES, name, small)


def cifar_archive(name: str, binary: bool, path: Path) -> Path:
    release = cifar.RELEASES[name][0 if binary else 1]
    files = {f"{release.folder}/{n}": data for n, data in cifar_files(name, binary).items()}
    return write_tar(path / release.archive, files, "w:gz")


class NoHostReads(TorchDispatchMode):
    """Rejects every operation whose result depends on reading the device from the host."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "_unique", "unique_", "item", "equal")

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(func)
        assert not any(f"aten.{bad}" in name for bad in self.FORBIDDEN), f"host read: {name}"
        if name == "aten.index.Tensor":
            assert all(i is None or i.dtype != torch.bool for i in args[1]), "indexing by a mask"
        return func(*args, **(kwargs or {}))


class Payload:
    """An object whose unpickling would create a marker file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)
