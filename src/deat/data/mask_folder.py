"""Folders of images and masks for segmentation."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deat.data.image_decoding import IMAGE_SUFFIXES, open_image, to_tensor
from deat.data.image_set import ImageSet
from deat.errors import DataError
from deat.tasks import Segmentation

_IMAGE_FOLDER = "images"
_MASK_FOLDERS = ("labels", "masks", "annotations")
_SPLIT_FOLDERS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}
USUAL_VOID = 255
"""The label of pixels that do not count in most data sets."""


def read_mask_folder(path: Path, task: Segmentation | None = None) -> dict[str, ImageSet]:
    """Read images and masks of one size.

    Args:
        path: A directory with PART/images/NAME.* and PART/labels/NAME.png (or masks/, annotations/), where PART is train,
            val or test. Masks are grey or palette images whose values are class numbers.
        task: The task, with its `ignore_index`. By default 255 is ignored if masks have it.

    Returns:
        The images of "train" and, if there are any, of "val" and "test", uint8, with masks (N, H, W).

    Raises:
        DataError: The directory has another layout, an image has no mask, or sizes differ.
    """
    if not path.is_dir():
        raise DataError(f"there is no directory {str(path)!r}; segmentation:PATH takes an unpacked one.")
    folders = {
        split: next((path / name for name in names if (path / name / _IMAGE_FOLDER).is_dir()), None)
        for split, names in _SPLIT_FOLDERS.items()
    }
    if folders["train"] is None:
        raise DataError(
            f"{str(path)!r} has no train/{_IMAGE_FOLDER}/; expected PART/{_IMAGE_FOLDER}/NAME.png with "
            f"PART/{_MASK_FOLDERS[0]}/NAME.png, for the parts train, val and test."
        )
    parts = {split: _read_part(folder) for split, folder in folders.items() if folder is not None}
    if task is None:
        has_void = any(bool((masks == USUAL_VOID).any()) for _, masks in parts.values())
        task = Segmentation(ignore_index=USUAL_VOID if has_void else None)
    kind = task
    classes = tuple(map(str, range(max(kind.count_outputs(masks) for _, masks in parts.values()))))
    return {split: ImageSet(images, masks, classes, kind) for split, (images, masks) in parts.items()}


def _read_part(folder: Path) -> tuple[Tensor, Tensor]:
    masks = next((folder / name for name in _MASK_FOLDERS if (folder / name).is_dir()), None)
    if masks is None:
        raise DataError(f"{str(folder)!r} has no folder of masks; expected one of {', '.join(_MASK_FOLDERS)}.")
    images = sorted(f for f in (folder / _IMAGE_FOLDER).iterdir() if f.suffix.lower() in IMAGE_SUFFIXES)
    mask_by_name = {file.stem: file for file in masks.iterdir() if file.suffix.lower() in IMAGE_SUFFIXES}
    missing = next((file for file in images if file.stem not in mask_by_name), None)
    if missing is not None:
        raise DataError(f"the image {str(missing)!r} has no mask of its name in {str(masks)!r}.")
    if not images:
        raise DataError(f"{str(folder / _IMAGE_FOLDER)!r} has no images.")
    with ThreadPoolExecutor(8) as pool:
        pairs = list(pool.map(lambda file: (_read_image(file), _read_mask(mask_by_name[file.stem])), images))
    shape = pairs[0][0].shape[1:]
    for file, (image, mask) in zip(images, pairs, strict=True):
        if image.shape[1:] != shape or mask.shape != shape:
            raise DataError(
                f"{str(file)!r} is {_size(image)} and its mask {_size(mask)}, where the first image is "
                f"{_size(pairs[0][0])}. Resize images and masks to one size (masks without interpolation)."
            )
    return torch.stack([image for image, _ in pairs]), torch.stack([mask for _, mask in pairs])


def _size(image: Tensor) -> str:
    return "x".join(map(str, reversed(image.shape[-2:])))


def _read_image(file: Path) -> Tensor:
    return to_tensor(open_image(file.read_bytes(), str(file)))


def _read_mask(file: Path) -> Tensor:
    from PIL import Image

    try:
        with Image.open(file) as image:
            values = np.array(image)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"cannot read the mask {str(file)!r} ({error}).") from None
    if values.ndim != 2:
        raise DataError(
            f"the mask {str(file)!r} has mode {image.mode}; expected a grey or palette image whose values are class numbers."
        )
    return torch.from_numpy(values.astype(np.int64))
