"""The small convolutional network for digits: fast on a CPU, and without batch norm."""

from torch import nn

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
