"""Random crops and flips as tensor operations."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad as zero_pad

from deat.errors import UsageError


@dataclass(frozen=True, eq=False)
class AugmentParams:
    """Crop position and flip of each image.

    Attributes:
        top: First row of the crop in the padded image, int64 of shape (N,).
        left: First column of the crop in the padded image, int64 of shape (N,).
        flip: Whether the image is mirrored, bool of shape (N,).
    """

    top: Tensor
    left: Tensor
    flip: Tensor

    def select(self, indices: Tensor) -> "AugmentParams":
        """Return the parameters of the images at `indices`."""
        top, left, flip = (t.index_select(0, indices) for t in (self.top, self.left, self.flip))
        return AugmentParams(top, left, flip)

    def to(self, device: torch.device) -> "AugmentParams":
        """Return the same parameters on `device`."""
        return AugmentParams(self.top.to(device), self.left.to(device), self.flip.to(device))


@dataclass(frozen=True)
class Augment:
    """Random crops and horizontal flips.

    Each image is padded with zeros, cropped to its old size at a random position, and mirrored with probability 1/2.

    Args:
        pad: Padding on each side in pixels; 0 for no crops.
        flip: Whether to mirror images.

    Example:
        >>> deat.fit(model, (images, labels), augment=deat.Augment(pad=4, flip=True))
    """

    pad: int = 4
    flip: bool = True

    def draw(self, num_images: int, generator: torch.Generator) -> AugmentParams:
        """Draw a crop position and a flip for each image.

        Args:
            num_images: Number of images.
            generator: The random generator; the parameters are on its device.

        Returns:
            The parameters for `apply`.
        """
        corners = torch.randint(0, 2 * self.pad + 1, (2, num_images), generator=generator, device=generator.device)
        flips = torch.rand(num_images, generator=generator, device=generator.device) < 0.5
        return AugmentParams(corners[0], corners[1], flips if self.flip else torch.zeros_like(flips))

    def apply(self, images: Tensor, params: AugmentParams) -> Tensor:
        """Crop and flip images.

        Args:
            images: Images of shape (N, C, H, W).
            params: A crop position and a flip for each image.

        Returns:
            Images of the same shape and type.
        """
        return self._crop(zero_pad(images, [self.pad] * 4), params)

    def apply_to_masks(self, masks: Tensor, params: AugmentParams, fill: int) -> Tensor:
        """Crop and flip masks as their images are.

        Args:
            masks: The class of each pixel, (N, H, W).
            params: The parameters that the images were changed by.
            fill: The label of pixels that come from the padding.

        Returns:
            Masks of the same shape and type.
        """
        return self._crop(zero_pad(masks[:, None], [self.pad] * 4, value=fill), params)[:, 0]

    def _crop(self, padded: Tensor, params: AugmentParams) -> Tensor:
        channels, height, width = padded.shape[1], padded.shape[2] - 2 * self.pad, padded.shape[3] - 2 * self.pad
        row = torch.arange(height, device=padded.device)
        col = torch.arange(width, device=padded.device)
        rows = params.top[:, None] + row
        cols = params.left[:, None] + torch.where(params.flip[:, None], width - 1 - col, col)
        index = (rows[:, :, None] * padded.shape[3] + cols[:, None, :]).flatten(1)
        index = index[:, None].expand(-1, channels, -1)
        return padded.flatten(2).gather(2, index).view(len(padded), channels, height, width)


def check_augment(augment: Any) -> Any:
    """Return an augmentation unchanged if it has the methods `draw` and `apply`.

    Args:
        augment: An `Augment`, an object with the same methods, or None.

    Returns:
        The argument.

    Raises:
        UsageError: If the argument is something else, such as True or the class `Augment`.
    """
    if augment is None or (not isinstance(augment, type) and hasattr(augment, "draw") and hasattr(augment, "apply")):
        return augment
    raise UsageError(
        f"augment={augment!r} is not an augmentation. Use deat.Augment(pad=4, flip=True), or the .augment of a data set "
        "from deat.load_data. Omit it for none, or to use that of a data set that fit gets whole."
    )
