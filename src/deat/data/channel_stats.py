"""The mean and standard deviation of images per channel, which a network's input is normalised by."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from deat.data.image_set import sample_slice
from deat.data.streaming import AnyImageSet, LazyImages

_MIN_STD = 1 / 255
"""The smallest standard deviation, so that a channel that hardly varies is not amplified."""


_MAX_SHOWN = 4


class ChannelStats(NamedTuple):
    """Statistics of images per channel, in units of pixels in [0, 1].

    Attributes:
        mean: Mean of each channel.
        std: Standard deviation of each channel.
        images: Number of images they were measured on; 0 for published statistics.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    images: int = 0

    def describe(self, noun: str = "images") -> str:
        """What inputs are normalised by, and on how many that was measured.

        Args:
            noun: What messages call the inputs.
        """
        measured = f", measured on {self.images:,} training {noun}" if self.images else ""
        if len(self.mean) > _MAX_SHOWN:
            return f"mean and std of {len(self.mean)} features{measured}"
        mean, std = (" ".join(f"{value:.4g}" for value in values) for values in (self.mean, self.std))
        return f"mean {mean} and std {std}{measured}"


def measure_channel_stats(images: AnyImageSet) -> ChannelStats:
    """Measure the mean and standard deviation of images.

    Args:
        images: The images. Of a large set about a thousand images are measured, evenly spaced.

    Returns:
        The statistics, rounded to four decimals; those of a table's features to six digits.
    """
    get_image = images.decode if isinstance(images, LazyImages) else images.images.__getitem__
    indices = range(len(images))[sample_slice(len(images))]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # Pillow decodes without the interpreter's lock
        mean, square = torch.stack(list(pool.map(lambda index: _channel_moments(get_image(index)), indices))).mean(0)
    variance = square - mean.square()
    if len(images.shape) == 1:  # features of a table, in units of their own
        std = torch.where(variance > 0, variance, 1.0).sqrt()
        means, stds = (tuple(float(f"{value:.6g}") for value in part.tolist()) for part in (mean, std))
        return ChannelStats(means, stds, len(indices))
    std = variance.clamp(min=_MIN_STD**2).sqrt()
    return ChannelStats(_round_values(mean), _round_values(std), len(indices))


def _channel_moments(image: Tensor) -> Tensor:
    """Return the mean of each channel's pixels in [0, 1] and of their squares, of shape (2, C)."""
    pixels = image.reshape(len(image), -1).to("cpu", torch.float64) / (255 if image.dtype == torch.uint8 else 1)
    return torch.stack([pixels.mean(1), pixels.square().mean(1)])


def _round_values(values: Tensor) -> tuple[float, ...]:
    return tuple(round(value, 4) for value in values.tolist())
