import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from deat.data.image_decoding import centre_crop, open_image, to_tensor
from deat.errors import DataError
from helpers.data_sets import WRITERS, load, png, tree, write_folder


def saved(pixels: Any, suffix: str) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, suffix)
    return out.getvalue()


RAMP = np.linspace(0, 65535, 64).reshape(8, 8).round()


@pytest.mark.parametrize("suffix", ["PNG", "TIFF", "PPM"])
def test_grey_of_16_bits_is_scaled_to_8(suffix):
    pixels = to_tensor(open_image(saved(RAMP.astype(np.uint16), suffix), "grey"))
    assert torch.equal(pixels, torch.from_numpy((RAMP / 257).round()).to(torch.uint8).expand(3, 8, 8))
    assert (int(pixels.min()), int(pixels.max())) == (0, 255)


def test_a_folder_of_16_bit_images_is_scaled(tmp_path):
    files = {f"{c}/{i}.png": saved(RAMP.astype(np.uint16), "PNG") for c in ("cat", "dog") for i in range(2)}
    train = load(write_folder(tmp_path / "set", files), tmp_path / "root").train
    assert float(train.images.double().mean()) == pytest.approx(127.5, abs=0.5)


@pytest.mark.parametrize("kind", ["float32", "int32"])
def test_pixels_of_32_bits_are_refused_with_the_file_and_the_remedy(kind, tmp_path):
    files = tree() | {"train/dog/deep.tif": saved(np.zeros((8, 8), kind), "TIFF")}
    with pytest.raises(DataError, match=r"'train/dog/deep\.tif'.*32 bits.*8 or 16 bits"):
        load(write_folder(tmp_path / "set", files), tmp_path / "root")


def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded():
    out = io.BytesIO()
    Image.new("1", (12_000, 8_000)).save(out, "PNG")
    with pytest.raises(DataError, match=r"'bomb\.png'.*pixels"):
        open_image(out.getvalue(), "bomb.png")


@pytest.mark.parametrize("kind", ["set", "set.zip", "set.tar.gz"])
def test_a_broken_image_is_named_with_the_remedy(kind, tmp_path):
    files = tree() | {"train/dog/1.png": png()[:60]}
    with pytest.raises(DataError, match=r"'train/dog/1\.png'.*repair or remove"):
        load(WRITERS[kind](tmp_path / kind, files), tmp_path / "root")


def test_a_file_that_is_not_an_image_is_named_with_the_supported_formats():
    with pytest.raises(DataError, match=r"'note\.png'.*JPEG, PNG,.*TIFF.*Repair or remove"):
        open_image(b"a note, saved under a wrong name", "note.png")


def test_centre_crop_resizes_the_shorter_side_and_crops_the_centre():
    image = Image.new("RGB", (40, 20), "red")
    image.paste(Image.new("RGB", (10, 20), "blue"), (30, 0))
    square = to_tensor(centre_crop(image, 10))
    assert square.shape == (3, 10, 10)
    assert square[0, :, :9].eq(255).all()
    assert square[2].eq(0)[:, :9].all()
