"""ResNet-18 and ResNet-50 for ImageNet-sized images, with torchvision's parameter names.

A state dict of torchvision's models loads into these, and one of these into torchvision's.
"""

from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from deat.models.model_registry import register_model


class BasicBlock(nn.Module):
    """Two 3x3 convolutions, each before batch norm, and a shortcut: the block of ResNet-18."""

    expansion: ClassVar[int] = 1

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _make_shortcut(width_in, width * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output for features (B, C, H, W)."""
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.downsample(x))


class Bottleneck(nn.Module):
    """A 3x3 convolution between two of 1x1, and a shortcut: the block of ResNet-50.

    The 3x3 convolution has the stride, as in torchvision ("version 1.5").
    """

    expansion: ClassVar[int] = 4

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, width * self.expansion, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.downsample = _make_shortcut(width_in, width * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output for features (B, C, H, W)."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        return F.relu(self.bn3(self.conv3(out)) + self.downsample(x))


BlockType = type[BasicBlock] | type[Bottleneck]


class ResNet(nn.Module):
    """A 7x7 stem that quarters the image, four stages of residual blocks, average pool and a linear layer."""

    def __init__(self, block: BlockType, blocks_per_stage: tuple[int, ...], num_classes: int, in_channels: int) -> None:
        super().__init__()
        out = block.expansion
        self.conv1 = nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = _make_stage(block, 64, 64, blocks_per_stage[0], stride=1)
        self.layer2 = _make_stage(block, 64 * out, 128, blocks_per_stage[1], stride=2)
        self.layer3 = _make_stage(block, 128 * out, 256, blocks_per_stage[2], stride=2)
        self.layer4 = _make_stage(block, 256 * out, 512, blocks_per_stage[3], stride=2)
        self.fc = nn.Linear(512 * out, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, num_classes) for images of any size."""
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, stride=2, padding=1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


def _make_shortcut(width_in: int, width: int, stride: int) -> nn.Sequential:
    """The shortcut, which is empty (the identity) where the shapes agree."""
    if stride == 1 and width_in == width:
        return nn.Sequential()
    return nn.Sequential(nn.Conv2d(width_in, width, 1, stride=stride, bias=False), nn.BatchNorm2d(width))


def _make_stage(block: BlockType, width_in: int, width: int, num_blocks: int, stride: int) -> nn.Sequential:
    first = block(width_in, width, stride)
    return nn.Sequential(first, *(block(width * block.expansion, width, 1) for _ in range(num_blocks - 1)))


@register_model(
    "resnet18",
    description="ResNet-18 for ImageNet sizes, torchvision's parameter names (count at 1000 classes)",
    parameters=11_689_512,
    input="3x224x224",
)
def resnet18(num_classes: int = 1000, in_channels: int = 3) -> ResNet:
    """Build ResNet-18 for ImageNet-sized images."""
    return ResNet(BasicBlock, (2, 2, 2, 2), num_classes, in_channels)


@register_model(
    "resnet50",
    description="ResNet-50 for ImageNet sizes, torchvision's parameter names (count at 1000 classes)",
    parameters=25_557_032,
    input="3x224x224",
)
def resnet50(num_classes: int = 1000, in_channels: int = 3) -> ResNet:
    """Build ResNet-50 for ImageNet-sized images, the network of the paper's ImageNet runs."""
    return ResNet(Bottleneck, (3, 4, 6, 3), num_classes, in_channels)
