"""Decodes image files into pixels. Pillow is imported only when something is decoded."""

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from deat.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
# Formats that run other programs or render vector graphics are excluded, whatever a file's suffix.
_PILLOW_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "PPM", "TIFF")
_SIXTEEN_BIT_FORMATS = ("PNG", "PPM")
"""Formats for which Pillow's mode "I" means 16 bits, from 0 to 65535."""
_MAX_PIXELS = 89_478_485


def open_image(data: bytes, name: str) -> "Image":
    """Decode an image file.

    Args:
        data: The file's content.
        name: The file's name, for messages.

    Returns:
        An RGB image of 8 bits per channel.

    Raises:
        DataError: If the file is not an image of a supported format, is broken, or has too many pixels.
    """
    with _wrap_image_errors(name):
        image = _to_8_bit(_open_checked(data, name), name)
        if "transparency" in image.info:
            return image.convert("RGBA").convert("RGB")
        return image.convert("RGB")


def read_image_size(data: bytes, name: str) -> tuple[int, int]:
    """Return the width and height of an image file without decoding its pixels.

    Args:
        data: The file's content.
        name: The file's name, for messages.

    Raises:
        DataError: If the file is not an image of a supported format, or has too many pixels.
    """
    with _wrap_image_errors(name):
        return _open_checked(data, name).size


def _open_checked(data: bytes, name: str) -> "Image":
    import PIL.Image

    image = PIL.Image.open(io.BytesIO(data), formats=_PILLOW_FORMATS)
    width, height = image.size
    if width * height > _MAX_PIXELS:
        raise DataError(
            f"the image {name!r} has {width}x{height} pixels; at most {_MAX_PIXELS:,} are read. Shrink or remove it."
        )
    return image


def _to_8_bit(image: "Image", name: str) -> "Image":
    """Scale a grey image of 16 bits to 8; Pillow's own conversion would clip it at 255."""
    import PIL.Image

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in _SIXTEEN_BIT_FORMATS):
        levels = np.asarray(image).astype(np.int32)
        return PIL.Image.fromarray(((levels + 128) // 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise DataError(
            f"the image {name!r} has pixels of 32 bits (mode {image.mode!r}), whose range is unknown. Save it with 8 or "
            "16 bits per channel."
        )
    return image


@contextmanager
def _wrap_image_errors(name: str) -> Iterator[None]:
    """Convert the errors that a broken image raises into DataError."""
    import PIL.Image

    try:
        yield
    except DataError:
        raise
    except PIL.UnidentifiedImageError:
        raise DataError(
            f"{name!r} is not an image of a supported format ({', '.join(_PILLOW_FORMATS)}). Repair or remove it."
        ) from None
    except Exception as error:
        raise DataError(f"cannot decode the image {name!r} ({error}); repair or remove the file.") from None


def to_tensor(image: "Image") -> Tensor:
    """Convert an RGB image to a uint8 tensor of shape (3, H, W)."""
    width, height = image.size
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(height, width, 3).permute(2, 0, 1).contiguous()


def centre_crop(image: "Image", size: int, crop_fraction: float = 1.0) -> "Image":
    """Cut out the central square of an image and resize it.

    Args:
        image: The image.
        size: Side of the result in pixels.
        crop_fraction: Side of the square as a fraction of the image's shorter side.

    Returns:
        An image of size x size pixels.
    """
    width, height = image.size
    side = min(width, height) * crop_fraction
    left, top = (width - side) / 2, (height - side) / 2
    return _resize_box(image, size, (left, top, left + side, top + side))


def random_resized_crop(image: "Image", size: int, random: Random) -> "Image":
    """Cut out a random rectangle of an image, resize it, and mirror it with probability 1/2.

    The rectangle has 8 to 100 % of the area and an aspect ratio of 3/4 to 4/3, as is usual for ImageNet.

    Args:
        image: The image.
        size: Side of the result in pixels.
        random: The random generator.

    Returns:
        An image of size x size pixels.
    """
    import PIL.Image

    cropped = _resize_box(image, size, _random_crop_box(*image.size, random))
    return cropped.transpose(PIL.Image.Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else cropped


def _random_crop_box(width: int, height: int, random: Random) -> tuple[float, float, float, float]:
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1.0)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        crop_width, crop_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            left, top = random.randint(0, width - crop_width), random.randint(0, height - crop_height)
            return left, top, left + crop_width, top + crop_height
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


def _resize_box(image: "Image", size: int, box: tuple[float, float, float, float]) -> "Image":
    import PIL.Image

    if box == (0, 0, *image.size) and image.size == (size, size):
        return image
    return image.resize((size, size), PIL.Image.Resampling.BILINEAR, box=box)
