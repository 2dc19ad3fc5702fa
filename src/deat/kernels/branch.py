"""Convolutions whose results nobody needs yet, such as those of shortcuts, on a stream of their own.

Autograd takes a gradient on the stream of its forward and waits where streams meet, so on the way back they are beside
the rest as well.
"""

from typing import Any

import torch
from torch import Tensor

from deat.kernels import forked
from deat.kernels.streams import on_gpu, side

_read: list[Tensor] = []
"""Gradients that are read beside. Nobody may add to them in their place, as autograd does with what it alone holds."""


def begin_conv2d(x: Tensor, *rest: Any, **named: Any) -> Tensor:
    """A convolution that is begun beside; nobody but `arrived` may look at its result."""
    if not on_gpu(x):
        return forked.conv2d(x, *rest, **named)
    _read.clear()
    beside = side(x.device, "branches")
    beside.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(beside):
        y = forked.conv2d(x, *rest, **named)
    x.record_stream(beside)
    if y.requires_grad:
        y.register_hook(_read.append)  # type: ignore[no-untyped-call]
    return y


def arrived(y: Tensor) -> Tensor:
    """The result of such a convolution, which is waited for."""
    if on_gpu(y):
        here = torch.cuda.current_stream(y.device)
        here.wait_stream(side(y.device, "branches"))
        y.record_stream(here)
    return y
