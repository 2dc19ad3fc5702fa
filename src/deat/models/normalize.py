"""Normalisation inside the model, so that attacks and budgets always live in pixels of [0, 1]."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deat.errors import UsageError, check_is_instance


class Normalize(nn.Module):
    """The map x -> (x - mean) / std, channel by channel, of images in [0, 1].

    Both are persistent buffers, so a weights file carries the normalisation it was trained with.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        means, stds = _to_finite_floats("mean", mean), _to_finite_floats("std", std)
        _check_mean_and_std(means, stds)
        self.register_buffer("mean", torch.tensor(means).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(stds).view(1, -1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Normalised images (B, C, H, W)."""
        return (x - self.mean) / self.std


class Normalized(nn.Module):
    """A network that takes images in [0, 1]: `normalize` first, then `net`."""

    def __init__(self, net: nn.Module, normalize: Normalize) -> None:
        super().__init__()
        self.normalize = normalize
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images in [0, 1]."""
        logits: Tensor = self.net(self.normalize(x))
        return logits


def add_normalization(model: nn.Module, mean: Sequence[float], std: Sequence[float]) -> Normalized:
    """The model behind its own normalisation; it then takes images in [0, 1]."""
    check_is_instance(model)
    return Normalized(model, Normalize(mean, std))


def parse_mean_std(normalize: Any) -> tuple[Sequence[float], Sequence[float]] | None:
    """The mean and standard deviation, or None; an error for what is no pair."""
    if normalize is None:
        return None
    if isinstance(normalize, tuple | list) and len(normalize) == 2:
        return normalize[0], normalize[1]
    raise UsageError(
        f"normalize={normalize!r} is not accepted: give (mean, std), each one number per channel, or 'data' for those "
        "of the data, or 'none'"
    )


def get_input_std(model: nn.Module) -> Tensor | None:
    """The std (1, C, 1, 1) of the first Normalize in the model, None when there is none.

    It turns a gradient with respect to normalised inputs into one with respect to pixels and back.
    """
    return next((module.std for module in model.modules() if isinstance(module, Normalize)), None)


def _to_finite_floats(what: str, values: Sequence[float]) -> list[float]:
    try:
        numbers = [float(value) for value in values]
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{what} {values!r} is not a list of numbers: give one number per channel, e.g. [0.5]"
        ) from error
    if not numbers or not all(math.isfinite(number) for number in numbers):
        raise UsageError(f"{what} {values!r} must hold one finite number per channel")
    return numbers


def _check_mean_and_std(means: list[float], stds: list[float]) -> None:
    if len(means) != len(stds):
        raise UsageError(f"mean has {len(means)} channels and std has {len(stds)}: give one number per channel to both")
    if min(stds) <= 0:
        raise UsageError(f"std {stds!r} must be above 0 in every channel: it divides; use 1 to leave one as it is")
    if max(*means, *stds) > 1:
        raise UsageError(
            f"mean {means!r} and std {stds!r} look like numbers of 0-255 pixels, and images are in [0, 1]: divide both "
            "by 255"
        )
