"""Learning rates as pure functions of the batch: stepped once a batch, never once a replay."""

import math
from dataclasses import dataclass
from typing import Protocol

from deat.errors import unknown_name_error


class LRSchedule(Protocol):
    """The learning rate, and the momentum where it is cycled, at a step of `total`."""

    def at(self, step: int, total: int) -> tuple[float, float | None]:
        """(lr, momentum) for the batch that is about to be played; momentum None leaves it alone."""


@dataclass(frozen=True)
class ConstantLR:
    """A constant learning rate."""

    lr: float

    def at(self, step: int, total: int) -> tuple[float, float | None]:
        """Always lr."""
        return self.lr, None


@dataclass(frozen=True)
class MultiStepLR:
    """lr times factor at the beginning of each milestone, a whole epoch.

    The paper's standard setup decays at 1/2 and 4/5 of training, which are epochs 25 and 40 of 50.
    """

    lr: float
    milestones: tuple[int, ...]
    epochs: int
    factor: float = 0.1

    def at(self, step: int, total: int) -> tuple[float, float | None]:
        """lr, decayed once for each milestone passed."""
        passed = sum(step >= milestone * total // self.epochs for milestone in self.milestones)
        return self.lr * self.factor**passed, None


@dataclass(frozen=True)
class CyclicLR:
    """One triangle 0 -> lr -> 0 with its peak at a fraction of training; momentum falls and rises against it.

    The FAST setup: peak at the half, momentum 0.9 -> 0.8 -> 0.9.
    """

    lr: float
    peak: float = 0.5
    momentum: tuple[float, float] | None = (0.9, 0.8)

    def at(self, step: int, total: int) -> tuple[float, float | None]:
        """The triangle's height, and the momentum opposite to it."""
        up = self.peak * total
        height = step / up if step < up else (total - step) / (total - up)
        if self.momentum is None:
            return self.lr * height, None
        high, low = self.momentum
        return self.lr * height, high - (high - low) * height


@dataclass(frozen=True)
class CosineLR:
    """Half a cosine from lr to 0."""

    lr: float

    def at(self, step: int, total: int) -> tuple[float, float | None]:
        """lr (1 + cos(pi t)) / 2."""
        return self.lr * (1 + math.cos(math.pi * step / total)) / 2, None


LR_SCHEDULES = ("cyclic", "multistep", "cosine", "flat")


def get_lr_schedule(
    name: str,
    lr: float,
    epochs: int,
    *,
    milestones: tuple[int, ...] | None = None,
    peak: float = 0.5,
    momentum: tuple[float, float] | None = None,
) -> LRSchedule:
    """A learning rate by name."""
    match name:
        case "cyclic":
            return CyclicLR(lr, peak, momentum)
        case "multistep":
            usual = (max(1, epochs // 2), max(1, epochs * 4 // 5))
            return MultiStepLR(lr, usual if milestones is None else milestones, epochs)
        case "cosine":
            return CosineLR(lr)
        case "flat":
            return ConstantLR(lr)
    raise unknown_name_error("learning-rate schedule", name, LR_SCHEDULES)
