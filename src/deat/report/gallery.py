"""A few test images with what an attack makes of them, ready to be shown."""

import base64
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image


@dataclass(frozen=True, eq=False)
class Tile:
    """One image: as it is, the perturbation (grey is none, the radius is black or white), and the sum of both."""

    label: str
    before: str
    after: str
    images: tuple[Any, Any, Any]

    @property
    def stands(self) -> bool:
        """Whether the attacked image is still classified correctly."""
        return self.after == self.label


@dataclass(frozen=True, eq=False)
class Gallery:
    """Adversarial examples against one row's network; without tiles, `missing` says what they would need."""

    row: str = ""
    attack: str = ""
    tiles: tuple[Tile, ...] = ()
    missing: str = ""


def pixels(image: Any) -> Any:
    """A (C, H, W) image in [0, 1] as bytes, (H, W, 3)."""
    shown = np.clip(np.asarray(image, dtype=np.float64), 0, 1).transpose(1, 2, 0)
    return np.repeat(np.rint(255 * shown).astype(np.uint8), 3 if shown.shape[2] == 1 else 1, axis=2)[..., :3]


def data_uri(image: Any) -> str:
    """An image as a data: URI, so that a page needs no other file."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def table_of(gallery: Gallery) -> list[list[Any]]:
    """What the gallery shows, as rows of a CSV file."""
    body = [[gallery.row, gallery.attack, n, t.label, t.before, t.after] for n, t in enumerate(gallery.tiles)]
    return [["row", "attack", "image", "label", "prediction", "prediction under attack"], *body]
