"""Pictures of examples for a gallery: images, waveforms and masks as bytes (H, W, 3)."""

from itertools import pairwise
from typing import Any

import numpy as np

WAVE_HEIGHT, WAVE_WIDTH = 64, 160
WAVE_SAMPLES = 320
"""How many samples of a waveform are drawn, from its middle; of all of them nothing could be seen."""
IGNORED_COLOR = (255, 255, 255)
MASK_COLORS = (
    (40, 40, 40),
    (230, 159, 0),
    (86, 180, 233),
    (0, 158, 115),
    (240, 228, 66),
    (0, 114, 178),
    (213, 94, 0),
    (204, 121, 167),
)
"""The colours of classes in masks; distinguishable with colour blindness (Okabe and Ito)."""


def is_drawable(shape: tuple[int, ...]) -> bool:
    """Whether examples of a shape can be drawn: images (C, H, W) and waveforms (C, T)."""
    return len(shape) == 3 or (len(shape) == 2 and shape[-1] > 8)


def wave_to_uint8(wave: Any, low: float, high: float) -> Any:
    """Draw the middle of a waveform (C, T): for each column the range of its samples and the next, over all channels."""
    samples = np.asarray(wave, dtype=np.float64)
    first = max(0, (samples.shape[1] - WAVE_SAMPLES) // 2)
    samples = samples[:, first : first + WAVE_SAMPLES]
    picture = np.full((WAVE_HEIGHT, WAVE_WIDTH, 3), 255, np.uint8)
    picture[WAVE_HEIGHT // 2] = 220
    edges = np.linspace(0, samples.shape[1], min(WAVE_WIDTH, samples.shape[1]) + 1).astype(int)
    for column, (start, end) in enumerate(pairwise(edges)):
        part = samples[:, start : end + 1]
        rows = (high - np.clip([part.max(), part.min()], low, high)) / (high - low) * (WAVE_HEIGHT - 1)
        picture[int(np.floor(rows[0])) : int(np.ceil(rows[1])) + 1, column] = (0, 90, 160)
    return picture


def mask_to_uint8(mask: Any) -> Any:
    """Draw a mask (H, W) of class numbers, a colour for each class; numbers that are no class are white."""
    numbers = np.asarray(mask)
    colors = np.asarray(MASK_COLORS, np.uint8)[numbers % len(MASK_COLORS)]
    colors[(numbers < 0) | (numbers == 255)] = IGNORED_COLOR
    return colors
