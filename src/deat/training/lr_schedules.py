"""Learning rates as pure functions of the batch number; one step a batch, never one a replay."""

import math
from dataclasses import dataclass
from typing import Protocol

from deat.errors import unknown_name_error


class LRSchedule(Protocol):
    """The learning rate over training, and the momentum where it changes too."""

    def at(self, step: int, total: int) -> tuple[float, float | None]:
        """Return the learning rate and the momentum of a batch.

        Args:
            step: Number of the batch over all epochs, from 0.
            total: Number of batches in all epochs.

        Returns:
            The learning rate, and the momentum or None where the schedule does not change it.
        """


@dataclass(frozen=True)
class ConstantLR:
    """A constant learning rate.

    Args:
        lr: Learning rate.
    """

    lr: float

    def at(self, step: int, total: int) -> tuple[float, float | None]:
        """Return lr."""
        return self.lr, None


@dataclass(frozen=True)
class MultiStepLR:
    """A learning rate that is multiplied by a factor at the beginning of each milestone.

    The paper's standard setup decays at 1/2 and 4/5 of training, which are epochs 25 and 40 of 50.

    Args:
        lr: Learning rate before the first milestone.
        milestones: Epochs at whose beginning it decays.
        epochs: Number of epochs.
        factor: Factor of each decay.
    """

    lr: float
    milestones: tuple[int, ...]
    epochs: int
    factor: float = 0.1

    def at(self, step: int, total: int) -> tuple[float, float | None]:
        """Return lr, decayed once for each milestone passed."""
        num_passed = sum(step >= milestone * total // self.epochs for milestone in self.milestones)
        return self.lr * self.factor**num_passed, None


@dataclass(frozen=True)
class CyclicLR:
    """One triangle 0 -> lr -> 0; the momentum falls while the learning rate rises, and rises while it falls.

    The FAST setup turns at the half, with momentum 0.9 -> 0.8 -> 0.9.

    Args:
        lr: Highest learning rate.
        peak: Fraction of training at which it is reached.
        momentum: Highest and lowest momentum; None leaves the momentum unchanged.
    """

    lr: float
    peak: float = 0.5
    momentum: tuple[float, float] | None = (0.9, 0.8)

    def at(self, step: int, total: int) -> tuple[float, float | None]:
        """Return the height of the triangle, and the momentum."""
        steps_up = self.peak * total
        height = step / steps_up if step < steps_up else (total - step) / (total - steps_up)
        if self.momentum is None:
            return self.lr * height, None
        high, low = self.momentum
        return self.lr * height, high - (high - low) * height


@dataclass(frozen=True)
class CosineLR:
    """Half a cosine from lr to 0.

    Args:
        lr: Learning rate at the beginning.
    """

    lr: float

    def at(self, step: int, total: int) -> tuple[float, float | None]:
        """Return lr (1 + cos(pi t)) / 2."""
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
    """Return the learning-rate schedule of a name.

    Args:
        name: "cyclic", "multistep", "cosine" or "flat".
        lr: Highest learning rate.
        epochs: Number of epochs.
        milestones: Epochs at which "multistep" decays; by default 1/2 and 4/5 of training.
        peak: Fraction of training at which "cyclic" turns.
        momentum: Highest and lowest momentum of "cyclic"; None leaves the momentum unchanged.

    Returns:
        The schedule.

    Raises:
        UsageError: If no schedule has this name.
    """
    match name:
        case "cyclic":
            return CyclicLR(lr, peak, momentum)
        case "multistep":
            default_milestones = (max(1, epochs // 2), max(1, epochs * 4 // 5))
            return MultiStepLR(lr, default_milestones if milestones is None else milestones, epochs)
        case "cosine":
            return CosineLR(lr)
        case "flat":
            return ConstantLR(lr)
    raise unknown_name_error("learning-rate schedule", name, LR_SCHEDULES)
