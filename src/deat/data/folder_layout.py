"""Which image files are whose: parts and classes by the folders that they lie in."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from deat.data.archives import is_hidden
from deat.data.decode import IMAGE_SUFFIXES
from deat.errors import DataError
from deat.utils.seeding import derive_seed

_TRAIN_FOLDER = "train"
_EVAL_FOLDERS = ("test", "val", "valid", "validation")
_MAX_LISTED = 5

FilesAndLabels = tuple[Tensor, Tensor]
"""The file numbers and the class numbers of a part's images."""


@dataclass(frozen=True, eq=False)
class FolderLayout:
    """Which file belongs to which part and class."""

    classes: tuple[str, ...]
    parts: dict[str, FilesAndLabels]
    """The parts that there are: train, test, and val, which chooses the best epoch."""
    remarks: tuple[str, ...] = ()
    """What a person is told of it."""


def infer_layout(names: tuple[str, ...], path: str = "") -> FolderLayout:
    """Parts and classes from names: train/CLASS/… and test/CLASS/… (or val, valid), or CLASS/… alone."""
    folders = _strip_outer_folder([tuple(name.split("/")[:-1]) for name in names])
    outermost = {f[0] for f in folders if len(f) > 1}
    _check_train_has_classes({f[0]: len(f) > 1 for f in sorted(folders) if f})
    if _TRAIN_FOLDER not in outermost:
        return _build_layout({_TRAIN_FOLDER: [(i, f[0]) for i, f in enumerate(folders) if f]}, path)
    inside = {part: [(i, f[1]) for i, f in enumerate(folders) if len(f) > 1 and f[0] == part] for part in outermost}
    others = [part for part in _EVAL_FOLDERS if part in outermost]
    mixed = {part: _shuffle_files(names, inside[folder]) for part, folder in _assign_folders(others).items()}
    found = _build_layout({_TRAIN_FOLDER: inside[_TRAIN_FOLDER], **mixed}, path)
    return replace(found, remarks=(*found.remarks, *_unused_folder_messages(others)))


def _assign_folders(others: list[str]) -> dict[str, str]:
    """The folder of each part beside train: the first is the test part, and one beside test/ chooses the best epoch."""
    return dict(zip(("test", "val") if others[:1] == ["test"] else ("test",), others, strict=False))


def _unused_folder_messages(others: list[str]) -> tuple[str, ...]:
    """What is said of folders that could be a part beside those that are."""
    roles = _assign_folders(others)
    used = " and ".join(f"{folder + '/'!r} is the {part} part" for part, folder in roles.items())
    return tuple(f"{folder + '/'!r} is not used, since {used}." for folder in others[len(roles) :])


def _check_train_has_classes(outermost: dict[str, bool]) -> None:
    """Refuses a training part without class folders; by outermost folder, whether images lie deeper in it.

    Beside folders of other names, train is a class, of vehicles say.
    """
    if outermost.get(_TRAIN_FOLDER, True) or not outermost.keys() <= {_TRAIN_FOLDER, *_EVAL_FOLDERS}:
        return
    raise DataError(
        f"the images lie in {_TRAIN_FOLDER + '/'!r} itself, which must hold one folder for each class: {_TRAIN_FOLDER}/CLASS/IMAGE."
    )


def _shuffle_files(names: tuple[str, ...], files: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Files in an order that owes nothing to their classes: the first images of a test set are a fair sample of it."""
    known = sorted(files, key=lambda pair: names[pair[0]])
    generator = torch.Generator().manual_seed(derive_seed(0, "test order"))
    return [known[i] for i in torch.randperm(len(known), generator=generator).tolist()]


def _strip_outer_folder(folders: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The folders without one outer folder around everything, as archives often have."""
    return folders if _find_outer_folder(folders) is None else [f[1:] for f in folders]


def _find_outer_folder(folders: list[tuple[str, ...]]) -> str | None:
    """The one folder around everything, if there is one."""
    outer = {f[0] if f else "" for f in folders}
    wrapped = len(outer) == 1 and _TRAIN_FOLDER not in outer and all(len(f) > 1 for f in folders)
    return outer.pop() if wrapped else None


def _build_layout(splits: dict[str, list[tuple[int, str]]], path: str) -> FolderLayout:
    if not splits[_TRAIN_FOLDER]:
        raise DataError(
            f"found no images in class folders of {path!r}; expected train/CLASS/IMAGE or CLASS/IMAGE, of "
            f"{', '.join(IMAGE_SUFFIXES)}."
        )
    classes = tuple(sorted({c for _, c in splits[_TRAIN_FOLDER]}))
    number = {c: i for i, c in enumerate(classes)}
    remarks = [
        text for part, pairs in splits.items() for text in _missing_class_messages(part, {c for _, c in pairs}, classes)
    ]
    return FolderLayout(classes, {part: _to_tensors(pairs, number) for part, pairs in splits.items()}, tuple(remarks))


def _missing_class_messages(part: str, seen: set[str], classes: tuple[str, ...]) -> Iterator[str]:
    """What is said of classes that are trained on and a part lacks; one that is not trained on is refused."""
    strange = sorted(seen.difference(classes))
    if strange:
        raise DataError(
            f"the {part} part has the class {strange[0]!r}, which the training part does not have. Put images of it "
            f"into {_TRAIN_FOLDER + '/'!r}, or take it out of the {part} part."
        )
    missing = [c for c in classes if c not in seen]
    if missing:
        yield (
            f"the {part} part has no images of {_format_names(missing)}, so accuracy on it says nothing of "
            f"{'these classes' if missing[1:] else 'this class'}. Put images there, or remove it from train/."
        )


def _to_tensors(files: Iterable[tuple[int, str]], class_index: dict[str, int]) -> FilesAndLabels:
    pairs = np.array([(i, class_index[c]) for i, c in files], dtype=np.int64)
    return torch.from_numpy(pairs[:, 0].copy()), torch.from_numpy(pairs[:, 1].copy())


def check_empty_class_folders(names: Sequence[str], folders: Sequence[str]) -> list[str]:
    """Refuses a class folder without images whose class another part has images of; what to say of any other."""
    holding = {_parent_folder(name) for name in names}
    filled = {folder for inner in holding for folder in _iter_ancestors(inner)}
    places = _find_class_folder_parents(holding, folders, filled)
    vacant = [f for f in folders if f not in filled and _parent_folder(f) in places and not is_hidden(f)]
    known = {_base_name(folder) for folder in filled if _parent_folder(folder) in places}
    missing = [folder for folder in vacant if _base_name(folder) in known]
    if missing:
        raise DataError(
            f"{_describe_class_folders(missing)} without an image, and another part has images of that class. Put images there "
            f"({', '.join(IMAGE_SUFFIXES)}), or remove the class from both parts."
        )
    if not vacant:
        return []
    return [
        f"{_describe_class_folders(vacant)} without an image, so that is no class, and the others are numbered without it. Put "
        f"images there ({', '.join(IMAGE_SUFFIXES)}), or remove the folder."
    ]


def _find_class_folder_parents(holding: set[str], folders: Sequence[str], filled: set[str]) -> set[str]:
    """The folders that hold class folders; none where there are no images at all."""
    if not filled:
        return set()
    outer = _find_outer_folder([tuple(folder.split("/")) for folder in holding])
    base = "" if outer is None or _TRAIN_FOLDER in folders else f"{outer}/"
    if f"{base}{_TRAIN_FOLDER}" not in folders:
        return {base.rstrip("/")}
    others = [part for part in _EVAL_FOLDERS if f"{base}{part}" in folders]
    used = [part for part in others if f"{base}{part}" in filled]
    return {f"{base}{part}" for part in (_TRAIN_FOLDER, *(_assign_folders(used).values() or others))}


def _parent_folder(path: str) -> str:
    return path.rpartition("/")[0]


def _base_name(path: str) -> str:
    return path.rpartition("/")[2]


def _iter_ancestors(folder: str) -> Iterator[str]:
    """A folder and those that it lies in."""
    while folder:
        yield folder
        folder = _parent_folder(folder)


def _describe_class_folders(folders: list[str]) -> str:
    return f"{_format_names(folders)}: {'class folders' if folders[1:] else 'a class folder'}"


def _format_names(names: list[str]) -> str:
    """A few of the names, and how many more there are."""
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return f"{', '.join(map(repr, names[:_MAX_LISTED]))}{more}"
