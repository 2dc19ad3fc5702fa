"""A task: what outputs and labels mean."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

import deat


@dataclass(frozen=True)
class Angles(deat.tasks.Task):
    """A direction in radians; an answer is right within `tolerance`."""

    name: ClassVar[str] = "angles"
    tolerance: float = 0.3

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """One minus the cosine of the error."""
        return 1 - torch.cos(outputs.flatten() - y)

    def is_right(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Whether the error is at most the tolerance."""
        return self.loss(outputs, y) <= 1 - torch.cos(torch.tensor(self.tolerance))
