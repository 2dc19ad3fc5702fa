"""Image files that a user names, one by one or in folders, as inputs of a network of a known input shape."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deat.data.image_decoding import IMAGE_SUFFIXES, centre_crop, open_image, to_tensor
from deat.errors import DataError, UsageError
from deat.utils.text import summarize_error

ARRAY_SUFFIX = ".npy"
_SUFFIXES = (*IMAGE_SUFFIXES, ARRAY_SUFFIX)
_MAX_LISTED = 5


@dataclass(frozen=True)
class ImageFile:
    """One image: a file, or one image of a file of arrays.

    Attributes:
        path: The file.
        index: The image's place in a .npy file with several; None for an image file.
    """

    path: Path
    index: int | None = None

    @property
    def name(self) -> str:
        """What tables call it."""
        return str(self.path) if self.index is None else f"{self.path}[{self.index}]"

    @property
    def is_array(self) -> bool:
        """Whether its pixels are numbers of a .npy file."""
        return self.path.suffix.lower() == ARRAY_SUFFIX


@dataclass(frozen=True)
class InputImage:
    """An image as a network takes it.

    Attributes:
        pixels: Values in [0, 1], float32 of shape (C, H, W).
        resized_from: Width and height of the file's image, if it was cropped and resized.
    """

    pixels: Tensor
    resized_from: tuple[int, int] | None = None

    @property
    def has_8_bits(self) -> bool:
        """Whether every value is a whole number of 255ths, so that an 8-bit file holds it exactly."""
        levels = (self.pixels.double() * 255).round()
        return bool(torch.equal((levels / 255).float(), self.pixels))


def list_image_files(paths: Sequence[str | os.PathLike[str]]) -> list[ImageFile]:
    """List the images that paths name.

    Args:
        paths: Image files, .npy files with arrays of images, and folders, which are searched with all folders in
            them for files with the suffix of an image or of an array.

    Returns:
        The images, those of a folder sorted by name.

    Raises:
        DataError: If a path does not exist, a folder has no images, or an array has no shape of images.
        UsageError: If no path is given.
    """
    if not paths:
        raise UsageError("name at least one image, .npy file or folder of images.")
    return [image for path in paths for image in _expand(Path(path).expanduser())]


def read_image_file(image: ImageFile, shape: Sequence[int], crop_fraction: float = 1.0) -> InputImage:
    """Read an image as an input of a network.

    An image file of the network's size is taken pixel by pixel. One of another size is resized: the central square is
    cut out and scaled. Colours become grey for a network with one channel. An array must have the network's shape.

    Args:
        image: The image.
        shape: Channels, height and width of the network's inputs.
        crop_fraction: The side of the central square, as a fraction of the image's shorter side.

    Returns:
        The pixels, and the size of the file's image if it was resized.

    Raises:
        DataError: If the file is no image, is broken, or does not fit.
    """
    if image.is_array:
        return InputImage(_read_array_image(image, tuple(shape)))
    channels, height, width = shape
    decoded = open_image(_read_bytes(image.path), image.name)
    size = decoded.size
    if size != (width, height):
        decoded = centre_crop(decoded, height, crop_fraction)
    if channels == 1:
        grey = decoded.convert("L")
        pixels = torch.frombuffer(bytearray(grey.tobytes()), dtype=torch.uint8).view(1, height, width)
    else:
        pixels = to_tensor(decoded)
    return InputImage(pixels.float() / 255, None if size == (width, height) else size)


def check_takes_images(shape: Sequence[int], files: Sequence[ImageFile]) -> None:
    """Check that a network's inputs can be read from these files.

    Args:
        shape: The shape of one input.
        files: The files.

    Raises:
        UsageError: If image files do not fit a network of this shape.
    """
    is_image = len(shape) == 3 and shape[0] in (1, 3) and shape[1] == shape[2]
    if not is_image and any(not file.is_array for file in files):
        raise UsageError(
            f"this network takes inputs of shape {tuple(shape)}; image files fit square images with 1 or 3 channels "
            f"alone. Give arrays of that shape, as {ARRAY_SUFFIX} files."
        )


def _expand(path: Path) -> Iterator[ImageFile]:
    if path.is_dir():
        paths = [
            Path(folder, name)
            for folder, _, names in os.walk(path)
            for name in names
            if name.lower().endswith(_SUFFIXES) and not name.startswith(".")
        ]
        if not paths:
            raise DataError(f"the folder {str(path)!r} has no images: no file that ends in {', '.join(_SUFFIXES)}.")
        for file in sorted(paths):
            yield from _expand(file)
    elif not path.exists():
        raise DataError(f"there is no {str(path)!r}: name image files, {ARRAY_SUFFIX} files or folders.")
    elif path.suffix.lower() == ARRAY_SUFFIX:
        yield from (ImageFile(path, index) for index in range(len(_open_array(path))))
    else:
        yield ImageFile(path)


def _open_array(path: Path) -> np.ndarray:
    """The array of a file with one axis for its images, which is read when it is used."""
    try:
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{str(path)!r} is not an array that numpy.save wrote ({summarize_error(error)}).") from None
    if array.ndim not in (2, 3, 4) or (array.dtype != np.uint8 and array.dtype.kind != "f"):
        raise DataError(
            f"{str(path)!r} has an array of shape {array.shape} and type {array.dtype}. Images have shape (N, C, H, W) "
            "or (C, H, W), as bytes or as floats in [0, 1]."
        )
    return array if array.ndim == 4 else array[None] if array.ndim == 3 else array[None, None]


def _read_array_image(image: ImageFile, shape: tuple[int, ...]) -> Tensor:
    values = np.array(_open_array(image.path)[image.index or 0])
    if values.shape != shape:
        raise DataError(
            f"{image.name!r} has shape {values.shape}, and the network takes {shape}. Arrays are not resized; give an "
            "image file, or an array of this shape."
        )
    pixels = torch.from_numpy(values)
    if pixels.dtype == torch.uint8:
        return pixels.float() / 255
    pixels = pixels.float()
    if not bool(((pixels >= 0) & (pixels <= 1)).all()):
        raise DataError(
            f"{image.name!r} has values from {float(pixels.min()):.4g} to {float(pixels.max()):.4g}. Images are in "
            "[0, 1]: divide by 255, or save bytes (uint8)."
        )
    return pixels


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {str(path)!r} ({error.strerror}).") from None


def unreadable_error(errors: Sequence[DataError]) -> DataError:
    """Make one error of those of several files.

    Args:
        errors: The errors, at least one.

    Returns:
        The only one, or one that names the first few.
    """
    if len(errors) == 1:
        return errors[0]
    more = f" ... and {len(errors) - _MAX_LISTED} more" if len(errors) > _MAX_LISTED else ""
    listed = " ".join(str(error) for error in errors[:_MAX_LISTED])
    return DataError(f"{len(errors)} images cannot be read. {listed}{more}")
