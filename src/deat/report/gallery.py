"""The gallery of a report: a few test images, and what an attack makes of them."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from PIL import Image

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


@dataclass(frozen=True, eq=False)
class Tile:
    """One test image under attack.

    Attributes:
        image_index: The image's index in the test set.
        label: Its class.
        natural_prediction: The class that the network predicts for it.
        adversarial_prediction: The class that the network predicts for the attacked image.
        images: The image, the perturbation (grey is no change) and the attacked image, as bytes (H, W, 3); for masks
            also the true mask, the predicted one, and the one under attack.
        is_right: Whether the answers without and under the attack are right; None to compare them with the label.
    """

    image_index: int
    label: str
    natural_prediction: str
    adversarial_prediction: str
    images: tuple[Any, ...]
    is_right: tuple[bool, bool] | None = None

    @property
    def captions(self) -> tuple[str, ...]:
        """What each picture shows."""
        name = f"a {self.label}" if self.label else f"test example {self.image_index}"
        attacked = f"attacked, seen as {self.adversarial_prediction}" if self.label else "attacked"
        captions = (name, "perturbation", attacked)
        masks = ("true mask", f"answer: {self.natural_prediction}", f"under attack: {self.adversarial_prediction}")
        return (captions + masks)[: len(self.images)]

    @property
    def is_robust(self) -> bool:
        """Whether the answer for the attacked image is right."""
        return self.is_right[1] if self.is_right else self.adversarial_prediction == self.label

    @property
    def is_fooled(self) -> bool:
        """Whether the answer for the image is right, and that for the attacked one is not."""
        was_right = self.is_right[0] if self.is_right else self.natural_prediction == self.label
        return was_right and not self.is_robust


@dataclass(frozen=True, eq=False)
class Gallery:
    """Adversarial examples against one row's network; without tiles, `missing` says what they need."""

    row: str = ""
    attack: str = ""
    tiles: tuple[Tile, ...] = ()
    missing: str = ""

    @property
    def selection_note(self) -> str:
        """How the images were chosen."""
        fooled, robust = sum(tile.is_fooled for tile in self.tiles), sum(tile.is_robust for tile in self.tiles)
        counts = [
            (fooled, "that the attack fools"),
            (robust, "that withstand it"),
            (len(self.tiles) - fooled - robust, "that are misclassified even without it"),
        ]
        text = " and ".join(f"{count} {kind}" for count, kind in counts if count)
        return f"chosen from the first test examples to show both cases, not in proportion: {text}"


def select_candidates(natural_correct: Sequence[bool], robust_correct: Sequence[bool], count: int) -> list[int]:
    """Select the images to attack for a gallery, from the verdicts of an evaluation.

    Args:
        natural_correct: Whether each image is classified correctly.
        robust_correct: Whether each image is classified correctly under some attack.
        count: How many images the gallery shows.

    Returns:
        Indices in rising order: the first fooled images, twice as many as are shown since another attack may not fool
        them, and the first robust ones; then other images if these are too few.
    """
    indices = range(len(natural_correct))
    fooled = [n for n in indices if natural_correct[n] and not robust_correct[n]][: 2 * _fooled_quota(count)]
    selected = [*fooled, *[n for n in indices if natural_correct[n] and robust_correct[n]][:count]]
    return sorted(selected + [n for n in indices if n not in selected][: max(0, count - len(selected))])


def select_tiles(tiles: Sequence[Tile], count: int) -> tuple[Tile, ...]:
    """Select the tiles to show: two thirds that the attack fools, then some that it does not, as far as there are any.

    Args:
        tiles: The attacked images.
        count: How many to show.

    Returns:
        At most `count` tiles, the fooled ones first.
    """
    fooled, robust = [tile for tile in tiles if tile.is_fooled], [tile for tile in tiles if tile.is_robust]
    wrong = [tile for tile in tiles if not tile.is_fooled and not tile.is_robust]
    num_fooled = max(_fooled_quota(count), count - len(robust))
    return tuple((fooled[:num_fooled] + robust + wrong)[:count])


def image_to_uint8(image: Any) -> Any:
    """Convert a (C, H, W) image in [0, 1] to bytes of shape (H, W, 3)."""
    pixels = np.clip(np.asarray(image, dtype=np.float64), 0, 1).transpose(1, 2, 0)
    return np.repeat(np.rint(255 * pixels).astype(np.uint8), 3 if pixels.shape[2] == 1 else 1, axis=2)[..., :3]


def image_to_data_uri(image: Any) -> str:
    """Encode an image as a data: URI, so that a page needs no other file."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def name_tiles(gallery: Gallery) -> list[tuple[str, Tile]]:
    """Return the name of each tile's own files with the tile; nothing if there is only one tile."""
    tiles = gallery.tiles if len(gallery.tiles) > 1 else ()
    return [(f"gallery-{n}", tile) for n, tile in enumerate(tiles, 1)]


def gallery_to_csv_rows(gallery: Gallery) -> list[list[Any]]:
    """Return the gallery's predictions as rows of a CSV file."""
    rows: list[list[Any]] = [["row", "attack", "image", "label", "prediction", "prediction under attack"]]
    for tile in gallery.tiles:
        predictions = [tile.natural_prediction, tile.adversarial_prediction]
        rows.append([gallery.row, gallery.attack, tile.image_index, tile.label, *predictions])
    return rows


def _fooled_quota(count: int) -> int:
    """How many of the images shown should be fooled."""
    return max(1, 2 * count // 3)


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
