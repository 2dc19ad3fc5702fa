"""What our network's end and cross-entropy must agree with, for tests on a CPU (interpreted) and on a GPU."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from deat.engine.kernels.classifier_head import pooled_linear
from deat.engine.kernels.cross_entropy import fused_cross_entropy


class End(NamedTuple):
    images: int = 5
    channels: int = 24
    sides: tuple[int, int] = (4, 4)
    classes: int = 10
    bias: bool = True
    wide: bool = False  # weights in float32


def compare_ends(case: End, half: torch.dtype, device: str) -> tuple[list[Tensor], list[Tensor]]:
    """(torch's in float64, ours): logits, and gradients by features, weight and bias."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = half) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, half).to(dtype)

    x = draw(case.images, case.channels, *case.sides).contiguous(memory_format=torch.channels_last)
    weights = torch.float32 if case.wide else half
    leaves = [x, draw(case.classes, case.channels, dtype=weights)]
    leaves += [draw(case.classes, dtype=weights)] if case.bias else []
    leaves = [leaf.requires_grad_() for leaf in leaves]
    exact = [leaf.double() for leaf in leaves]
    torchs = F.linear(exact[0].mean((2, 3)), *exact[1:])
    ours = pooled_linear(*leaves)
    dy = draw(*ours.shape)
    grads = [torch.autograd.grad(y, leaves, dy.to(y.dtype)) for y in (torchs, ours)]
    assert ours.dtype == half
    assert all(grad.dtype == leaf.dtype for grad, leaf in zip(grads[1], leaves, strict=True))
    assert grads[1][0].is_contiguous(memory_format=torch.channels_last)
    return [torchs.detach(), *grads[0]], [ours.detach(), *grads[1]]


def compare_entropies(
    images: int, classes: int, half: torch.dtype, device: str, mean: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """(torch's in float64, ours): losses, or their mean, and gradients by logits, some of which are large."""
    generator = torch.Generator().manual_seed(0)
    logits = (20 * torch.randn((images, classes), generator=generator)).to(device, half).requires_grad_()
    y = torch.arange(images, device=device) % classes
    found = [
        F.cross_entropy(logits.double(), y, reduction="mean" if mean else "none"),
        fused_cross_entropy(logits, y, mean=mean),
    ]
    assert found[1].dtype == torch.float32
    slope = 100 * torch.rand(found[1].shape, generator=generator).to(device)
    grads = [torch.autograd.grad(loss, logits, slope.to(loss.dtype))[0] for loss in found]
    return [found[0].detach(), grads[0]], [found[1].detach(), grads[1]]
