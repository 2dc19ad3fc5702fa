"""A small network with all that is fused in it, and trainers of it, for what only a GPU can show of an engine."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import deat
from deat.attack_schedules import EveryEpochs
from deat.data import ImageSet

SIDE, WIDTH = 16, 64


class Small(nn.Module):
    """A first convolution, batch norms with a sum and ReLUs, a mean over pixels; dropout, and reading, as asked for.

    reads is what cannot be recorded: the host asks the device for a number in the middle of a forward.
    """

    def __init__(self, dropout: float = 0.0, reads: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1, bias=False)
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.first, self.last = nn.BatchNorm2d(WIDTH), nn.BatchNorm2d(WIDTH)
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()
        self.head, self.reads = nn.Linear(WIDTH, 10), reads

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.conv(self.drop(torch.relu(self.first(x))))
        means = torch.relu(self.last(x)).mean((2, 3))
        return self.head(means / (1 + means.detach().float().mean().item()) if self.reads else means)


def small_net(dropout: float = 0.0, reads: bool = False) -> nn.Module:
    """The network, its weights always the same."""
    with torch.random.fork_rng():  # a GPU's stream is seeded with the others
        torch.manual_seed(0)
        return deat.add_normalization(Small(dropout, reads), (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


def small_trainer(
    method: str | deat.Method, net: nn.Module | None = None, *, data: Any = None, optimizer: Any = None, **settings: Any
) -> deat.Trainer:
    """A trainer on a GPU, in bf16, of three batches, the last of them short."""
    held = {"epochs": 4, "batch_size": 64, "lr": 0.01, "precision": "bf16", "device": "cuda", **settings}
    return deat.make_trainer(
        small_net() if net is None else net,
        small_images() if data is None else data,
        method=method,
        optimizer=optimizer,
        config=deat.TrainConfig(**held),
    )


def small_images() -> ImageSet:
    """Noise, always the same."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (130, 3, SIDE, SIDE), dtype=torch.uint8, generator=generator)
    return ImageSet(pixels, torch.arange(130) % 10, tuple("0123456789"))


def growing(name: str) -> deat.Method:
    """A method whose k is 0, 1, 2 and 3, an epoch each."""
    method = deat.get_method(name)
    held = method.schedule
    return replace(method, schedule=EveryEpochs(period=1, alpha_eps=held.alpha_eps, stop_threshold=held.stop_threshold))
