"""Data sets by name, each with its usual threat model, augmentation and normalisation."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deat.data import digits
from deat.data.augment import Augment
from deat.data.channel_stats import ChannelStats, measure_channel_stats
from deat.data.csv_tables import TableEncoding, read_table
from deat.data.hugging_face import is_hugging_face, is_hugging_face_dict, read_hugging_face
from deat.data.image_archives import ALL_ARCHIVE_SUFFIXES
from deat.data.image_label_checks import UNIT_BOX, Box
from deat.data.image_set import ImageSet
from deat.data.streaming import AnyImageSet
from deat.data.train_subset import take_train_images
from deat.errors import UsageError, unknown_name_error
from deat.tasks import CLASSIFICATION, Classification, Segmentation, Task, get_task
from deat.utils.anonymize_paths import anonymize_paths
from deat.utils.notebook_html import render_html
from deat.utils.numbers import is_int_at_least
from deat.utils.user_paths import expand_path, find_home

HuggingFaceData = Any
"""A Dataset or DatasetDict of Hugging Face datasets, which is not imported for its type."""
_CIFAR_MEAN_STD = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}
_IMAGENET_MEAN_STD = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_MAX_SMALL_SIDE_PIXELS, _MAX_SIDE_PIXELS = 64, 4096
_WORDNET_ID = re.compile(r"n\d{8}")  # the class names of ImageNet and its subsets
_CIFAR10_CLASSES = {"airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"}


@dataclass(frozen=True, eq=False)
class DataSplits:
    """A data set: its images by split, and how it is usually normalised, augmented and attacked.

    `deat.load_data` returns it. `deat.fit` takes it whole, and then uses its threat model, augmentation and validation
    images; or pass `train` alone to use none of them.

    Attributes:
        name: The name it was loaded by, such as "cifar10" or "folder:photos".
        train: The training images.
        test: The test images; None if a folder has none.
        mean: The published mean of each channel, if known.
        std: The published standard deviation of each channel, if known.
        eps: The radius of its usual threat model.
        norm: The norm of its usual threat model: "linf", "l2" or "l1".
        pad: The padding of random crops in pixels; 0 for no crops.
        flip: Whether images may be mirrored.
        stats_from_train: Whether to normalise by the mean and standard deviation of the training images, because
            none are published.
        val: Its own images for choosing the best epoch; None if it has none.
        fallback_root: The folder it was read from if that is not the user's own data folder, else None.
        box: The range of values, which the threat model has too; None for no bounds.
        scale: The unit of each feature in the threat model; None for 1.
        mutable: Whether each feature can change; None if all can.
        table: How the columns of a table became numbers; None for other data.
        n_train: How many training images were chosen of a larger set; None for all.

    Example:
        >>> digits = deat.load_data("digits")
        >>> digits.train, digits.eps
        (ImageSet(1,397 of 1x8x8, 10 classes), 0.15)
        >>> result = deat.fit(model, digits)
    """

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
    val: AnyImageSet | None = None
    fallback_root: Path | None = None
    box: Box = UNIT_BOX
    scale: tuple[float, ...] | None = None
    mutable: tuple[bool, ...] | None = None
    table: TableEncoding | None = None
    n_train: int | None = None

    def __repr__(self) -> str:
        val = f" val={self.val!r}," if self.val else ""
        return f"DataSplits({self.name!r}, train={self.train!r}, test={self.test!r},{val} {self.norm} {self.eps:.4g})"

    def _repr_html_(self) -> str:
        parts = {"train": self.train, "val": self.val, "test": self.test}
        rows = [(name, repr(part)) for name, part in parts.items() if part is not None]
        usual = [f"usual threat model: {self.threat}", f"usual augmentation: {self.augment or 'none'}"]
        images = self.train.pick_examples() if isinstance(self.train, ImageSet) else []
        return render_html(self.name, usual, header=("part", "images"), rows=rows, images=images)

    def channel_stats(self, train: AnyImageSet, *, on_request: bool = False) -> ChannelStats | None:
        """Return the mean and standard deviation to normalise by.

        Args:
            train: The images that are trained on, which may be fewer than `self.train`.
            on_request: Whether a normalisation was asked for, so that there is one for every data set.

        Returns:
            The published statistics, or else those of `train` on request or if `stats_from_train` is set; None if the
            data set is not normalised.
        """
        if not self.stats_from_train and self.mean and self.std:
            return ChannelStats(self.mean, self.std)
        return measure_channel_stats(train) if self.stats_from_train or on_request else None

    @property
    def threat(self) -> str:
        """The default threat model as text, such as "linf:0.15"."""
        return f"{self.norm}:{self.eps!r}"

    @property
    def task(self) -> Task:
        """What the labels mean."""
        return self.train.task if isinstance(self.train, ImageSet) else CLASSIFICATION

    @property
    def features(self) -> dict[str, Any]:
        """What a threat model that is given as text takes from the data: box, scale and mutable features."""
        return {"box": self.box, "scale": self.scale, "mutable": self.mutable}

    @property
    def augment(self) -> Augment | None:
        """Its usual crops and flips, None for none."""
        return Augment(self.pad, self.flip) if self.pad or self.flip else None


@dataclass(frozen=True)
class DatasetInfo:
    """A description of a data set for `deat list data`.

    Attributes:
        name: The name that `load_data` takes.
        description: What the images are and where they come from.
        images: Number of training and test images.
        classes: Number of classes.
        threat: The usual threat model.
    """

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
    DatasetInfo(
        "webdataset:PATH",
        "shards of images with class numbers: a folder of .tar files, or a pattern",
        "any",
        "any",
        "as folder:PATH",
    ),
    DatasetInfo(
        "audio:PATH",
        "class folders of wav files, mono, cut or padded to --size samples",
        "any",
        "any",
        "linf 0.005 in [-1, 1]",
    ),
    DatasetInfo(
        "segmentation:PATH",
        "images and masks: PART/images/NAME.png with PART/labels/NAME.png",
        "any",
        "any",
        "linf 4/255",
    ),
    DatasetInfo(
        "csv:FILE",
        "a table: numbers, and categories that stay fixed; the target is --target COLUMN",
        "any",
        "any, or a number",
        "linf 0.1 deviations",
    ),
)


def list_dataset_infos() -> tuple[DatasetInfo, ...]:
    """Return a description of every data set that `load_data` knows."""
    return _DATASETS


def list_datasets() -> tuple[str, ...]:
    """Return the names that `load_data` takes."""
    return tuple(info.name for info in _DATASETS)


def load_data(
    spec: "str | os.PathLike[str] | HuggingFaceData",
    *,
    root: str | Path | None = None,
    download: bool = False,
    size: int | None = None,
    cache: bool = True,
    fallback_root: str | Path | None = None,
    target: str | None = None,
    task: str | Task | None = None,
    table: TableEncoding | None = None,
    n_train: int | None = None,
    image: str | None = None,
    label: str | None = None,
) -> DataSplits:
    """Load a data set by its name, or a folder of images, wav files or masks, or a table by its path.

    Args:
        spec: "digits", "cifar10", "cifar100" ("cifar10:PATH" if it is in the folder PATH), or "folder:PATH" for images
            in class folders, where PATH is a directory, a tar or a zip archive. A `pathlib.Path` is a folder, too, and
            so is the path of an existing one without folder:, unless it is one of the names. "audio:PATH" has class
            folders of wav files, "segmentation:PATH" images and masks, "csv:FILE" a table, "webdataset:PATH" shards: a
            folder of tar files or a pattern such as train-{000..099}.tar. Also a Dataset or DatasetDict of Hugging Face
            datasets.
        root: The folder with data sets, which decoded images are cached in as well. By default the environment variable
            DEAT_DATA, or ~/.cache/deat.
        download: Whether to download CIFAR if it is not in `root`. Nothing else uses the network.
        size: Side in pixels that the images of a folder are resized to. By default images of one size keep it if all
            of them fit in memory (4 GiB); others become 224x224. For audio, the number of samples of a recording; by
            default the median.
        cache: Whether to save the decoded images of a folder, so that it loads faster the next time.
        fallback_root: A second folder to look for CIFAR in. Nothing is written to it.
        target: The column of a table that is to be predicted.
        task: What labels mean, where the data can be read in several ways: "regression" or "classification" for a
            table, `deat.tasks.Segmentation(ignore_index=11)` for masks. By default it is found in the data.
        table: `DataSplits.table` of the data that a network was trained on, to read another table as that was read: with
            the same categories, classes, and units of features and targets.
        n_train: Number of training images to use, chosen at random so that each class keeps its share. The choice
            depends on no seed, and a smaller number is a part of a larger one. By default all.
        image: The column of images of a Hugging Face data set, if it has several.
        label: The column of labels, if it has several or they are plain numbers.

    Returns:
        The images by split, with their usual threat model, augmentation and normalisation.

    Raises:
        UsageError: If the name is unknown, or `size` or `n_train` is out of range or not for this data set.
        DataError: If the data set is missing, damaged or not laid out as expected.

    Example:
        >>> photos = deat.load_data("folder:photos.zip", size=64)
        >>> result = deat.fit(model, photos)
    """
    if is_hugging_face(spec) or is_hugging_face_dict(spec):
        _check_size(size)
        splits = _make_image_splits("datasets", read_hugging_face(spec, size, image, label))
    elif image is not None or label is not None:
        raise UsageError(f"image and label name the columns of a data set of the library datasets, not of {spec!r}.")
    else:
        name, root = split_data_root(name_path_kind(spec), root)
        splits = _load_splits(name, root, download, size, cache, fallback_root, target, task, table)
    if n_train is None:
        return splits
    return replace(splits, train=take_train_images(splits.train, n_train), n_train=int(n_train))


def split_data_root(spec: str, root: str | Path | None) -> tuple[str, str | Path | None]:
    """Split the name of a data set from the folder that it is in: "cifar10:PATH" is "cifar10" in PATH.

    Args:
        spec: The name or the path of data.
        root: The folder of data sets that was given beside it, if any.

    Returns:
        The spec without a folder, and the folder of data sets.

    Raises:
        UsageError: If two folders are given.
    """
    name, _, path = spec.partition(":")
    if name.lower() not in _CIFAR_MEAN_STD or not path:
        return spec, root
    if root is not None:
        raise UsageError(f"{spec!r} names the folder of the data, and the data root {str(root)!r} does too. Give one.")
    return name, str(expand_path(path))


def adapt_data(data: Any) -> Any:
    """Convert a data set of Hugging Face, a DatasetDict to a DataSplits and a Dataset to its images; else return it."""
    if is_hugging_face_dict(data):
        return load_data(data)
    return read_hugging_face(data)["train"] if is_hugging_face(data) else data


def _load_splits(
    spec: str,
    root: str | Path | None,
    download: bool,
    size: int | None,
    cache: bool,
    fallback_root: str | Path | None,
    target: str | None,
    task: str | Task | None,
    table: TableEncoding | None = None,
) -> DataSplits:
    """The whole data set."""
    data_root = Path(root) if root is not None else _default_data_root()
    name, _, path = spec.partition(":")
    kind = None if task is None else get_task(task)
    if target is not None and name.lower() != "csv":
        raise UsageError(f"target={target!r} is the column of a table, csv:FILE; {spec!r} has none. Omit target.")
    if name.lower() == "csv" and path:
        return _load_table(expand_path(path), size, target, kind, table)
    if name.lower() in _LOADERS_BY_KIND and path:
        return _LOADERS_BY_KIND[name.lower()](expand_path(path), size, target, kind)
    if kind not in (None, CLASSIFICATION):
        raise UsageError(f"{spec!r} is for classification, not for the task {kind}. Omit task, or use other data.")
    if name.lower() == "folder" and path:
        _check_size(size)
        return _load_folder(expand_path(path), data_root, size, cache)
    if size is not None:
        raise UsageError(f"size={size!r} is for folder:PATH and audio:PATH; {spec!r} has a fixed size. Omit size.")
    if spec.lower() == "digits":
        return DataSplits("digits", *digits.read_digits(), mean=None, std=None, eps=0.15)
    if spec.lower() in _NAMES:
        fallback = Path(fallback_root) if fallback_root is not None else None
        return _load_cifar(spec.lower(), data_root, fallback, download)
    raise unknown_name_error("data", spec, list_datasets(), "A folder of images is folder:PATH, a table csv:FILE.")


def _default_data_root() -> Path:
    return Path(os.environ.get("DEAT_DATA") or (find_home() or Path()) / ".cache" / "deat")


def name_path_kind(spec: Any) -> str:
    """Put folder: before a path, and return a name as it is.

    Args:
        spec: What `load_data` takes. Text is a path if it is no name of a data set and such a folder or archive exists.

    Raises:
        UsageError: If it is neither text nor a path.
    """
    if isinstance(spec, os.PathLike):
        return f"folder:{os.fspath(spec)}"
    if not isinstance(spec, str):
        raise UsageError(f"data must be a name, such as {', '.join(list_datasets())}, or a path, not {spec!r}.")
    is_name = spec.lower() in _NAMES or spec.partition(":")[0].lower() in ("folder", *_LOADERS_BY_KIND)
    return f"folder:{spec}" if not is_name and _is_folder_or_archive(spec) else spec


def _is_folder_or_archive(text: str) -> bool:
    path = expand_path(text)
    try:
        return path.is_dir() or (path.is_file() and path.name.lower().endswith(ALL_ARCHIVE_SUFFIXES))
    except (OSError, ValueError):  # no file system takes it as a name
        return False


def _check_size(size: int | None) -> None:
    if size is not None and not (is_int_at_least(size, 1) and size <= _MAX_SIDE_PIXELS):
        raise UsageError(f"size must be a whole number of pixels from 1 to {_MAX_SIDE_PIXELS}, not {size!r}.")


def _load_cifar(name: str, root: Path, fallback_root: Path | None, download: bool) -> DataSplits:
    from deat.data import cifar

    fallback = None if cifar.find_release(name, root) else fallback_root
    splits = cifar.read_cifar(name, fallback) if fallback else cifar.read_cifar(name, root, download)
    mean, std = _CIFAR_MEAN_STD[name]
    return DataSplits(name, *splits, mean=mean, std=std, eps=8 / 255, pad=4, flip=True, fallback_root=fallback)


def _load_folder(path: Path, root: Path, size: int | None, cache: bool) -> DataSplits:
    from deat.data import image_folder

    splits = image_folder.read_image_folder(path, root / "decoded" if cache else None, size)
    return _make_image_splits(f"folder:{path.name}", splits)


def _make_image_splits(name: str, splits: Mapping[str, AnyImageSet]) -> DataSplits:
    """A data set of photographs, with the usual threat model and augmentation of their size."""
    train = splits["train"]
    side = train.shape[-1]
    is_small = side <= _MAX_SMALL_SIDE_PIXELS
    mean, std = _published_mean_std(train) or (None, None)
    return DataSplits(
        anonymize_paths(name),
        train,
        splits.get("test"),
        mean=mean,
        std=std,
        eps=8 / 255 if is_small else 4 / 255,
        pad=4 if is_small else side // 8,
        flip=True,
        stats_from_train=mean is None,
        val=splits.get("val"),
    )


def _load_shards(path: Path, size: int | None, target: str | None, task: Task | None) -> DataSplits:
    from deat.data import webdataset_shards

    _check_task("webdataset:PATH", task, Classification)
    _check_size(size)
    return _make_image_splits(f"webdataset:{path.name}", webdataset_shards.read_shards(path, size))


def _load_audio(path: Path, size: int | None, target: str | None, task: Task | None) -> DataSplits:
    from deat.data import wav_folder

    _check_task("audio:PATH", task, Classification)
    if size is not None and not is_int_at_least(size, 1):
        raise UsageError(f"size must be a whole number of samples of at least 1, not {size!r}.")
    splits = wav_folder.read_wav_folder(path, size)
    return _make_splits("audio", path, splits, eps=0.005, box=wav_folder.AUDIO_BOX)


def _load_masks(path: Path, size: int | None, target: str | None, task: Task | None) -> DataSplits:
    from deat.data import mask_folder

    if size is not None:
        raise UsageError(f"size={size!r} is for folder:PATH and audio:PATH; images and masks are read as they are.")
    _check_task("segmentation:PATH", task, Segmentation)
    splits = mask_folder.read_mask_folder(path, task if isinstance(task, Segmentation) else None)
    return _make_splits("segmentation", path, splits, eps=4 / 255, stats_from_train=True)


def _load_table(
    path: Path, size: int | None, target: str | None, task: Task | None, encoding: TableEncoding | None
) -> DataSplits:
    if size is not None:
        raise UsageError(f"size={size!r} is for folder:PATH and audio:PATH; a table has none.")
    table = read_table(path, target, task, encoding)
    mutable = table.encoding.mutable
    features = {"box": None, "scale": table.encoding.scale, "mutable": None if all(mutable) else mutable}
    return _make_splits("csv", path, table.splits, eps=0.1, stats_from_train=True, table=table.encoding, **features)


def _check_task(kind: str, task: Task | None, expected: type[Task]) -> None:
    if task is not None and not isinstance(task, expected):
        raise UsageError(f"{kind} is for the task {expected.name}, not for {task}. Omit task, or use other data.")


def _make_splits(kind: str, path: Path, splits: Mapping[str, ImageSet], **options: Any) -> DataSplits:
    name = anonymize_paths(f"{kind}:{path.name}")
    return DataSplits(name, splits["train"], splits.get("test"), mean=None, std=None, val=splits.get("val"), **options)


_NAMES = ("digits", *_CIFAR_MEAN_STD)
_LOADERS_BY_KIND = {
    "audio": _load_audio,
    "segmentation": _load_masks,
    "webdataset": _load_shards,
}


def _published_mean_std(train: AnyImageSet) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Return the published statistics of a data set that its class names show to be CIFAR-10 or from ImageNet."""
    if train.shape == (3, 32, 32) and set(train.classes) == _CIFAR10_CLASSES:
        return _CIFAR_MEAN_STD["cifar10"]
    return _IMAGENET_MEAN_STD if all(map(_WORDNET_ID.fullmatch, train.classes)) else None
