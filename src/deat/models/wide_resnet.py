"""Wide ResNet for small images, in the form that TRADES uses and robust training has used since."""

from torch import Tensor, nn
from torch.nn import functional as F

from deat.models.model_registry import register_model


class WideBlock(nn.Module):
    """Two 3x3 convolutions, each after batch norm and ReLU; a shortcut that widens takes the pre-activated input."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(width_in)
        self.conv1 = nn.Conv2d(width_in, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        widens = width_in != width
        self.shortcut = nn.Conv2d(width_in, width, 1, stride=stride, bias=False) if widens else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output for features (B, C, H, W)."""
        active = F.relu(self.bn1(x))
        out: Tensor = self.conv2(F.relu(self.bn2(self.conv1(active))))
        return out + (x if self.shortcut is None else self.shortcut(active))


class WideResNet(nn.Module):
    """A 16-channel 3x3 stem, three stages of wide blocks, batch norm, average pool and a linear layer."""

    def __init__(self, depth: int, widen_factor: int, num_classes: int, in_channels: int) -> None:
        super().__init__()
        blocks = (depth - 4) // 6
        widths = (16 * widen_factor, 32 * widen_factor, 64 * widen_factor)
        self.conv1 = nn.Conv2d(in_channels, 16, 3, padding=1, bias=False)
        self.block1 = _make_stage(16, widths[0], blocks, stride=1)
        self.block2 = _make_stage(widths[0], widths[1], blocks, stride=2)
        self.block3 = _make_stage(widths[1], widths[2], blocks, stride=2)
        self.bn = nn.BatchNorm2d(widths[2])
        self.linear = nn.Linear(widths[2], num_classes)
        self._init_weights()

    def _init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, num_classes) for images of any size."""
        x = self.block3(self.block2(self.block1(self.conv1(x))))
        logits: Tensor = self.linear(F.relu(self.bn(x)).mean((2, 3)))
        return logits


def _make_stage(width_in: int, width: int, num_blocks: int, stride: int) -> nn.Sequential:
    first = WideBlock(width_in, width, stride)
    return nn.Sequential(first, *(WideBlock(width, width, 1) for _ in range(num_blocks - 1)))


@register_model(
    "wide_resnet34_10",
    description="WRN-34-10, the large network of the TRADES and MART comparisons",
    parameters=46_160_474,
    input="3x32x32",
)
def wide_resnet34_10(num_classes: int = 10, in_channels: int = 3) -> WideResNet:
    """Build WRN-34-10: 34 layers, ten times the width of a plain CIFAR ResNet, no dropout."""
    return WideResNet(34, 10, num_classes, in_channels)
