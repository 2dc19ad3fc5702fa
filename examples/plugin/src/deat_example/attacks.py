"""An attack for evaluations. Its name is that of the entry point."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import deat


@dataclass(frozen=True)
class RandomSigns:
    """One random corner of the ball."""

    name: str = "random-signs"

    def __call__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        threat: deat.ThreatModel,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return an image at distance eps, without looking at the network."""
        return (x + threat.initial_delta(x, "bernoulli", generator)).clamp(0, 1)
