"""Mirrored weights: with them the gradient by a convolution's input is a convolution itself.

cuDNN's own way to that gradient is the slower one where channels are many, and blanks its workspace in a launch of its
own. A mirrored weight is turned by 180 degrees, its inputs and outputs exchanged.
"""

from typing import Any

import torch
from torch import Tensor, nn

MIRROR = "_mirrored"
CHANNELS = 128
"""From how many channels on, in and out, a mirrored weight pays."""


def mirrored(weight: Tensor) -> Tensor | None:
    """A weight's mirrored copy, if it has one."""
    return getattr(weight, MIRROR, None)


def share(weight: Tensor, alias: Tensor) -> Tensor:
    """An alias of a weight, which has the same mirror."""
    setattr(alias, MIRROR, mirrored(weight))
    return alias


def can_be_mirrored(layer: nn.Module) -> bool:
    """Whether a layer is a convolution whose gradient by its input is one of the same kind."""
    if type(layer) is not nn.Conv2d or layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        return False
    plain = layer.stride == layer.dilation == (1, 1) and layer.groups == 1
    sizes = list(zip(layer.kernel_size, layer.padding, strict=True))
    channels = layer.in_channels, layer.out_channels
    many = min(channels) >= CHANNELS and all(count % 8 == 0 for count in channels)
    return plain and many and all(size > 1 and pad < size for size, pad in sizes)


class Mirrors:
    """Mirrored copies of some weights of one type, those that are channels last; one launch makes them all anew."""

    def __init__(self, weights: list[Tensor]) -> None:
        self._weights = [w for w in weights if w.is_contiguous(memory_format=torch.channels_last)]
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
