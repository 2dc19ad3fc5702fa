"""Normalisation inside the model, so that attacks and radii are always in pixels of [0, 1]."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deat.errors import UsageError, check_is_instance

IMAGE_CHANNELS = (1, 3, 4)
"""The numbers of channels of grey images and of colour images, without and with transparency."""


class Normalize(nn.Module):
    """The map x -> (x - mean) / std, channel by channel, of images in [0, 1], or feature by feature of other inputs.

    Channels, or features, are on axis 1.

    Both are persistent buffers, so that a weights file contains the normalisation of its training.

    Args:
        mean: Mean of each channel.
        std: Standard deviation of each channel.
        unit_range: Whether inputs are in [0, 1], so that larger numbers would be a mistake; False for other inputs.

    Raises:
        UsageError: If they are not numbers of [0, 1] pixels, one per channel each, with std above 0.

    Example:
        >>> deat.models.Normalize(mean=[0.4914, 0.4822, 0.4465], std=[0.2471, 0.2435, 0.2616])
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float], unit_range: bool = True) -> None:
        super().__init__()
        means, stds = _to_finite_floats("mean", mean), _to_finite_floats("std", std)
        _check_mean_and_std(means, stds, unit_range)
        self.register_buffer("mean", torch.tensor(means).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(stds).view(1, -1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised images (B, C, H, W), or other inputs (B, C, ...).

        Args:
            x: The inputs, in pixels of [0, 1] or another box.
        """
        if x.dim() == 4:
            return (x - self.mean) / self.std
        shape = (1, -1, *[1] * (x.dim() - 2))
        return (x - self.mean.view(shape)) / self.std.view(shape)


class Normalized(nn.Module):
    """A network that takes images in [0, 1]: `normalize` first, then `net`.

    Args:
        net: Network for normalised images.
        normalize: Layer that normalises them.
    """

    def __init__(self, net: nn.Module, normalize: Normalize) -> None:
        super().__init__()
        self.normalize = normalize
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """Return logits for images in [0, 1]."""
        logits: Tensor = self.net(self.normalize(x))
        return logits


def add_normalization(
    model: nn.Module, mean: Sequence[float], std: Sequence[float], unit_range: bool = True
) -> Normalized:
    """Wrap a model that takes normalised images, so that it takes images in [0, 1].

    Args:
        model: Network for normalised images.
        mean: Mean of each channel.
        std: Standard deviation of each channel.
        unit_range: Whether inputs are in [0, 1], as for `Normalize`.

    Returns:
        The wrapped network, whose `net` is the model.

    Raises:
        UsageError: If mean and std are not numbers of [0, 1] pixels, one per channel each, with std above 0.

    Example:
        >>> model = deat.add_normalization(net, mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
    """
    check_is_instance(model)
    return Normalized(model, Normalize(mean, std, unit_range))


def parse_mean_std(normalize: Any) -> tuple[Sequence[float], Sequence[float]] | None:
    """Check that a value is a pair of mean and standard deviation.

    Args:
        normalize: (mean, std), or None.

    Returns:
        The pair, or None.

    Raises:
        UsageError: If the value is no pair.
    """
    if normalize is None:
        return None
    if isinstance(normalize, tuple | list) and len(normalize) == 2:
        return normalize[0], normalize[1]
    raise UsageError(
        f"normalize={normalize!r} is not accepted: give (mean, std), each one number per channel, or 'data' for those "
        "of the data, or 'none'"
    )


def get_input_std(model: nn.Module) -> Tensor | None:
    """Return the standard deviation that a model divides its inputs by.

    It converts between gradients with respect to normalised inputs and gradients with respect to pixels.

    Args:
        model: Any network.

    Returns:
        The std (1, C, 1, 1) of the first Normalize in the model, or None where it has none.
    """
    return next((module.std for module in model.modules() if isinstance(module, Normalize)), None)


def _to_finite_floats(name: str, values: Sequence[float]) -> list[float]:
    try:
        numbers = [float(value) for value in values]
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{name} {values!r} is not a list of numbers: give one number per channel, e.g. [0.5]"
        ) from error
    if not numbers or not all(math.isfinite(number) for number in numbers):
        raise UsageError(f"{name} {values!r} must have one finite number per channel")
    return numbers


def _check_mean_and_std(means: list[float], stds: list[float], unit_range: bool) -> None:
    if len(means) != len(stds):
        raise UsageError(f"mean has {len(means)} channels and std has {len(stds)}: give one number per channel to both")
    if min(stds) <= 0:
        raise UsageError(f"std {stds!r} must be above 0 in every channel: inputs are divided by it; use 1 for none")
    is_image = len(means) in IMAGE_CHANNELS  # features of a table have values of any size
    if unit_range and is_image and max(*means, *stds) > 1:
        raise UsageError(
            f"mean {means!r} and std {stds!r} look like numbers of 0-255 pixels, and images are in [0, 1]: divide both "
            "by 255"
        )
