"""Class folders of images, in a directory or an archive: decoded once and cached, or decoded as they are read."""

import io
import json
import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deat.data import decoded_cache, image_archives
from deat.data.duplicates import check_duplicates
from deat.data.folder_layout import FilesAndLabels, check_empty_class_folders, infer_layout
from deat.data.image_archives import FileCollection, FolderFiles, PackedFiles, ZipFiles
from deat.data.image_decoding import centre_crop, open_image, read_image_size, to_tensor
from deat.data.image_set import ImageSet
from deat.data.streaming import DEFAULT_SIDE_PIXELS, AnyImageSet, LazyImages
from deat.errors import DataError
from deat.utils.file_locks import file_lock
from deat.utils.text import format_names, warn_caller

_CACHE_VERSION = 5
_MAX_DEPTH = 4

MAX_DECODED_BYTES = 4 << 30
"""The most bytes of decoded images that are kept in memory."""
_CHUNK_IMAGES = 256
# Below this, threads wait for the interpreter's lock longer than Pillow works without it.
_MIN_IMAGE_BYTES_FOR_THREADS = 3 * 128 * 128
_MAX_LISTED_UNREADABLE = 10

_SIZE_SAMPLE_IMAGES = 100
_MIN_COMMON_SIZE_SHARE = 0.9
_MAX_COMMON_SIDE_PIXELS = 512
"""Larger images are seldom meant to be trained on in their own size."""
_MAX_LISTED_SIZES = 5

SplitsAndMessages = tuple[Mapping[str, AnyImageSet], list[str]]
"""The images by split, and warnings for the user."""
DecodeErrors = dict[str, DataError]
"""Errors by the name of the file that cannot be read."""


def read_image_folder(path: Path, cache_dir: Path | None, size: int | None = None) -> Mapping[str, AnyImageSet]:
    """Read class folders of images.

    Args:
        path: A directory or an archive.
        cache_dir: Where decoded images and unpacked archives are saved, None for nowhere.
        size: Side in pixels that images are resized to. By default images of one size keep it.

    Returns:
        The images of "train" and, if there are any, of "test" and "val": decoded if they have one size and fit in
        memory.

    Raises:
        DataError: If the path does not exist, is damaged, or has another layout or unreadable images.
    """
    if not path.exists():
        folder = "" if path.is_absolute() else f" in {str(Path.cwd())!r}"
        raise DataError(
            f"there is no {str(path)!r}{folder}; folder:PATH takes a directory, {', '.join(image_archives.ARCHIVE_SUFFIXES)}."
        )
    folder_files, folders = _list_folder(path) if path.is_dir() else (None, ())
    empty_folder_messages = check_empty_class_folders(folder_files.names, folders) if folder_files else []
    key = _cache_key(path, folder_files, size)
    splits, messages = _load_cached(cache_dir, key) or _decode_and_cache(path, folder_files, cache_dir, key, size)
    for text in (*empty_folder_messages, *messages):
        warn_caller(text)
    return splits


def load_or_stream(
    files: FileCollection, classes: tuple[str, ...], splits: dict[str, FilesAndLabels], size: int | None
) -> Mapping[str, AnyImageSet]:
    """Decode all images of a data set if they have one size and fit in memory, or leave them to be streamed.

    Args:
        files: The image files.
        classes: Names of the classes.
        splits: The images of each split.
        size: Side in pixels that images are resized to. By default images of one size keep it.

    Returns:
        The images of each split.

    Raises:
        DataError: If images cannot be read. The message names them.
    """
    decoded = decode_splits(files, classes, splits, size)
    if decoded is not None:
        return decoded
    side = size or DEFAULT_SIDE_PIXELS
    return {name: LazyImages(files, *images, classes, side) for name, images in splits.items()}


def _load_cached(cache_dir: Path | None, key: str) -> SplitsAndMessages | None:
    return decoded_cache.load_splits(cache_dir, key) if cache_dir else None


def _decode_and_cache(
    path: Path, folder_files: FolderFiles | None, cache_dir: Path | None, key: str, size: int | None
) -> SplitsAndMessages:
    """Decode and save all images, or leave them to be streamed; one process at a time for a compressed tar."""
    with _lock_archive(path, cache_dir, key) as has_lock:
        cached = _load_cached(cache_dir, key)
        if cached is not None:
            return cached
        files = folder_files or _open_archive(path, cache_dir, key)
        messages = [] if isinstance(files, FolderFiles) else check_empty_class_folders(files.names, files.folders)
        layout = infer_layout(files.names, str(path))
        messages += layout.messages
        decoded = decode_splits(files, layout.classes, layout.splits, size)
        if decoded is None and size is None:
            messages += _describe_odd_sizes(files, torch.cat([i for i, _ in layout.splits.values()]).tolist())
        splits = dict(layout.splits)
        messages += check_duplicates(files, splits, decoded)
        if decoded is None:
            side = size or DEFAULT_SIDE_PIXELS
            lazy = {name: LazyImages(files, *images, layout.classes, side) for name, images in splits.items()}
            return lazy, messages
        decoded = {name: decoded[name] for name in splits}
        if cache_dir:
            _save_cached(cache_dir, key, decoded, messages, has_lock)
            # The cached images are mapped from disk, so that the decoded ones need not stay in memory beside a split.
            return _load_cached(cache_dir, key) or (decoded, messages)
        return decoded, messages


@contextmanager
def _lock_archive(path: Path, cache_dir: Path | None, key: str) -> Iterator[bool]:
    """Lock the unpacked copy of a compressed archive; yield whether no other process can be reading it."""
    with ExitStack() as stack:
        is_locked = False
        if cache_dir is not None and image_archives.is_compressed_tar(path):
            with suppress(OSError):  # a disk that is read-only, or has no locks
                stack.enter_context(file_lock(cache_dir / f".{key}.lock", delete=True))
                is_locked = True
        yield is_locked


def _save_cached(cache_dir: Path, key: str, splits: dict[str, ImageSet], messages: list[str], has_lock: bool) -> None:
    # On a full or read-only disk the next start is slow, but this one succeeds.
    with suppress(OSError):
        decoded_cache.save_splits(cache_dir, key, splits, messages)
    if has_lock:  # without a lock, another process may be reading the unpacked archive
        decoded_cache.remove_entry(cache_dir, f"{key}-pack")


def _list_folder(root: Path) -> tuple[FolderFiles, tuple[str, ...]]:
    """List the images in a folder, and all folders in it."""
    names, folders = [], []
    for folder, subfolders, files in os.walk(root, followlinks=True):
        relative = Path(folder).relative_to(root)
        # Links to class folders are common; links to an enclosing folder are not followed.
        is_too_deep = len(relative.parts) >= _MAX_DEPTH
        subfolders[:] = [] if is_too_deep else [name for name in subfolders if not _is_circular_link(folder, name)]
        folders += [(relative / name).as_posix() for name in subfolders]
        names += [name for file in files if image_archives.normalize_image_name(name := (relative / file).as_posix())]
    return FolderFiles(root, tuple(sorted(names))), tuple(sorted(folders))


def _is_circular_link(folder: str, name: str) -> bool:
    link = Path(folder, name)
    return link.is_symlink() and Path(folder).resolve().is_relative_to(link.resolve())


def _cache_key(path: Path, folder_files: FolderFiles | None, size: int | None) -> str:
    digest = sha256(f"{_CACHE_VERSION}\n{path.resolve()}\n{size}\n".encode())
    for name in folder_files.names if folder_files else ("",):
        digest.update(_file_stamp(path, name).encode(errors="surrogateescape"))
    return digest.hexdigest()[:32]


def _file_stamp(path: Path, name: str) -> str:
    try:
        status = (path / name).stat()
    except OSError as error:
        raise DataError(f"cannot read {name or path.name!r} ({error.strerror}).") from None
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{name or path.name!r} is not a plain file, so it is not opened. Remove it from the data set.")
    return f"{name}\t{status.st_size}\t{status.st_mtime_ns}\n"


def _open_archive(path: Path, cache_dir: Path | None, key: str) -> PackedFiles | ZipFiles:
    if not path.name.lower().endswith(image_archives.ALL_ARCHIVE_SUFFIXES):
        raise DataError(
            f"{path.name!r} is neither a directory nor an archive of {', '.join(image_archives.ARCHIVE_SUFFIXES)}."
        )
    if not image_archives.is_compressed_tar(path):
        return image_archives.list_archive(path)
    if cache_dir is None:
        buffer = io.BytesIO()
        index = image_archives.pack_tar_images(path, buffer)
        return PackedFiles(buffer.getvalue(), *index)
    return _unpack_to_cache(path, cache_dir, f"{key}-pack")


def _unpack_to_cache(path: Path, cache_dir: Path, key: str) -> PackedFiles:
    """Unpack the images of a compressed tar to a file in the cache, where they can be read in any order."""
    try:
        if decoded_cache.find_entry(cache_dir, key) is None:
            with decoded_cache.create_entry(cache_dir, key) as entry, (entry / "pack.bin").open("wb") as out:
                (entry / "index.json").write_text(json.dumps(image_archives.pack_tar_images(path, out)))
        names, offsets, sizes, folders = map(tuple, json.loads((cache_dir / key / "index.json").read_text()))
    except OSError as error:
        raise DataError(
            f"cannot save the unpacked {path.name!r} ({error.strerror}). Set DEAT_DATA to a folder with enough space, "
            "or pass cache=False."
        ) from None
    return PackedFiles(cache_dir / key / "pack.bin", names, offsets, sizes, folders)


def decode_splits(
    files: FileCollection, classes: tuple[str, ...], splits: dict[str, FilesAndLabels], size: int | None
) -> dict[str, ImageSet] | None:
    """Decode all images of a data set.

    Args:
        files: The image files.
        classes: Names of the classes.
        splits: The images of each split.
        size: Side in pixels that images are resized to; None to leave them as they are.

    Returns:
        The decoded images of each split, or None if the images differ in size or do not fit in memory.

    Raises:
        DataError: If images cannot be read. The message names them.
    """
    shape = _guess_common_shape(files, splits["train"], size)
    if shape is None or sum(len(indices) for indices, _ in splits.values()) * shape.numel() > MAX_DECODED_BYTES:
        return None
    decoded, errors = dict[str, ImageSet](), DecodeErrors()
    for name, images in splits.items():
        image_set = _decode_split(files, images, classes, shape, size, errors)
        if image_set is None:
            break
        decoded[name] = image_set
    if errors:
        raise _unreadable_error(errors)
    return decoded if decoded.keys() == splits.keys() else None


def _guess_common_shape(files: FileCollection, train: FilesAndLabels, size: int | None) -> torch.Size | None:
    """Return the shape of the first readable image of each class, None if they differ."""
    if size is not None:
        return torch.Size((3, size, size))
    _, first = np.unique(train[1].numpy(), return_index=True)
    sizes, errors = set(), DecodeErrors()
    for index in train[0][first].tolist():
        try:
            sizes.add(read_image_size(files.read(index), files.names[index]))
        except DataError as error:
            errors[files.names[index]] = error
    if errors and len(sizes) != 1:
        raise _unreadable_error(errors)
    return torch.Size((3, *reversed(sizes.pop()))) if len(sizes) == 1 else None


def _decode_split(
    files: FileCollection,
    images: FilesAndLabels,
    classes: tuple[str, ...],
    shape: torch.Size,
    size: int | None,
    errors: DecodeErrors,
) -> ImageSet | None:
    """Decode a split, and add the errors of unreadable images to `errors`; None once an image has another shape."""
    indices, labels = images
    pixels = torch.empty((len(indices), *shape), dtype=torch.uint8)

    def decode_chunk(start: int) -> tuple[bool, DecodeErrors]:
        """Return whether all readable images of the chunk have the shape, and the errors of the others."""
        chunk_errors = DecodeErrors()
        for row, index in enumerate(indices[start : start + _CHUNK_IMAGES].tolist(), start):
            try:
                image = _decode_image(files, index, size)
            except DataError as error:
                chunk_errors[files.names[index]] = error
                continue
            if image.shape != shape:
                return False, chunk_errors
            pixels[row] = image
        return True, chunk_errors

    # Pillow decodes without the interpreter's lock, so threads are enough.
    threads = min(8, os.cpu_count() or 1) if shape.numel() >= _MIN_IMAGE_BYTES_FOR_THREADS else 1
    with ThreadPoolExecutor(threads) as pool:
        for has_shape, chunk_errors in pool.map(decode_chunk, range(0, len(indices), _CHUNK_IMAGES)):
            errors.update(chunk_errors)
            if not has_shape:
                return None
    return ImageSet(pixels, labels, classes)


def _decode_image(files: FileCollection, index: int, size: int | None) -> Tensor:
    image = open_image(files.read(index), files.names[index])
    return to_tensor(centre_crop(image, size) if size else image)


def _unreadable_error(errors: DecodeErrors) -> DataError:
    first = next(iter(errors.values()))
    if len(errors) == 1:
        return first
    return DataError(
        f"{len(errors):,} images cannot be read: {format_names(list(errors), _MAX_LISTED_UNREADABLE)}. The first: {first}"
    )


def _describe_odd_sizes(files: FileCollection, indices: Sequence[int]) -> list[str]:
    """Return a warning if nearly all images have one size and few keep the set from being decoded in it."""
    sample = indices[:: max(1, len(indices) // _SIZE_SAMPLE_IMAGES)]
    common, count = Counter(_try_read_size(files, index) for index in sample).most_common(1)[0]
    if common is None or count < _MIN_COMMON_SIZE_SHARE * len(sample) or max(common) > _MAX_COMMON_SIDE_PIXELS:
        return []
    # Even without these images the set would be too large for memory.
    if 3 * common[0] * common[1] * len(indices) > MAX_DECODED_BYTES:
        return []
    sizes = ((files.names[index], _try_read_size(files, index)) for index in indices)
    odd_images = (f"{name!r} ({_format_size(size)})" for name, size in sizes if size and size != common)
    listed = list(islice(odd_images, _MAX_LISTED_SIZES + 1))
    if not listed:
        return []
    more = ", ..." if len(listed) > _MAX_LISTED_SIZES else ""
    return [
        f"nearly all images are {_format_size(common)}, but not {', '.join(listed[:_MAX_LISTED_SIZES])}{more}, so all "
        f"are resized to {DEFAULT_SIDE_PIXELS}x{DEFAULT_SIDE_PIXELS}. To avoid it, pass size={min(common)} "
        f"(--size {min(common)}), or remove these images."
    ]


def _try_read_size(files: FileCollection, index: int) -> tuple[int, int] | None:
    """Return an image's width and height, None if it cannot be read."""
    try:
        return read_image_size(files.read(index), files.names[index])
    except DataError:
        return None


def _format_size(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"
