"""The 8x8 handwritten digits of UCI, which are part of the package (see digits.txt)."""

from importlib.resources import files

import numpy as np
import torch

from deat.data.image_set import ImageSet

_CLASSES = tuple("0123456789")


def read_digits() -> tuple[ImageSet, ImageSet]:
    """Read the 1,397 training and 400 test images, uint8 of shape (1, 8, 8)."""
    with (files("deat.data") / "digits.npz").open("rb") as file, np.load(file, allow_pickle=False) as npz:
        arrays = {name: torch.from_numpy(npz[name]) for name in npz.files}
    train, test = (
        ImageSet(arrays[f"{split}_images"].unsqueeze(1), arrays[f"{split}_labels"].to(torch.int64), _CLASSES)
        for split in ("train", "test")
    )
    return train, test
