"""Networks small enough to train in milliseconds, and images to feed them."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

CLASSES = 3
SIDE = 4


def seeded(build, seed: int = 0) -> nn.Module:
    """A network whose weights are a function of the seed, drawn without touching the global generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def conv_net(*, batch_norm: bool = False, dropout: float = 0.0, seed: int = 0, channels: int = 1) -> nn.Sequential:
    """Convolution (batch norm), tanh, (dropout), convolution, tanh, linear: smooth, so that gradients never vanish."""

    def build() -> nn.Sequential:
        layers = [
            nn.Conv2d(channels, 4, 3, padding=1),
            *([nn.BatchNorm2d(4)] if batch_norm else []),
            nn.Tanh(),
            *([nn.Dropout(dropout)] if dropout else []),
            nn.Conv2d(4, 4, 3, stride=2, padding=1),
            *([nn.BatchNorm2d(4)] if batch_norm else []),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(4 * (SIDE // 2) ** 2, CLASSES),
        ]
        return nn.Sequential(*layers)

    return seeded(build, seed)


def images(n: int = 6, *, seed: int = 0, channels: int = 1, side: int = SIDE) -> tuple[Tensor, Tensor]:
    """Random images with pixels at exactly 0 and 1 among them, and labels that hold every class."""
    generator = torch.Generator().manual_seed(seed)
    x = (1.6 * torch.rand(n, channels, side, side, generator=generator) - 0.3).clamp(0, 1)
    return x, torch.arange(n) % CLASSES


def learnable(n: int = 24, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images whose class shows: one bright row for each class, in noise."""
    x, y = images(n, seed=seed)
    x = 0.4 * x
    x[torch.arange(n), 0, y] += 0.5
    return x, y


class Items(Dataset[Any]):
    """A data set of somebody's own, which gives image after image by its number."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.x[index], int(self.y[index])


def weights(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(a, b, strict=True))
