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
from deat.data.archives import FileCollection, FolderFiles, PackedFiles, ZipFiles
from deat.data.folder_layout import FilesAndLabels, check_empty_class_folders, infer_layout
from deat.data.image_set import ImageSet
from deat.data.streaming import DEFAULT_SIDE_PIXELS, AnyImageSet, LazyImages
from deat.errors import DataError
from deat.utils import locks

_CACHE_VERSION = 5
_MAX_DEPTH = 4

SplitsAndMessages = tuple[Mapping[str, AnyImageSet], list[str]]
"""The parts by name, and what a person is told of them at every start."""


def read_image_folder(path: Path, cache_dir: Path | None, size: int | None = None) -> Mapping[str, AnyImageSet]:
    """The train, test and val parts under a path; `store` is where derived files are kept, None for nowhere."""
    if not path.exists():
        place = "" if path.is_absolute() else f" in {str(Path.cwd())!r}"
        raise DataError(
            f"there is no {str(path)!r}{place}; folder:PATH takes a directory, {', '.join(archives.ARCHIVE_SUFFIXES)}."
        )
    loose, folders = _list_folder(path) if path.is_dir() else (None, ())
    vacant = check_empty_class_folders(loose.names, folders) if loose else []
    key = _cache_key(path, loose, size)
    parts, remarks = _load_cached(cache_dir, key) or _decode_and_cache(path, loose, cache_dir, key, size)
    for text in (*vacant, *remarks):
        warnings.warn(text, stacklevel=4)  # who called load
    return parts


def _load_cached(cache_dir: Path | None, key: str) -> SplitsAndMessages | None:
    return decoded_cache.load_splits(cache_dir, key) if cache_dir else None


def _decode_and_cache(
    path: Path, folder_files: FolderFiles | None, cache_dir: Path | None, key: str, size: int | None
) -> SplitsAndMessages:
    """The parts decoded and kept, by whoever's turn comes first, or left to be streamed."""
    with _lock_archive(path, cache_dir, key) as alone:
        kept = _load_cached(cache_dir, key)
        if kept is not None:
            return kept
        files = folder_files or _open_archive(path, cache_dir, key)
        remarks = [] if isinstance(files, FolderFiles) else check_empty_class_folders(files.names, files.folders)
        layout = infer_layout(files.names, str(path))
        remarks += layout.remarks
        held = decoded_cache.decode_splits(files, layout.classes, layout.parts, size)
        used = dict(layout.parts)
        remarks += duplicates.check_duplicates(files, used, held)
        parts = {name: held[name] for name in used} if held else None
        if parts and cache_dir:
            _save_cached(cache_dir, key, parts, remarks, alone)
        return parts or _make_lazy_images(files, layout.classes, used, size), remarks


def _lock_archive(path: Path, cache_dir: Path | None, key: str) -> AbstractContextManager[bool]:
    """The turn at an archive that is unpacked where others find it; whether one is alone with that copy."""
    if cache_dir is None or not archives.is_compressed_tar(path):
        return nullcontext(False)
    return locks.temporary_lock(cache_dir / f".{key}.lock")


def _save_cached(cache_dir: Path, key: str, parts: dict[str, ImageSet], messages: list[str], has_lock: bool) -> None:
    # A full or read-only disk costs the next start its speed, not this run.
    with suppress(OSError):
        decoded_cache.save_splits(cache_dir, key, parts, messages)
    if has_lock:  # where nobody waits for a turn, another may be reading it
        decoded_cache.remove_entry(cache_dir, f"{key}-pack")


def _make_lazy_images(
    files: FileCollection, classes: tuple[str, ...], parts: dict[str, FilesAndLabels], size: int | None
) -> dict[str, LazyImages]:
    return {name: LazyImages(files, *members, classes, size or DEFAULT_SIDE_PIXELS) for name, members in parts.items()}


def _list_folder(root: Path) -> tuple[FolderFiles, tuple[str, ...]]:
    """The images under a folder, and all folders in it."""
    names, folders = [], []
    for folder, inner, found in os.walk(root, followlinks=True):
        inside = Path(folder).relative_to(root)
        # Links to class folders are usual; links that lead in circles are not followed.
        inner[:] = (
            [] if len(inside.parts) >= _MAX_DEPTH else [name for name in inner if not _is_circular_link(folder, name)]
        )
        folders += [(inside / name).as_posix() for name in inner]
        names += [name for file in found if archives.normalize_image_name(name := (inside / file).as_posix())]
    return FolderFiles(root, tuple(sorted(names))), tuple(sorted(folders))


def _is_circular_link(folder: str, name: str) -> bool:
    """Whether a link leads back to a folder that it lies in."""
    link = Path(folder, name)
    return link.is_symlink() and Path(folder).resolve().is_relative_to(link.resolve())


def _cache_key(path: Path, folder_files: FolderFiles | None, size: int | None) -> str:
    digest = sha256(f"{_CACHE_VERSION}\n{path.resolve()}\n{size}\n".encode())
    for name in folder_files.names if folder_files else ("",):
        digest.update(_file_stamp(path, name).encode(errors="surrogateescape"))
    return digest.hexdigest()[:32]


def _file_stamp(path: Path, name: str) -> str:
    try:
        found = (path / name).stat()
    except OSError as error:
        raise DataError(f"cannot read {name or path.name!r} ({error.strerror}).") from None
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"{name or path.name!r} is not a plain file, so it is not opened. Remove it from the set.")
    return f"{name}\t{found.st_size}\t{found.st_mtime_ns}\n"


def _open_archive(path: Path, cache_dir: Path | None, key: str) -> PackedFiles | ZipFiles:
    if not path.name.lower().endswith((*archives.ARCHIVE_SUFFIXES, ".tgz", ".txz")):
        raise DataError(f"{path.name!r} is no directory and no archive of {', '.join(archives.ARCHIVE_SUFFIXES)}.")
    if not archives.is_compressed_tar(path):
        return archives.list_archive(path)
    if cache_dir is None:
        buffer = io.BytesIO()
        found = archives.pack_tar_images(path, buffer)
        return PackedFiles(buffer.getvalue(), *found)
    return _unpack_to_cache(path, cache_dir, f"{key}-pack")


def _unpack_to_cache(path: Path, cache_dir: Path, key: str) -> PackedFiles:
    """The images of a compressed tar, through a copy that can be read in any order."""
    try:
        if decoded_cache.find_entry(cache_dir, key) is None:
            with decoded_cache.create_entry(cache_dir, key) as entry, (entry / "pack.bin").open("wb") as out:
                (entry / "index.json").write_text(json.dumps(archives.pack_tar_images(path, out)))
        names, offsets, sizes, folders = map(tuple, json.loads((cache_dir / key / "index.json").read_text()))
    except OSError as error:
        raise DataError(
            f"cannot keep the unpacked {path.name!r} ({error.strerror}); set DEAT_DATA to a folder with"
            " room for it, or pass cache=False."
        ) from None
    return PackedFiles(cache_dir / key / "pack.bin", names, offsets, sizes, folders)
