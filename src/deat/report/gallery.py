"""A few test images with what an attack makes of them, ready to be shown."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image


@dataclass(frozen=True, eq=False)
class Tile:
    """One test image: as it is, the perturbation (grey is none, the radius black or white), and the sum of both."""

    number: int
    label: str
    before: str
    after: str
    images: tuple[Any, Any, Any]

    @property
    def is_robust(self) -> bool:
        """Whether the attacked image is still classified correctly."""
        return self.after == self.label

    @property
    def is_fooled(self) -> bool:
        """Whether it is the attack that made the classification wrong."""
        return self.before == self.label != self.after


@dataclass(frozen=True, eq=False)
class Gallery:
    """Adversarial examples against one row's network; without tiles, `missing` says what they would need."""

    row: str = ""
    attack: str = ""
    tiles: tuple[Tile, ...] = ()
    missing: str = ""

    @property
    def choice(self) -> str:
        """How its images were chosen, for people."""
        fooled, stand = sum(t.is_fooled for t in self.tiles), sum(t.is_robust for t in self.tiles)
        kinds = [
            (fooled, "that the attack fools"),
            (stand, "that withstand it"),
            (len(self.tiles) - fooled - stand, "that are wrong even without it"),
        ]
        told = " and ".join(f"{count} {kind}" for count, kind in kinds if count)
        return f"chosen among the first test images to show both sides, not in proportion: {told}"


def select_candidates(natural_correct: Sequence[bool], robust_correct: Sequence[bool], count: int) -> list[int]:
    """The images worth attacking again, given which are classified rightly, natural and under some attack.

    They are the first that were fooled, twice as many as are wanted, since another attack may not fool them, and the
    first that stood; then whichever come first, where these are too few to show.
    """
    numbers = range(len(natural_correct))
    fooled = [n for n in numbers if natural_correct[n] and not robust_correct[n]][: 2 * _fooled_quota(count)]
    held = [*fooled, *[n for n in numbers if natural_correct[n] and robust_correct[n]][:count]]
    return sorted(held + [n for n in numbers if n not in held][: max(0, count - len(held))])


def select_tiles(tiles: Sequence[Tile], count: int) -> tuple[Tile, ...]:
    """So many of these: two thirds that the attack fools and then some that withstand it, as far as there are any."""
    fooled, stand = [t for t in tiles if t.is_fooled], [t for t in tiles if t.is_robust]
    first = fooled[: max(_fooled_quota(count), count - len(stand))] + stand
    rest = [t for t in tiles if not t.is_fooled and not t.is_robust]
    return tuple((first + rest)[:count])


def _fooled_quota(count: int) -> int:
    """How many of the images shown should be fooled."""
    return max(1, 2 * count // 3)


def image_to_uint8(image: Any) -> Any:
    """A (C, H, W) image in [0, 1] as bytes, (H, W, 3)."""
    shown = np.clip(np.asarray(image, dtype=np.float64), 0, 1).transpose(1, 2, 0)
    return np.repeat(np.rint(255 * shown).astype(np.uint8), 3 if shown.shape[2] == 1 else 1, axis=2)[..., :3]


def image_to_data_uri(image: Any) -> str:
    """An image as a data: URI, so that a page needs no other file."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def gallery_to_csv_rows(gallery: Gallery) -> list[list[Any]]:
    """What the gallery shows, as rows of a CSV file."""
    body = [[gallery.row, gallery.attack, t.number, t.label, t.before, t.after] for t in gallery.tiles]
    return [["row", "attack", "image", "label", "prediction", "prediction under attack"], *body]
