"""Mirrored weights: with them the gradient by a convolution's input is a convolution itself.

A mirrored weight is turned by 180 degrees, its inputs and outputs exchanged. cuDNN's own way to that gradient blanks
its workspace in a launch of its own.
"""

from typing import Any

import torch
from torch import Tensor, nn

from deat.kernels.sizes import is_plain, pair

MIRROR = "_mirrored"
CHANNELS = 128
"""From how many channels on, in and out, a mirrored weight is taken to pay: a guess that nobody measured."""


def mirrored(weight: Tensor) -> Tensor | None:
    """A weight's mirrored copy, if it has one."""
    return getattr(weight, MIRROR, None)


def share(weight: Tensor, alias: Tensor) -> Tensor:
    """An alias of a weight, which has the same mirror."""
    setattr(alias, MIRROR, mirrored(weight))
    return alias


def fits(weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> bool:
    """Whether the gradient by a convolution's input is a convolution of the same kind."""
    if isinstance(padding, str) or not is_plain(stride, dilation, groups):
        return False
    return all(pad < size for size, pad in zip(weight.shape[2:], pair(padding), strict=True))


def can_be_mirrored(layer: nn.Module) -> bool:
    """Whether a layer is a convolution of many channels that a mirrored weight serves."""
    if type(layer) is not nn.Conv2d or layer.padding_mode != "zeros" or layer.bias is not None:
        return False
    channels = layer.in_channels, layer.out_channels
    many = min(channels) >= CHANNELS and all(count % 8 == 0 for count in channels) and min(layer.kernel_size) > 1
    return many and fits(layer.weight, layer.stride, layer.padding, layer.dilation, layer.groups)


class Mirrors:
    """Mirrored copies of those weights that are channels last and of the first one's type; one launch renews them."""

    def __init__(self, weights: list[Tensor]) -> None:
        alike = [w for w in weights if w.dtype == weights[0].dtype]
        self._weights = [w for w in alike if w.is_contiguous(memory_format=torch.channels_last)]
        self.copies = [_blank_mirror(weight) for weight in self._weights]
        self._table: Any = None
        for weight, copy in zip(self._weights, self.copies, strict=True):
            setattr(weight, MIRROR, copy)
        self.refresh()

    def refresh(self) -> None:
        """Mirror the weights as they are now."""
        if not self._weights:
            return
        from deat.kernels.turn import table_of, turn

        if self._table is None:
            self._table = table_of(self._weights, self.copies)
        turn(self._table, self._weights[0].dtype)


def _blank_mirror(weight: Tensor) -> Tensor:
    outputs, inputs, *size = weight.shape
    like = {"dtype": weight.dtype, "device": weight.device, "memory_format": torch.channels_last}
    return torch.empty((inputs, outputs, *size), **like)  # type: ignore[call-overload, no-any-return]
