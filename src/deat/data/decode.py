"""Image files into pixels. Pillow is imported only when something is decoded."""

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
# Formats that run other programs or render vectors stay out, whatever a file's suffix says.
PILLOW_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "PPM", "TIFF")
SIXTEEN_BIT_FORMATS = ("PNG", "PPM")
"""Formats whose whole numbers of more than 8 bits Pillow gives in 16, from 0 to 65535."""
MAX_PIXELS = 89_478_485


def open_image(data: bytes, name: str) -> "Image":
    """An RGB image from the bytes of a file; a DataError that names the file if it is broken or too big."""
    with _wrap_image_errors(name):
        image = _to_8_bit(_open_checked(data, name), name)
        if "transparency" in image.info:
            return image.convert("RGBA").convert("RGB")
        return image.convert("RGB")


def read_image_size(data: bytes, name: str) -> tuple[int, int]:
    """An image's width and height, without decoding it."""
    with _wrap_image_errors(name):
        return _open_checked(data, name).size


def _open_checked(data: bytes, name: str) -> "Image":
    import PIL.Image

    image = PIL.Image.open(io.BytesIO(data), formats=PILLOW_FORMATS)
    _check_num_pixels(image.size, name)
    return image


def _to_8_bit(image: "Image", name: str) -> "Image":
    """An image of up to 8 bits a channel: grey of 16 bits is scaled, which Pillow would cut off at 255."""
    import PIL.Image

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in SIXTEEN_BIT_FORMATS):
        levels = np.asarray(image).astype(np.int32)
        return PIL.Image.fromarray(((levels + 128) // 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise DataError(
            f"the image {name!r} has pixels of 32 bits (mode {image.mode!r}), and nothing says which is white. Save "
            "it with 8 or 16 bits a channel."
        )
    return image


@contextmanager
def _wrap_image_errors(name: str) -> Iterator[None]:
    """Turns what a broken image raises into a DataError."""
    import PIL.Image

    try:
        yield
    except DataError:
        raise
    except PIL.UnidentifiedImageError:
        raise DataError(
            f"{name!r} is no image that can be read ({', '.join(PILLOW_FORMATS)}); repair or remove it."
        ) from None
    except Exception as error:
        raise DataError(f"cannot decode the image {name!r} ({error}); repair or remove the file.") from None


def _check_num_pixels(size: tuple[int, int], name: str) -> None:
    if size[0] * size[1] > MAX_PIXELS:
        raise DataError(f"the image {name!r} has {size[0]}x{size[1]} pixels; at most {MAX_PIXELS:,} are read. Drop it.")


def to_tensor(image: "Image") -> Tensor:
    """An RGB image as uint8 (3, H, W)."""
    width, height = image.size
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(height, width, 3).permute(2, 0, 1).contiguous()


def centre_crop(image: "Image", size: int, crop_fraction: float = 1.0) -> "Image":
    """The central square, `zoom` of the shorter side wide, resized to size x size."""
    width, height = image.size
    side = min(width, height) * crop_fraction
    left, top = (width - side) / 2, (height - side) / 2
    return _resize_box(image, size, (left, top, left + side, top + side))


def random_resized_crop(image: "Image", size: int, random: Random) -> "Image":
    """A random part (8 to 100 % of the area, aspect 3/4 to 4/3) at size x size, mirrored half of the time."""
    import PIL.Image

    image_cropped = _resize_box(image, size, _random_crop_box(*image.size, random))
    flip = PIL.Image.Transpose.FLIP_LEFT_RIGHT
    return image_cropped.transpose(flip) if random.random() < 0.5 else image_cropped


def _random_crop_box(width: int, height: int, random: Random) -> tuple[float, float, float, float]:
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1.0)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = random.randint(0, width - w), random.randint(0, height - h)
            return left, top, left + w, top + h
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


def _resize_box(image: "Image", size: int, box: tuple[float, float, float, float]) -> "Image":
    import PIL.Image

    if box == (0, 0, *image.size) and image.size == (size, size):
        return image
    return image.resize((size, size), PIL.Image.Resampling.BILINEAR, box=box)
