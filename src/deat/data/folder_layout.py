"""Which split and class each image file belongs to, by the folders it is in."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from posixpath import basename, dirname

import numpy as np
import torch
from torch import Tensor

from deat.data.image_archives import is_hidden
from deat.data.image_decoding import IMAGE_SUFFIXES
from deat.errors import DataError
from deat.utils.seeding import derive_seed
from deat.utils.text import format_names

_TRAIN_FOLDER = "train"
_EVAL_FOLDERS = ("test", "val", "valid", "validation")

FilesAndLabels = tuple[Tensor, Tensor]
"""The file indices and the class numbers of a split's images."""


@dataclass(frozen=True, eq=False)
class FolderLayout:
    """Which file belongs to which split and class.

    Attributes:
        classes: Names of the classes, sorted.
        splits: The images of "train" and, if there are any, of "test" and "val".
        messages: Warnings for the user.
    """

    classes: tuple[str, ...]
    splits: dict[str, FilesAndLabels]
    messages: tuple[str, ...] = ()


def infer_layout(names: tuple[str, ...], path: str = "") -> FolderLayout:
    """Infer splits and classes from the paths of image files.

    Accepted are train/CLASS/IMAGE with test/CLASS/IMAGE (or val, valid or validation), and CLASS/IMAGE, with or without
    one folder around everything. If there are two folders besides train, the first one of test, val, valid and
    validation is the test split; the second one is the val split if the first one is test.

    Args:
        names: Paths of the image files.
        path: The folder or archive with the files, for messages.

    Returns:
        The layout. The training images stay in their order; those of other splits are shuffled, so that the first ones
        are a fair sample.

    Raises:
        DataError: If there are no class folders, or a split has a class that the training split does not have.
    """
    folders = _strip_outer_folder([tuple(name.split("/")[:-1]) for name in names])
    outermost = {folder[0] for folder in folders if len(folder) > 1}
    _check_train_has_classes({folder[0]: len(folder) > 1 for folder in sorted(folders) if folder})
    if _TRAIN_FOLDER not in outermost:
        return _build_layout({"train": [(i, folder[0]) for i, folder in enumerate(folders) if folder]}, path)
    files = {
        name: [(i, folder[1]) for i, folder in enumerate(folders) if len(folder) > 1 and folder[0] == name]
        for name in outermost
    }
    eval_folders = [name for name in _EVAL_FOLDERS if name in outermost]
    splits = {split: _shuffle_files(names, files[name]) for split, name in _assign_folders(eval_folders).items()}
    return _build_layout(
        {"train": files[_TRAIN_FOLDER], **splits}, path, messages=_unused_folder_messages(eval_folders)
    )


def _assign_folders(eval_folders: list[str]) -> dict[str, str]:
    """Assign folders to the test and val splits; only a folder besides test/ is a val split."""
    splits = ("test", "val") if eval_folders[:1] == ["test"] else ("test",)
    return dict(zip(splits, eval_folders, strict=False))


def _unused_folder_messages(eval_folders: list[str]) -> tuple[str, ...]:
    assigned = _assign_folders(eval_folders)
    used = " and ".join(f"{folder + '/'!r} is the {split} split" for split, folder in assigned.items())
    return tuple(f"{folder + '/'!r} is not used, since {used}." for folder in eval_folders[len(assigned) :])


def _check_train_has_classes(has_subfolders: dict[str, bool]) -> None:
    """Raise DataError if images are directly in train/; the argument has the outermost folders of all images."""
    # Next to folders of other names, train/ is a class, for example of vehicles.
    if has_subfolders.get(_TRAIN_FOLDER, True) or not has_subfolders.keys() <= {_TRAIN_FOLDER, *_EVAL_FOLDERS}:
        return
    raise DataError(
        f"the images are in {_TRAIN_FOLDER + '/'!r} itself, which must have one folder for each class: "
        f"{_TRAIN_FOLDER}/CLASS/IMAGE."
    )


def _shuffle_files(names: tuple[str, ...], files: list[tuple[int, str]]) -> list[tuple[int, str]]:
    by_name = sorted(files, key=lambda pair: names[pair[0]])
    generator = torch.Generator().manual_seed(derive_seed(0, "test order"))
    return [by_name[i] for i in torch.randperm(len(by_name), generator=generator).tolist()]


def _strip_outer_folder(folders: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    return folders if _find_outer_folder(folders) is None else [folder[1:] for folder in folders]


def _find_outer_folder(folders: list[tuple[str, ...]]) -> str | None:
    """Return the one folder around everything, as archives often have, if there is one."""
    outermost = {folder[0] if folder else "" for folder in folders}
    is_wrapped = len(outermost) == 1 and _TRAIN_FOLDER not in outermost and all(len(folder) > 1 for folder in folders)
    return outermost.pop() if is_wrapped else None


def _build_layout(splits: dict[str, list[tuple[int, str]]], path: str, messages: tuple[str, ...] = ()) -> FolderLayout:
    if not splits["train"]:
        raise DataError(
            f"found no images in class folders of {path!r}; expected train/CLASS/IMAGE or CLASS/IMAGE, of "
            f"{', '.join(IMAGE_SUFFIXES)}."
        )
    classes = tuple(sorted({name for _, name in splits["train"]}))
    class_index = {name: i for i, name in enumerate(classes)}
    missing = [
        text for split, files in splits.items() for text in _check_classes(split, {name for _, name in files}, classes)
    ]
    tensors = {split: _to_tensors(files, class_index) for split, files in splits.items()}
    return FolderLayout(classes, tensors, (*missing, *messages))


def _check_classes(split: str, split_classes: set[str], classes: tuple[str, ...]) -> Iterator[str]:
    """Yield a warning about classes that a split lacks; raise DataError for one that only this split has."""
    unknown = sorted(split_classes.difference(classes))
    if unknown:
        raise DataError(
            f"the {split} split has the class {unknown[0]!r}, which the training split does not have. Add images of it "
            f"to {_TRAIN_FOLDER + '/'!r}, or remove it from the {split} split."
        )
    missing = [name for name in classes if name not in split_classes]
    if missing:
        yield (
            f"the {split} split has no images of {format_names(missing)}, so accuracy on it does not cover "
            f"{'these classes' if missing[1:] else 'this class'}. Add images there, or remove it from train/."
        )


def _to_tensors(files: Iterable[tuple[int, str]], class_index: dict[str, int]) -> FilesAndLabels:
    pairs = np.array([(i, class_index[name]) for i, name in files], dtype=np.int64)
    return torch.from_numpy(pairs[:, 0].copy()), torch.from_numpy(pairs[:, 1].copy())


def check_empty_class_folders(names: Sequence[str], folders: Sequence[str]) -> list[str]:
    """Check for class folders without images.

    Args:
        names: Paths of the image files.
        folders: Paths of all folders, with or without images.

    Returns:
        A warning if there are such folders, else an empty list.

    Raises:
        DataError: If another split has images of such a class.
    """
    image_folders = {dirname(name) for name in names}
    non_empty_folders = {ancestor for folder in image_folders for ancestor in _iter_ancestors(folder)}
    parents = _find_class_folder_parents(image_folders, folders, non_empty_folders)
    empty_folders = [
        folder
        for folder in folders
        if folder not in non_empty_folders and dirname(folder) in parents and not is_hidden(folder)
    ]
    classes = {basename(folder) for folder in non_empty_folders if dirname(folder) in parents}
    missing = [folder for folder in empty_folders if basename(folder) in classes]
    suffixes = ", ".join(IMAGE_SUFFIXES)
    if missing:
        classes_text = "these classes" if missing[1:] else "this class"
        raise DataError(
            f"{_describe_empty_folders(missing)}, but another split has images of {classes_text}. Add images ({suffixes}), "
            f"or remove {classes_text} from both splits."
        )
    if not empty_folders:
        return []
    pronoun = "them" if empty_folders[1:] else "it"
    return [
        f"{_describe_empty_folders(empty_folders)}, so classes are numbered without {pronoun}. Add images ({suffixes}), "
        f"or remove {pronoun}."
    ]


def _describe_empty_folders(folders: list[str]) -> str:
    names = format_names(folders)
    return f"the class folders {names} have no images" if folders[1:] else f"the class folder {names} has no images"


def _find_class_folder_parents(
    image_folders: set[str], folders: Sequence[str], non_empty_folders: set[str]
) -> set[str]:
    """Return the folders whose subfolders are classes; none if there are no images at all."""
    if not non_empty_folders:
        return set()
    outer = _find_outer_folder([tuple(folder.split("/")) for folder in image_folders])
    prefix = "" if outer is None or _TRAIN_FOLDER in folders else f"{outer}/"
    if f"{prefix}{_TRAIN_FOLDER}" not in folders:
        return {prefix.rstrip("/")}
    eval_folders = [name for name in _EVAL_FOLDERS if f"{prefix}{name}" in folders]
    used = [name for name in eval_folders if f"{prefix}{name}" in non_empty_folders]
    return {f"{prefix}{name}" for name in (_TRAIN_FOLDER, *(_assign_folders(used).values() or eval_folders))}


def _iter_ancestors(folder: str) -> Iterator[str]:
    """Iterate over a folder and the folders around it."""
    while folder:
        yield folder
        folder = dirname(folder)
