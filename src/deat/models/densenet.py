"""DenseNet-121 for small images, with the growth rate of the paper's runs (12) or the usual one (32)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deat.errors import UsageError
from deat.models.model_registry import register_model

LAYERS_PER_BLOCK = (6, 12, 24, 16)
MIN_IMAGE_SIZE = 2 ** (len(LAYERS_PER_BLOCK) - 1)


class DenseLayer(nn.Module):
    """A 1x1 bottleneck of four times the growth and a 3x3 convolution, whose output is concatenated to the input."""

    def __init__(self, width_in: int, growth_rate: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(width_in)
        self.conv1 = nn.Conv2d(width_in, 4 * growth_rate, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(4 * growth_rate)
        self.conv2 = nn.Conv2d(4 * growth_rate, growth_rate, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return features (B, C + growth, H, W) for features (B, C, H, W)."""
        out = self.conv1(F.relu(self.bn1(x)))
        return torch.cat([x, self.conv2(F.relu(self.bn2(out)))], 1)


class Transition(nn.Module):
    """The layers between two dense blocks: a 1x1 convolution halves the channels, and an average pool height and width."""

    def __init__(self, width_in: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(width_in)
        self.conv = nn.Conv2d(width_in, width_in // 2, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return features (B, C // 2, H // 2, W // 2) for features (B, C, H, W)."""
        return F.avg_pool2d(self.conv(F.relu(self.bn(x))), 2)


class DenseNet(nn.Module):
    """A 3x3 stem of twice the growth, four dense blocks, batch norm, average pool and a linear layer."""

    def __init__(self, growth_rate: int, num_classes: int, in_channels: int) -> None:
        super().__init__()
        width = 2 * growth_rate
        self.conv1 = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
        self.features = nn.Sequential()
        for index, layers in enumerate(LAYERS_PER_BLOCK):
            if index:
                self.features.append(Transition(width))
                width //= 2
            self.features.append(_make_dense_block(width, growth_rate, layers))
            width += layers * growth_rate
        self.bn = nn.BatchNorm2d(width)
        self.linear = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, num_classes) for images of at least 8x8 pixels."""
        x = self.features(self.conv1(x))
        logits: Tensor = self.linear(F.relu(self.bn(x)).mean((2, 3)))
        return logits


def _make_dense_block(width: int, growth_rate: int, num_layers: int) -> nn.Sequential:
    return nn.Sequential(*(DenseLayer(width + index * growth_rate, growth_rate) for index in range(num_layers)))


def _make_densenet(growth_rate: int, num_classes: int, in_channels: int, image_size: int) -> DenseNet:
    if image_size < MIN_IMAGE_SIZE:
        raise UsageError(
            f"image_size {image_size} is too small for a DenseNet, which halves the image three times: "
            f"use images of at least {MIN_IMAGE_SIZE} pixels or another model"
        )
    return DenseNet(growth_rate, num_classes, in_channels)


@register_model(
    "densenet121_12",
    description="DenseNet-121 with growth 12, as in the paper's runs",
    parameters=1_000_618,
    input="3x32x32",
)
def densenet121_12(num_classes: int = 10, in_channels: int = 3, image_size: int = 32) -> DenseNet:
    """Build the paper's DenseNet-121, with growth rate 12 and a million parameters."""
    return _make_densenet(12, num_classes, in_channels, image_size)


@register_model(
    "densenet121_32",
    description="DenseNet-121 with the usual growth 32",
    parameters=6_956_298,
    input="3x32x32",
)
def densenet121_32(num_classes: int = 10, in_channels: int = 3, image_size: int = 32) -> DenseNet:
    """Build DenseNet-121 with growth rate 32 and seven million parameters."""
    return _make_densenet(32, num_classes, in_channels, image_size)
