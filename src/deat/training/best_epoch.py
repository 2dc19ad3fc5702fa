"""What training gives back, and how the best epoch is chosen."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from deat.models.weights import unwrap_model
from deat.training.records import EpochStats


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The weights of one epoch, which is counted from 0, on the CPU, with what validation said of them."""

    epoch: int
    natural: float | None
    robust: float | None
    weights: dict[str, Tensor] = field(repr=False)


@dataclass(frozen=True, eq=False)
class TrainResult:
    """The model at its last epoch, the history, the best epoch's weights, and what a person should know of them.

    history has an EpochStats for each epoch. best has the epoch, counted from 0, its natural and robust accuracy on
    held-out images, None where there were none, and its weights. seconds are those of training.
    """

    model: nn.Module
    history: list[EpochStats]
    best: Snapshot
    seconds: float
    notes: Sequence[str] = ()

    def __repr__(self) -> str:
        shares = {"natural": self.best.natural, "robust": self.best.robust}
        held_out = "".join(f", {name} {share:.1%}" for name, share in shares.items() if share is not None)
        return (
            f"Result({type(self.model).__name__}, {len(self.history)} epochs, {self.seconds:.1f} s of training, "
            f"best.epoch {self.best.epoch}{held_out})"
        )

    def load_best(self) -> nn.Module:
        """The model itself, which held the last epoch until then, with the best epoch's weights, in eval mode."""
        unwrap_model(self.model).load_state_dict(self.best.weights)
        return self.model.eval()


class BestEpoch:
    """Keeps the epoch with the highest validation robustness; ties go to natural accuracy, then to the earlier.

    An epoch at chance, whose natural accuracy cannot be told from what one answer for all gets, never beats one that is
    not: no attack changes such an answer, and on few images it can look robust. Training that never meets an adversary
    (robust=False) is after natural accuracy, and ties go to the later. Without validation the last epoch is the best. A
    NaN never wins.
    """

    def __init__(self, snapshot: Snapshot | None = None, *, robust: bool = True) -> None:
        self.snapshot_or_none, self.robust = snapshot, robust

    @property
    def snapshot(self) -> Snapshot:
        """The best epoch so far."""
        assert self.snapshot_or_none is not None, "no epoch was offered"
        return self.snapshot_or_none

    def update_if_better(self, stats: EpochStats, model: nn.Module, chance_upper_bound: float | None = None) -> None:
        """Keep this epoch's weights if it beats the best so far; luck is the most that may be chance, if known."""
        held = self.snapshot_or_none
        if (
            held is None
            or stats.val_robust is None
            or self._sort_key(stats.epoch, stats.val_robust, stats.val_natural, chance_upper_bound)
            > self._sort_key(held.epoch, held.robust, held.natural, chance_upper_bound)
        ):
            weights = {name: value.detach().cpu().clone() for name, value in unwrap_model(model).state_dict().items()}
            self.snapshot_or_none = Snapshot(stats.epoch, stats.val_natural, stats.val_robust, weights)

    def _sort_key(
        self, epoch: int, robust: float | None, natural: float | None, chance_upper_bound: float | None
    ) -> tuple[bool, float, float]:
        able = (
            chance_upper_bound is not None
            and _nan_as_lowest(natural) > chance_upper_bound
            and _nan_as_lowest(robust) > -math.inf
        )
        return (
            (able, _nan_as_lowest(robust), _nan_as_lowest(natural))
            if self.robust
            else (able, _nan_as_lowest(natural), epoch)
        )


def _nan_as_lowest(value: float | None) -> float:
    return -math.inf if value is None or math.isnan(value) else value
