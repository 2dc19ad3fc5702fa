"""Random crops and flips as tensor operations."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad as zero_pad

from deat.errors import UsageError


@dataclass(frozen=True, eq=False)
class AugmentParams:
    """One random crop corner and flip for each image."""

    top: Tensor
    left: Tensor
    flip: Tensor

    def select(self, indices: Tensor) -> "AugmentParams":
        """The draws of these images."""
        top, left, flip = (t.index_select(0, indices) for t in (self.top, self.left, self.flip))
        return AugmentParams(top, left, flip)

    def to(self, device: torch.device) -> "AugmentParams":
        """The same draws on a device."""
        return AugmentParams(self.top.to(device), self.left.to(device), self.flip.to(device))


@dataclass(frozen=True)
class Augment:
    """A zero border of `pad` pixels, a random crop of the old size, and a mirror image half of the time."""

    pad: int = 4
    flip: bool = True

    def draw(self, num_images: int, generator: torch.Generator) -> AugmentParams:
        """Random crops and flips for num images."""
        corners = torch.randint(0, 2 * self.pad + 1, (2, num_images), generator=generator, device=generator.device)
        coins = torch.rand(num_images, generator=generator, device=generator.device) < 0.5
        return AugmentParams(corners[0], corners[1], coins if self.flip else torch.zeros_like(coins))

    def apply(self, images: Tensor, params: AugmentParams) -> Tensor:
        """Each image cropped and flipped by its own draw, of the same shape and type."""
        channels, height, width = images.shape[1:]
        padded = zero_pad(images, [self.pad] * 4)
        row = torch.arange(height, device=images.device)
        col = torch.arange(width, device=images.device)
        rows = params.top[:, None] + row
        cols = params.left[:, None] + torch.where(params.flip[:, None], width - 1 - col, col)
        index = (rows[:, :, None] * padded.shape[3] + cols[:, None, :]).flatten(1)
        index = index[:, None].expand(-1, channels, -1)
        return padded.flatten(2).gather(2, index).view_as(images)


def check_augment(augment: Any) -> Any:
    """The augmentation, or an error for what draws no crops and flips."""
    if augment is None or (not isinstance(augment, type) and hasattr(augment, "draw") and hasattr(augment, "apply")):
        return augment
    raise UsageError(
        f"augment={augment!r} is no augmentation: use deat.Augment(pad=4, flip=True), or a corpus's .augment. Leave it "
        "out for none; a corpus brings its own, and its .train part none."
    )
