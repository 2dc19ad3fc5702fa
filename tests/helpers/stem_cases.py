"""What our first convolution must agree with, for tests on a CPU (interpreted) and on a GPU."""

from typing import NamedTuple

import torch
from torch import Tensor

from deat.engine.kernels.first_conv import conv2d_few_channels


class Stem(NamedTuple):
    channels: int = 3
    kernel: tuple[int, int] = (3, 3)
    padding: int | tuple[int, int] = 1
    out: int = 64
    shape: tuple[int, int, int] = (2, 7, 9)  # of images, their height and their width
    last: bool = False
    standardised: bool = True
    bias: bool = True
    dtype: torch.dtype = torch.float32  # of the images


def compare(case: Stem, half: torch.dtype, device: str) -> tuple[list[Tensor], list[Tensor]]:
    """(torch's in float64, ours): the convolution, and gradients by images, weight and bias."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    images, *sides = case.shape
    x, weight = draw(images, case.channels, *sides), draw(case.out, case.channels, *case.kernel)
    x = x.contiguous(memory_format=torch.channels_last) if case.last else x
    leaves = [x, weight, *([draw(case.out)] if case.bias else [])]
    shift, scale = (draw(1, case.channels, 1, 1).abs() + 0.5 for _ in range(2))
    between = {"shift": shift, "scale": scale} if case.standardised else {}
    shift, scale = (shift.float(), scale.float()) if case.standardised else (torch.zeros(1), torch.ones(1))

    leaves = [leaf.requires_grad_() for leaf in leaves]
    rest = (None,) if len(leaves) == 2 else ()
    standard = (x.float() - shift.to(device)) / scale.to(device)
    exact = [leaf.to(half).double() for leaf in (standard, *leaves[1:])]
    torchs = torch.conv2d(*exact, *rest, 1, case.padding)
    ours = conv2d_few_channels(*leaves, *rest, 1, case.padding, **between)
    dy = draw(*ours.shape, dtype=half)
    grads = [torch.autograd.grad(y, leaves, dy.to(y.dtype)) for y in (torchs, ours)]
    assert all(grad.dtype == leaf.dtype for grad, leaf in zip(grads[1], leaves, strict=True))
    assert grads[1][0].stride() == x.stride()
    return [torchs.detach(), *grads[0]], [ours.detach(), *grads[1]]
