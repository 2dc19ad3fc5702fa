"""PreAct-ResNets for small images: 18, the network of the paper's main tables, and 8, which trains on a CPU."""

from torch import Tensor, nn
from torch.nn import functional as F

from deat.models.model_registry import register_model

STAGE_CHANNELS = (64, 128, 256, 512)


class PreActBlock(nn.Module):
    """Two 3x3 convolutions, each after batch norm and ReLU, and a shortcut.

    The shortcut's projection takes the raw input of the block, not the pre-activated one, as in the paper's runs.
    """

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(width_in)
        self.conv1 = nn.Conv2d(width_in, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.shortcut = nn.Sequential()
        if stride != 1 or width_in != width:
            self.shortcut.append(nn.Conv2d(width_in, width, 1, stride=stride, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output for features (B, C, H, W)."""
        out = self.conv1(F.relu(self.bn1(x)))
        summed: Tensor = self.conv2(F.relu(self.bn2(out))) + self.shortcut(x)
        return summed


class PreActResNet(nn.Module):
    """A 3x3 stem, four stages of pre-activation blocks, batch norm, average pool and a linear layer."""

    def __init__(self, blocks_per_stage: tuple[int, ...], num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, STAGE_CHANNELS[0], 3, padding=1, bias=False)
        self.layer1 = _make_stage(STAGE_CHANNELS[0], STAGE_CHANNELS[0], blocks_per_stage[0], stride=1)
        self.layer2 = _make_stage(STAGE_CHANNELS[0], STAGE_CHANNELS[1], blocks_per_stage[1], stride=2)
        self.layer3 = _make_stage(STAGE_CHANNELS[1], STAGE_CHANNELS[2], blocks_per_stage[2], stride=2)
        self.layer4 = _make_stage(STAGE_CHANNELS[2], STAGE_CHANNELS[3], blocks_per_stage[3], stride=2)
        self.bn = nn.BatchNorm2d(STAGE_CHANNELS[3])
        self.linear = nn.Linear(STAGE_CHANNELS[3], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, num_classes) for images of any size."""
        x = self.layer4(self.layer3(self.layer2(self.layer1(self.conv1(x)))))
        logits: Tensor = self.linear(F.relu(self.bn(x)).mean((2, 3)))
        return logits


def _make_stage(width_in: int, width: int, num_blocks: int, stride: int) -> nn.Sequential:
    first = PreActBlock(width_in, width, stride)
    return nn.Sequential(first, *(PreActBlock(width, width, 1) for _ in range(num_blocks - 1)))


@register_model(
    "preact_resnet18",
    description="PreAct-ResNet-18, the paper's main network for CIFAR-sized images",
    parameters=11_172_170,
    input="3x32x32",
)
def preact_resnet18(num_classes: int = 10, in_channels: int = 3) -> PreActResNet:
    """Build PreAct-ResNet-18, with two blocks in each of four stages."""
    return PreActResNet((2, 2, 2, 2), num_classes, in_channels)


@register_model(
    "preact_resnet8",
    description="PreAct-ResNet of 32 to 128 channels at half the image's size, for trials on a CPU",
    parameters=308_266,
    input="3x32x32",
)
def preact_resnet8(num_classes: int = 10, in_channels: int = 3) -> nn.Sequential:
    """Build a small PreAct-ResNet: a stem that halves the image, three stages of one block, and the usual head."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 32, 3, stride=2, padding=1, bias=False),
        _make_stage(32, 32, 1, stride=1),
        _make_stage(32, 64, 1, stride=2),
        _make_stage(64, 128, 1, stride=2),
        nn.BatchNorm2d(128),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, num_classes),
    )
