"""The mean and standard deviation of images by channel, which a network's input is normalised by."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from deat.data.checks import sample_slice
from deat.data.streaming import AnyImageSet, LazyImages

MIN_STD = 1 / 255
"""The smallest standard deviation: what varies by less than a pixel's level is not blown up."""


class ChannelStats(NamedTuple):
    """Mean and standard deviation by channel, and how many images they were measured on, 0 where they are known."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    images: int = 0

    def describe(self) -> str:
        """What images are normalised by, and on how many that was measured."""
        mean, std = (" ".join(f"{value:.4g}" for value in values) for values in (self.mean, self.std))
        measured = f", measured on {self.images:,} training images" if self.images else ""
        return f"mean {mean} and std {std}{measured}"


def measure_channel_stats(images: AnyImageSet) -> ChannelStats:
    """A set's own statistics, to four digits: of all its images, or of about a thousand spread over a large set."""
    read = images.decode if isinstance(images, LazyImages) else images.images.__getitem__
    chosen = range(len(images))[sample_slice(len(images))]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # Pillow decodes without the interpreter's lock
        mean, square = torch.stack(list(pool.map(lambda index: _channel_moments(read(index)), chosen))).mean(0)
    std = (square - mean.square()).clamp(min=MIN_STD**2).sqrt()
    return ChannelStats(_round_values(mean), _round_values(std), len(chosen))


def _channel_moments(image: Tensor) -> Tensor:
    """The means (2, C) of an image's pixels in [0, 1] and of their squares."""
    pixels = image.flatten(1).to("cpu", torch.float64) / (255 if image.dtype == torch.uint8 else 1)
    return torch.stack([pixels.mean(1), pixels.square().mean(1)])


def _round_values(values: Tensor) -> tuple[float, ...]:
    return tuple(round(value, 4) for value in values.tolist())
