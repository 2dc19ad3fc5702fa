"""The best epoch by its scores on held-out images, and its weights."""

import math
from dataclasses import dataclass, field

from torch import Tensor, nn

from deat.models.weights import unwrap_model
from deat.training.epoch_records import EpochStats


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The weights of one epoch, with its validation scores.

    Attributes:
        epoch: The epoch, from 0.
        natural: Accuracy on held-out images; None without validation.
        robust: Accuracy on held-out images under attack; None without validation.
        weights: The state dict, on the CPU.
    """

    epoch: int
    natural: float | None
    robust: float | None
    weights: dict[str, Tensor] = field(repr=False)


class BestEpoch:
    """The epoch with the highest robust accuracy on held-out images.

    Ties are broken by natural accuracy, then by the earlier epoch. NaN counts as the lowest score. An epoch whose
    natural accuracy is not above chance never beats one that is: a constant answer looks robust on few images.
    Without validation the last epoch is the best.

    Args:
        snapshot: The best epoch of a training that is resumed.
        robust: False for training without an adversary: compares natural accuracy, and ties go to the later epoch.
    """

    def __init__(self, snapshot: Snapshot | None = None, *, robust: bool = True) -> None:
        self.snapshot_or_none, self.robust = snapshot, robust

    @property
    def snapshot(self) -> Snapshot:
        """The best epoch so far; there must be one."""
        assert self.snapshot_or_none is not None, "no epoch is finished"
        return self.snapshot_or_none

    def update_if_better(self, stats: EpochStats, model: nn.Module, chance_upper_bound: float | None = None) -> None:
        """Copy this epoch's weights if it is the best so far.

        Args:
            stats: The epoch's statistics.
            model: The model at the end of the epoch.
            chance_upper_bound: The highest natural accuracy that may be chance, if known.
        """
        best = self.snapshot_or_none
        if (
            best is None
            or stats.val_robust is None
            or self._sort_key(stats.epoch, stats.val_robust, stats.val_natural, chance_upper_bound)
            > self._sort_key(best.epoch, best.robust, best.natural, chance_upper_bound)
        ):
            weights = {name: value.detach().cpu().clone() for name, value in unwrap_model(model).state_dict().items()}
            self.snapshot_or_none = Snapshot(stats.epoch, stats.val_natural, stats.val_robust, weights)

    def _sort_key(
        self, epoch: int, robust: float | None, natural: float | None, chance_upper_bound: float | None
    ) -> tuple[bool, float, float]:
        robust, natural = _nan_as_lowest(robust), _nan_as_lowest(natural)
        above_chance = chance_upper_bound is not None and natural > chance_upper_bound and robust > -math.inf
        return (above_chance, robust, natural) if self.robust else (above_chance, natural, epoch)


def _nan_as_lowest(value: float | None) -> float:
    return -math.inf if value is None or math.isnan(value) else value
