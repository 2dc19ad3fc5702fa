"""One batch as somebody else's loader gives it."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from deat.data.ahead import Place
from deat.data.content import are_images
from deat.data.labels import named_by_text
from deat.errors import DataError

_PAIR = "Each batch must be a pair (images, labels) of tensors, so a Dataset gives an image and its class number."


class Batch(NamedTuple):
    """A batch as its loader gives it, where that is, and how many images came before it."""

    x: Tensor
    y: Tensor
    place: Place
    before: int

    @property
    def is_doubtful(self) -> bool:
        """Whether it holds what cannot be trained on, however many classes there are; images on a GPU are not read."""
        bad_images = self.x.device.type == "cpu" and not are_images(self.x)
        return bad_images or len(self.y) == 0 or int(self.y.min()) < 0


@contextmanager
def collated(number: Callable[[int], int]) -> Iterator[None]:
    """Says what to do about images that torch makes no batch of; number is what one of the batch is known by."""
    try:
        yield
    except RuntimeError as error:
        odd = _uneven(str(error), number)
        if not odd:
            raise
        raise DataError(
            f"{odd}, so that no batch can be made of them. Give all one size, with torchvision.transforms.Resize, say."
        ) from error
    except TypeError as error:
        found = re.search(r"default_collate: .*found <class '(.+)'>", str(error))
        if not found:
            raise
        raise DataError(
            f"the data set gives a {found[1]}, of which no batch can be made. Let it give each image as a tensor in "
            "[0, 1] or uint8, with transform=torchvision.transforms.ToTensor(), say, and its label as a number."
        ) from error


def _uneven(text: str, number: Callable[[int], int]) -> str:
    """Which images of a batch have not one size, by what torch says; nothing where it speaks of something else."""
    found = re.search(r"equal size, but got (\[.*?\]) at entry 0 and (\[.*?\]) at entry (\d+)", text)
    if found:
        return f"image {number(int(found[3]))} has shape {found[2]}, and image {number(0)} has {found[1]}"
    # What a worker process says, whose batch is a stretch of shared memory.
    unsized = "collate" in text and "resize storage that is not resizable" in text
    return f"image {number(0)} and others of its batch differ in shape" if unsized else ""


def pair_of(batch: Any) -> tuple[Tensor, Tensor]:
    """A batch's images and labels, of which there are as many."""
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        many = f" of {len(batch)}" if isinstance(batch, list | tuple) else ""
        named = f" with {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else ""
        raise DataError(f"a batch is a {type(batch).__name__}{many}{named}, not a pair. {_PAIR}")
    x, y = (torch.from_numpy(part) if isinstance(part, np.ndarray) else part for part in batch)
    if isinstance(x, Tensor) and isinstance(y, list | tuple) and y and isinstance(y[0], str):
        raise named_by_text(y[0])
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        raise DataError(f"a batch holds {type(x).__name__} and {type(y).__name__}. {_PAIR}")
    if x.ndim != 4 or len(x) != len(y):
        shapes = f"{tuple(x.shape)} and {tuple(y.shape)}"
        raise DataError(f"a batch has shapes {shapes}; expected images (B, C, H, W) and labels (B,).")
    return x, y.long() if y.dtype == torch.bool else y
