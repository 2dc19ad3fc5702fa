"""Small networks: a CNN for digits, a perceptron for tables, a 1D CNN for waveforms and a U-Net for masks."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deat.models.model_registry import register_model


@register_model(
    "small",
    description="three-layer CNN without batch norm, for digits and quick trials",
    parameters=25_866,
    input="1x8x8",
)
def small(num_classes: int = 10, in_channels: int = 1, image_size: int = 8) -> nn.Sequential:
    """Build convolutions of 16, 32 and 64 channels, the last two of which halve the image, and a linear layer."""
    side = -(-image_size // 4)
    return nn.Sequential(
        nn.Conv2d(in_channels, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * side * side, num_classes),
    )


@register_model("mlp", description="perceptron of two hidden layers, for tables", parameters=20_738, input="30")
def mlp(num_classes: int = 2, in_channels: int = 30) -> nn.Sequential:
    """Build two hidden layers of 128 units; `in_channels` is the number of features."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(in_channels, 128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, num_classes),
    )


@register_model(
    "audio_cnn", description="1D CNN with four strided blocks, for waveforms", parameters=93_194, input="1x4000"
)
def audio_cnn(num_classes: int = 10, in_channels: int = 1) -> nn.Sequential:
    """Build a network like M5 (Dai et al. 2017): a wide strided convolution, three further ones, a mean over time."""
    widths = (in_channels, 64, 64, 128, 128)
    layers: list[nn.Module] = []
    for i, (before, after) in enumerate(pairwise(widths)):
        kernel, stride = (80, 4) if i == 0 else (3, 1)
        conv = nn.Conv1d(before, after, kernel, stride=stride, padding=kernel // 2, bias=False)
        layers += [conv, nn.BatchNorm1d(after), nn.ReLU(), _MaxPool(4)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(widths[-1], num_classes))


class _MaxPool(nn.Module):
    """A max pooling over the whole signal where that is shorter than the window, so that short recordings fit."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        """Pool, over the whole length where it is shorter than the window."""
        return F.max_pool1d(x, min(self.size, x.shape[-1]))


@register_model("unet", description="small U-Net of three levels, for masks", parameters=472_523, input="3x96x128")
def unet(num_classes: int = 11, in_channels: int = 3) -> nn.Module:
    """Build a U-Net of 32, 64 and 128 channels; images may have any size."""
    return UNet(num_classes, in_channels)


class UNet(nn.Module):
    """A U-Net (Ronneberger et al. 2015) with batch norm, whose logits have the size of the image.

    Args:
        num_classes: Number of classes.
        in_channels: Number of channels of an image.
        widths: Channels of each level.
    """

    def __init__(self, num_classes: int, in_channels: int, widths: tuple[int, ...] = (32, 64, 128)) -> None:
        super().__init__()
        self.down = nn.ModuleList(_double_conv(a, b) for a, b in pairwise((in_channels, *widths)))
        self.up = nn.ModuleList(_double_conv(a + b, b) for a, b in pairwise(reversed(widths)))
        self.head = nn.Conv2d(widths[0], num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, classes, H, W)."""
        skipped: list[Tensor] = []
        for i, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2, ceil_mode=True) if i else x)
            skipped.append(x)
        for block, skip in zip(self.up, reversed(skipped[:-1]), strict=True):
            x = block(torch.cat((F.interpolate(x, size=skip.shape[-2:], mode="nearest"), skip), 1))
        logits: Tensor = self.head(x)
        return logits


def _double_conv(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(),
        nn.Conv2d(after, after, 3, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(),
    )
