"""A network. deat passes those of num_classes, in_channels and image_size that the function names."""

from torch import nn


def linear(num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """One layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * image_size**2, num_classes))
