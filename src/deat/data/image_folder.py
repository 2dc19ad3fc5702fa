"""Class folders of images, in a directory or an archive: decoded once and cached, or left to be streamed."""

import io
import json
import os
import stat
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from hashlib import sha256
from pathlib import Path

from deat.data import archives, decoded_cache, duplicates
from deat.data.archives import Files, Loose, Slices, Zipped
from deat.data.folder_layout import Members, arrange, check_filled
from deat.data.image_set import ImageSet
from deat.data.streaming import SIDE, LazyImages, Part
from deat.errors import DataError
from deat.utils import locks

_FORMAT = 5
_DEPTH = 4

Found = tuple[Mapping[str, Part], list[str]]
"""The parts by name, and what a person is told of them at every start."""


def read(path: Path, store: Path | None, size: int | None = None) -> Mapping[str, Part]:
    """The train, test and val parts under a path; `store` is where derived files are kept, None for nowhere."""
    if not path.exists():
        place = "" if path.is_absolute() else f" in {str(Path.cwd())!r}"
        raise DataError(
            f"there is no {str(path)!r}{place}; folder:PATH takes a directory, {', '.join(archives.ACCEPTED)}."
        )
    loose, folders = _walk(path) if path.is_dir() else (None, ())
    vacant = check_filled(loose.names, folders) if loose else []
    key = _fingerprint(path, loose, size)
    parts, remarks = _kept(store, key) or _made(path, loose, store, key, size)
    for text in (*vacant, *remarks):
        warnings.warn(text, stacklevel=4)  # who called load
    return parts


def _kept(store: Path | None, key: str) -> Found | None:
    return decoded_cache.load(store, key) if store else None


def _made(path: Path, loose: Loose | None, store: Path | None, key: str, size: int | None) -> Found:
    """The parts decoded and kept, by whoever's turn comes first, or left to be streamed."""
    with _turn(path, store, key) as alone:
        kept = _kept(store, key)
        if kept is not None:
            return kept
        files = loose or _open(path, store, key)
        remarks = [] if isinstance(files, Loose) else check_filled(files.names, files.folders)
        layout = arrange(files.names, str(path))
        remarks += layout.remarks
        held = decoded_cache.decode(files, layout.classes, layout.parts, size)
        used = dict(layout.parts)
        remarks += duplicates.remarks(files, used, held)
        parts = {name: held[name] for name in used} if held else None
        if parts and store:
            _keep(store, key, parts, remarks, alone)
        return parts or _lazy(files, layout.classes, used, size), remarks


def _turn(path: Path, store: Path | None, key: str) -> AbstractContextManager[bool]:
    """The turn at an archive that is unpacked where others find it; whether one is alone with that copy."""
    if store is None or not archives.is_compressed(path):
        return nullcontext(False)
    return locks.turn(store / f".{key}.lock")


def _keep(store: Path, key: str, parts: dict[str, ImageSet], remarks: list[str], alone: bool) -> None:
    # A full or read-only disk costs the next start its speed, not this run.
    with suppress(OSError):
        decoded_cache.save(store, key, parts, remarks)
    if alone:  # where nobody waits for a turn, another may be reading it
        decoded_cache.drop(store, f"{key}-pack")


def _lazy(files: Files, classes: tuple[str, ...], parts: dict[str, Members], size: int | None) -> dict[str, LazyImages]:
    return {name: LazyImages(files, *members, classes, size or SIDE) for name, members in parts.items()}


def _walk(root: Path) -> tuple[Loose, tuple[str, ...]]:
    """The images under a folder, and all folders in it."""
    names, folders = [], []
    for folder, inner, found in os.walk(root, followlinks=True):
        inside = Path(folder).relative_to(root)
        # Links to class folders are usual; links that lead in circles are not followed.
        inner[:] = [] if len(inside.parts) >= _DEPTH else [name for name in inner if not _circles(folder, name)]
        folders += [(inside / name).as_posix() for name in inner]
        names += [name for file in found if archives.image_name(name := (inside / file).as_posix())]
    return Loose(root, tuple(sorted(names))), tuple(sorted(folders))


def _circles(folder: str, name: str) -> bool:
    """Whether a link leads back to a folder that it lies in."""
    link = Path(folder, name)
    return link.is_symlink() and Path(folder).resolve().is_relative_to(link.resolve())


def _fingerprint(path: Path, loose: Loose | None, size: int | None) -> str:
    digest = sha256(f"{_FORMAT}\n{path.resolve()}\n{size}\n".encode())
    for name in loose.names if loose else ("",):
        digest.update(_stamp(path, name).encode(errors="surrogateescape"))
    return digest.hexdigest()[:32]


def _stamp(path: Path, name: str) -> str:
    try:
        found = (path / name).stat()
    except OSError as error:
        raise DataError(f"cannot read {name or path.name!r} ({error.strerror}).") from None
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"{name or path.name!r} is not a plain file, so it is not opened. Remove it from the set.")
    return f"{name}\t{found.st_size}\t{found.st_mtime_ns}\n"


def _open(path: Path, store: Path | None, key: str) -> Slices | Zipped:
    if not path.name.lower().endswith((*archives.ACCEPTED, ".tgz", ".txz")):
        raise DataError(f"{path.name!r} is no directory and no archive of {', '.join(archives.ACCEPTED)}.")
    if not archives.is_compressed(path):
        return archives.list_archive(path)
    if store is None:
        buffer = io.BytesIO()
        found = archives.pack(path, buffer)
        return Slices(buffer.getvalue(), *found)
    return _packed(path, store, f"{key}-pack")


def _packed(path: Path, store: Path, key: str) -> Slices:
    """The images of a compressed tar, through a copy that can be read in any order."""
    try:
        if decoded_cache.find(store, key) is None:
            with decoded_cache.build(store, key) as entry, (entry / "pack.bin").open("wb") as out:
                (entry / "index.json").write_text(json.dumps(archives.pack(path, out)))
        names, offsets, sizes, folders = map(tuple, json.loads((store / key / "index.json").read_text()))
    except OSError as error:
        raise DataError(
            f"cannot keep the unpacked {path.name!r} ({error.strerror}); set DEAT_DATA to a folder with"
            " room for it, or pass cache=False."
        ) from None
    return Slices(store / key / "pack.bin", names, offsets, sizes, folders)
