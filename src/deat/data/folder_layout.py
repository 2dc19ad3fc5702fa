"""Which image files are whose: parts and classes by the folders that they lie in."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from deat.data.archives import is_hidden
from deat.data.decode import SUFFIXES
from deat.errors import DataError
from deat.utils.seeding import derive

_TRAIN = "train"
_OTHERS = ("test", "val", "valid", "validation")
_SHOWN = 5

Members = tuple[Tensor, Tensor]
"""The file numbers and the class numbers of a part's images."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Which file belongs to which part and class."""

    classes: tuple[str, ...]
    parts: dict[str, Members]
    """The parts that there are: train, test, and val, which chooses the best epoch."""
    remarks: tuple[str, ...] = ()
    """What a person is told of it."""


def arrange(names: tuple[str, ...], place: str = "") -> Layout:
    """Parts and classes from names: train/CLASS/… and test/CLASS/… (or val, valid), or CLASS/… alone."""
    folders = _strip([tuple(name.split("/")[:-1]) for name in names])
    outermost = {f[0] for f in folders if len(f) > 1}
    _check_classes({f[0]: len(f) > 1 for f in sorted(folders) if f})
    if _TRAIN not in outermost:
        return _layout({_TRAIN: [(i, f[0]) for i, f in enumerate(folders) if f]}, place)
    inside = {part: [(i, f[1]) for i, f in enumerate(folders) if len(f) > 1 and f[0] == part] for part in outermost}
    others = [part for part in _OTHERS if part in outermost]
    mixed = {part: _mixed(names, inside[folder]) for part, folder in _roles(others).items()}
    found = _layout({_TRAIN: inside[_TRAIN], **mixed}, place)
    return replace(found, remarks=(*found.remarks, *_unused(others)))


def _roles(others: list[str]) -> dict[str, str]:
    """The folder of each part beside train: the first is the test part, and one beside test/ chooses the best epoch."""
    return dict(zip(("test", "val") if others[:1] == ["test"] else ("test",), others, strict=False))


def _unused(others: list[str]) -> tuple[str, ...]:
    """What is said of folders that could be a part beside those that are."""
    roles = _roles(others)
    used = " and ".join(f"{folder + '/'!r} is the {part} part" for part, folder in roles.items())
    return tuple(f"{folder + '/'!r} is not used, since {used}." for folder in others[len(roles) :])


def _check_classes(outermost: dict[str, bool]) -> None:
    """Refuses a training part without class folders; by outermost folder, whether images lie deeper in it.

    Beside folders of other names, train is a class, of vehicles say.
    """
    if outermost.get(_TRAIN, True) or not outermost.keys() <= {_TRAIN, *_OTHERS}:
        return
    raise DataError(
        f"the images lie in {_TRAIN + '/'!r} itself, which must hold one folder for each class: {_TRAIN}/CLASS/IMAGE."
    )


def _mixed(names: tuple[str, ...], found: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Files in an order that owes nothing to their classes: the first images of a test set are a fair sample of it."""
    known = sorted(found, key=lambda pair: names[pair[0]])
    generator = torch.Generator().manual_seed(derive(0, "test order"))
    return [known[i] for i in torch.randperm(len(known), generator=generator).tolist()]


def _strip(folders: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The folders without one outer folder around everything, as archives often have."""
    return folders if _outer(folders) is None else [f[1:] for f in folders]


def _outer(folders: list[tuple[str, ...]]) -> str | None:
    """The one folder around everything, if there is one."""
    outer = {f[0] if f else "" for f in folders}
    wrapped = len(outer) == 1 and _TRAIN not in outer and all(len(f) > 1 for f in folders)
    return outer.pop() if wrapped else None


def _layout(found: dict[str, list[tuple[int, str]]], place: str) -> Layout:
    if not found[_TRAIN]:
        raise DataError(
            f"found no images in class folders of {place!r}; expected train/CLASS/IMAGE or CLASS/IMAGE, of "
            f"{', '.join(SUFFIXES)}."
        )
    classes = tuple(sorted({c for _, c in found[_TRAIN]}))
    number = {c: i for i, c in enumerate(classes)}
    remarks = [text for part, pairs in found.items() for text in _missing(part, {c for _, c in pairs}, classes)]
    return Layout(classes, {part: _numbers(pairs, number) for part, pairs in found.items()}, tuple(remarks))


def _missing(part: str, seen: set[str], classes: tuple[str, ...]) -> Iterator[str]:
    """What is said of classes that are trained on and a part lacks; one that is not trained on is refused."""
    strange = sorted(seen.difference(classes))
    if strange:
        raise DataError(
            f"the {part} part has the class {strange[0]!r}, which the training part does not have. Put images of it "
            f"into {_TRAIN + '/'!r}, or take it out of the {part} part."
        )
    missing = [c for c in classes if c not in seen]
    if missing:
        yield (
            f"the {part} part has no images of {_first(missing)}, so accuracy on it says nothing of "
            f"{'these classes' if missing[1:] else 'this class'}. Put images there, or remove it from train/."
        )


def _numbers(found: Iterable[tuple[int, str]], number: dict[str, int]) -> Members:
    pairs = np.array([(i, number[c]) for i, c in found], dtype=np.int64)
    return torch.from_numpy(pairs[:, 0].copy()), torch.from_numpy(pairs[:, 1].copy())


def check_filled(names: Sequence[str], folders: Sequence[str]) -> list[str]:
    """Refuses a class folder without images whose class another part has images of; what to say of any other."""
    holding = {_above(name) for name in names}
    filled = {folder for inner in holding for folder in _upwards(inner)}
    places = _places(holding, folders, filled)
    vacant = [f for f in folders if f not in filled and _above(f) in places and not is_hidden(f)]
    known = {_last(folder) for folder in filled if _above(folder) in places}
    missing = [folder for folder in vacant if _last(folder) in known]
    if missing:
        raise DataError(
            f"{_listed(missing)} without an image, and another part has images of that class. Put images there "
            f"({', '.join(SUFFIXES)}), or remove the class from both parts."
        )
    if not vacant:
        return []
    return [
        f"{_listed(vacant)} without an image, so that is no class, and the others are numbered without it. Put "
        f"images there ({', '.join(SUFFIXES)}), or remove the folder."
    ]


def _places(holding: set[str], folders: Sequence[str], filled: set[str]) -> set[str]:
    """The folders that hold class folders; none where there are no images at all."""
    if not filled:
        return set()
    outer = _outer([tuple(folder.split("/")) for folder in holding])
    base = "" if outer is None or _TRAIN in folders else f"{outer}/"
    if f"{base}{_TRAIN}" not in folders:
        return {base.rstrip("/")}
    others = [part for part in _OTHERS if f"{base}{part}" in folders]
    used = [part for part in others if f"{base}{part}" in filled]
    return {f"{base}{part}" for part in (_TRAIN, *(_roles(used).values() or others))}


def _above(path: str) -> str:
    return path.rpartition("/")[0]


def _last(path: str) -> str:
    return path.rpartition("/")[2]


def _upwards(folder: str) -> Iterator[str]:
    """A folder and those that it lies in."""
    while folder:
        yield folder
        folder = _above(folder)


def _listed(folders: list[str]) -> str:
    return f"{_first(folders)}: {'class folders' if folders[1:] else 'a class folder'}"


def _first(names: list[str]) -> str:
    """A few of the names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(map(repr, names[:_SHOWN]))}{more}"
