"""The 8x8 handwritten digits of UCI, which ship inside the package (see digits.txt)."""

from importlib.resources import files

import numpy as np
import torch

from deat.data.image_set import ImageSet

CLASSES = tuple("0123456789")


def read_digits() -> tuple[ImageSet, ImageSet]:
    """The 1,397 training and 400 test images, 1x8x8 uint8."""
    with (files("deat.data") / "digits.npz").open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        held = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    parts = [
        ImageSet(held[f"{part}_images"].unsqueeze(1), held[f"{part}_labels"].to(torch.int64), CLASSES)
        for part in ("train", "test")
    ]
    return parts[0], parts[1]
