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


def fits(weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> bool:
    """Whether the gradient by a convolution's input is a convolution of the same kind."""
    if isinstance(padding, str) or groups != 1:
        return False
    ones = all(size == 1 for sizes in (stride, dilation) for size in pair(sizes))
    return ones and all(pad < size for size, pad in zip(weight.shape[2:], pair(padding), strict=True))


def pair(sizes: Any) -> tuple[int, int]:
    """A convolution's size by height and width; torch takes one number for both, also in a list of its own."""
    held = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    return held[0], held[-1]


def can_be_mirrored(layer: nn.Module) -> bool:
    """Whether a layer is a convolution of many channels that a mirrored weight serves."""
    if type(layer) is not nn.Conv2d or layer.padding_mode != "zeros" or layer.bias is not None:
        return False
    channels = layer.in_channels, layer.out_channels
    many = min(channels) >= CHANNELS and all(count % 8 == 0 for count in channels) and min(layer.kernel_size) > 1
    return many and fits(layer.weight, layer.stride, layer.padding, layer.dilation, layer.groups)


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
