"""Data sets by name, each with the threat model and augmentation it is usually trained under."""

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deat.data import digits
from deat.data.augment import Augment
from deat.data.statistics import ChannelStats, measure_channel_stats
from deat.data.streaming import AnyImageSet
from deat.errors import UsageError, unknown_name_error
from deat.utils.numbers import is_int_at_least
from deat.utils.paths import anonymize_paths

_CIFAR_MEAN_STD = ((0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616))
_IMAGENET_MEAN_STD = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_MAX_SMALL_SIDE_PIXELS, _MAX_SIDE_PIXELS = 64, 4096
_WORDNET_ID = re.compile(r"n\d{8}")
"""What ImageNet calls its classes, and so do its subsets."""
_CIFAR10_CLASSES = {"airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"}


@dataclass(frozen=True, eq=False)
class DataSplits:
    """A data set: its parts, how to normalise and augment it, and its default threat model."""

    name: str
    train: AnyImageSet
    test: AnyImageSet | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    eps: float
    norm: str = "linf"
    pad: int = 0
    flip: bool = False
    stats_from_train: bool = False
    """Whether mean and std, which nobody has published, are those of the training images."""
    val: AnyImageSet | None = None
    """Images of its own to choose the best epoch, where it has them."""
    fallback_root: Path | None = None
    """The folder it was found in, where that is not the user's own."""

    def __repr__(self) -> str:
        val = f" val={self.val!r}," if self.val else ""
        return f"Corpus({self.name!r}, train={self.train!r}, test={self.test!r},{val} {self.norm} {self.eps:.4g})"

    def statistics(self, train: AnyImageSet) -> ChannelStats | None:
        """What its images are normalised by: published numbers, or those of the part of it that is trained on."""
        known = ChannelStats(self.mean, self.std) if self.mean and self.std else None
        return measure_channel_stats(train) if self.stats_from_train else known

    @property
    def augment(self) -> Augment | None:
        """Crops and flips, where they make sense for the set."""
        return Augment(self.pad, self.flip) if self.pad or self.flip else None

    def digest(self) -> str:
        """The training part's hash, by which a set is known again."""
        return self.train.digest()


@dataclass(frozen=True)
class DatasetInfo:
    """A line about a data set, for people."""

    name: str
    description: str
    images: str
    classes: str
    threat: str


_DATASETS = (
    DatasetInfo("digits", "8x8 grey handwritten digits (UCI), inside the package", "1,397 + 400", "10", "linf 0.15"),
    DatasetInfo("cifar10", "32x32 colour photographs, from disk or --download", "50,000 + 10,000", "10", "linf 8/255"),
    DatasetInfo(
        "cifar100",
        "32x32 colour photographs, from disk or --download",
        "50,000 + 10,000",
        "100",
        "linf 8/255",
    ),
    DatasetInfo(
        "folder:PATH",
        "class folders of images: a directory, .tar, .tar.xz, .tar.gz or .zip",
        "any",
        "any",
        "linf 8/255 up to 64 pixels, 4/255 above",
    ),
)


def list_dataset_infos() -> tuple[DatasetInfo, ...]:
    """Every data set that `load` knows."""
    return _DATASETS


def list_datasets() -> tuple[str, ...]:
    """The names that `load` accepts."""
    return tuple(info.name for info in _DATASETS)


def default_data_root() -> Path:
    """Where data lies unless told: $DEAT_DATA, or .cache/deat in the home folder."""
    return Path(os.environ.get("DEAT_DATA") or Path.home() / ".cache" / "deat")


def load_data(
    spec: str | os.PathLike[str],
    *,
    root: str | Path | None = None,
    download: bool = False,
    size: int | None = None,
    cache: bool = True,
    fallback_root: str | Path | None = None,
) -> DataSplits:
    """The data set a name or a path stands for; nothing is fetched over the network unless download is true.

    root is where data sets lie and decoded images are kept; `also` is one more folder to look for data sets in, into
    which nothing is written.
    """
    where = Path(root) if root is not None else default_data_root()
    spec = _normalize_spec(spec)
    name, _, path = spec.partition(":")
    if name.lower() == "folder" and path:
        _check_size(size)
        return _load_folder(Path(path).expanduser(), where, size, cache)
    if size is not None:
        raise UsageError(f"size={size!r} is for folder:PATH; {spec!r} has a size of its own.")
    if spec.lower() == "digits":
        return DataSplits("digits", *digits.read_digits(), mean=None, std=None, eps=0.15)
    if spec.lower() in ("cifar10", "cifar100"):
        return _load_cifar(spec.lower(), where, Path(fallback_root) if fallback_root is not None else None, download)
    raise unknown_name_error("data", spec, list_datasets(), "A folder of images is folder:PATH.")


def _normalize_spec(spec: Any) -> str:
    """The name, which of a path is folder:PATH."""
    if isinstance(spec, os.PathLike):
        return f"folder:{os.fspath(spec)}"
    if not isinstance(spec, str):
        raise UsageError(f"data has a name, such as {', '.join(list_datasets())}, or a path; {spec!r} is neither.")
    return spec


def _check_size(size: int | None) -> None:
    if size is not None and not (is_int_at_least(size, 1) and size <= _MAX_SIDE_PIXELS):
        raise UsageError(f"size must be a whole number of pixels from 1 to {_MAX_SIDE_PIXELS}, not {size!r}.")


def _load_cifar(name: str, root: Path, fallback_root: Path | None, download: bool) -> DataSplits:
    from deat.data import cifar

    lent = None if cifar.has_release(name, root) else fallback_root
    parts = cifar.read_cifar(name, root, download) if lent is None else cifar.read_cifar(name, lent)
    mean, std = _CIFAR_MEAN_STD
    return DataSplits(name, *parts, mean=mean, std=std, eps=8 / 255, pad=4, flip=True, fallback_root=lent)


def _load_folder(path: Path, root: Path, size: int | None, cache: bool) -> DataSplits:
    from deat.data import image_folder

    parts = image_folder.read_image_folder(path, root / "decoded" if cache else None, size)
    train = parts["train"]
    side = train.shape[-1]
    small = side <= _MAX_SMALL_SIDE_PIXELS
    mean, std = _published_mean_std(train) or (None, None)
    eps, pad = (8 / 255, 4) if small else (4 / 255, side // 8)
    name = anonymize_paths(f"folder:{path.name}")
    found = DataSplits(name, train, parts.get("test"), mean=mean, std=std, eps=eps, pad=pad, flip=True)
    return replace(found, val=parts.get("val"), stats_from_train=mean is None)


def _published_mean_std(train: AnyImageSet) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Mean and standard deviation of a set that its classes show to be a copy of one, or a part of it."""
    if train.shape == (3, 32, 32) and set(train.classes) == _CIFAR10_CLASSES:
        return _CIFAR_MEAN_STD
    return _IMAGENET_MEAN_STD if all(map(_WORDNET_ID.fullmatch, train.classes)) else None
