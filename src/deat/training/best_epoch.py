"""The best epoch by its scores on held-out images, and its weights."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from torch import Tensor, nn

from deat.evaluation.intervals import mcnemar_p_value
from deat.evaluation.results import pack_bits
from deat.models.weights import unwrap_model
from deat.tasks import CLASSIFICATION, Task
from deat.training.epoch_records import EpochStats

SIGNIFICANCE_LEVEL = 0.05
"""Two epochs are statistically indistinguishable on held-out images from this p-value on."""

CHOICE_KEY = "best_epoch"
"""Where run.json has the choice."""

ChoiceRule = Literal["paired", "accuracy", "natural", "last"]


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The weights of one epoch, with its validation scores.

    Attributes:
        epoch: The epoch, from 0.
        natural: Accuracy on held-out images; None without validation.
        robust: Accuracy on held-out images under attack; None without validation.
        weights: The state dict, on the CPU.
        averaged: Whether these are the averaged weights of the epoch.
    """

    epoch: int
    natural: float | None
    robust: float | None
    weights: dict[str, Tensor] = field(repr=False)
    averaged: bool = False


@dataclass(frozen=True)
class ScoredEpoch:
    """The scores of one epoch on held-out images.

    Attributes:
        epoch: The epoch, from 0.
        natural: Natural accuracy.
        robust: Accuracy under attack.
        above_chance: Whether natural accuracy is above that of a constant answer.
        correct: For each image, whether it is right under attack, packed by `pack_bits`; None in older checkpoints.
        averaged: Whether the scores are those of the averaged weights.
    """

    epoch: int
    natural: float | None
    robust: float | None
    above_chance: bool
    correct: str | None = None
    averaged: bool = False

    @classmethod
    def from_scores(
        cls,
        epoch: int,
        natural: float | None,
        robust: float | None,
        chance_upper_bound: float | None,
        correct: Sequence[bool] | None = None,
        *,
        averaged: bool = False,
    ) -> "ScoredEpoch":
        """Make it from an epoch's scores and the highest natural accuracy that may be chance, if known."""
        is_scored = _nan_as_lowest(robust) > -math.inf
        above_chance = chance_upper_bound is not None and _nan_as_lowest(natural) > chance_upper_bound and is_scored
        return cls(epoch, natural, robust, above_chance, pack_bits(list(correct)) if correct else None, averaged)

    def is_of(self, snapshot: Snapshot) -> bool:
        """Whether these are the scores of a snapshot's weights."""
        return self.epoch == snapshot.epoch and self.averaged == snapshot.averaged

    @property
    def images(self) -> int | None:
        """The number of held-out images; None without verdicts."""
        return None if self.correct is None else int(self.correct.partition(":")[0])

    @property
    def robust_key(self) -> tuple[bool, float, float]:
        """A sort key: epochs at chance first, then by robust accuracy, then by natural accuracy; the best is last."""
        return self.above_chance, _nan_as_lowest(self.robust), _nan_as_lowest(self.natural)

    @property
    def natural_key(self) -> tuple[bool, float, int, bool]:
        """A sort key: epochs at chance first, then by natural accuracy, then by age; the best is last."""
        return self.above_chance, _nan_as_lowest(self.natural), self.epoch, self.averaged

    def p_value(self, other: "ScoredEpoch") -> float | None:
        """Return the p-value of the paired comparison under attack; None without the verdicts of both."""
        if self.correct is None or other.correct is None or self.images != other.images:
            return None
        one, two = (int(epoch.correct.partition(":")[2] or "0", 16) for epoch in (self, other))  # type: ignore[union-attr]
        return mcnemar_p_value((one & ~two).bit_count(), (two & ~one).bit_count())

    def is_distinguishable_from(self, best: "ScoredEpoch") -> bool:
        """Whether the held-out images show a difference from the most robust epoch; True without verdicts to compare."""
        if self is best:
            return False
        p = self.p_value(best)
        return self.above_chance != best.above_chance or p is None or p < SIGNIFICANCE_LEVEL


@dataclass(frozen=True)
class BestChoice:
    """Which epoch is the best, and why.

    Attributes:
        epoch: The chosen epoch, from 0.
        natural: Its natural accuracy on held-out images; None without validation.
        robust: Its accuracy under attack; None without validation.
        rule: "paired": of the epochs that are statistically indistinguishable from the most robust one, the best natural
            accuracy decides, then the later epoch. "accuracy": the chosen epoch has no verdicts to compare, as in
            checkpoints of older versions, or the task's metric belongs to a whole set; the highest accuracy under attack
            decides. "natural": training without an adversary; natural accuracy decides. "last": without validation, the
            last epoch.
        images: The number of held-out images; None if it is not known.
        most_robust: The epoch with the highest accuracy under attack; None for the rules "natural" and "last".
        most_robust_accuracy: Its accuracy under attack.
        most_robust_natural: Its natural accuracy.
        p_value: Of the paired comparison of the two epochs (exact McNemar test, two-sided); None if they are the same.
        indistinguishable: The epochs that are statistically indistinguishable from the most robust one, itself included.
        averaged: Whether the chosen weights are the averaged ones of the epoch.
        most_robust_averaged: Whether those of the most robust epoch are.
        metric: The metric in the place of accuracy, such as mIoU; None for accuracy.
        noun: What texts call the held-out examples.
        task: What the scores are of.
    """

    epoch: int
    natural: float | None
    robust: float | None
    rule: ChoiceRule
    images: int | None = None
    most_robust: int | None = None
    most_robust_accuracy: float | None = None
    most_robust_natural: float | None = None
    p_value: float | None = None
    indistinguishable: tuple[int, ...] = ()
    averaged: bool = False
    most_robust_averaged: bool = False
    metric: str | None = None
    noun: str = "images"
    task: Task = CLASSIFICATION

    def as_json(self) -> dict[str, Any]:
        """Return the choice as run.json has it: epochs from 0, and the reason as text."""
        choice = {**asdict(self), "indistinguishable": list(self.indistinguishable), "reason": self.reason}
        del choice["noun"], choice["task"]  # they are in the reason, and the task in the record
        return {name: v for name, v in choice.items() if v or not name.endswith(("averaged", "metric"))}

    @property
    def reason(self) -> str:
        """The choice and its reason in a sentence or two; epochs count from 1."""
        held_out = f"{f'{self.images:,} ' if self.images else ''}held-out {self.noun}"
        best = f"best epoch: {self.epoch + 1}{', averaged weights' if self.averaged else ''}"
        if self.rule == "last":
            return f"{best}, the last one, since no held-out {self.noun} are scored"
        if self.rule == "natural":
            return f"{best}, with the highest natural {self.metric or 'accuracy'} on {held_out}, {self._format(self.natural)}"
        if self.metric:
            scores = f"{self._format(self.natural)} natural, {self._format(self.robust)} under attack on {held_out}"
            return f"{best}, the highest {self.metric} under attack ({scores})"
        best += f" ({self._format(self.natural)} natural, {self._format(self.robust)} under attack on {held_out})"
        if self.rule == "accuracy":
            return f"{best}, by accuracy alone, since there are no verdicts to compare one by one"
        if (self.epoch, self.averaged) == (self.most_robust, self.most_robust_averaged):
            others = len(self.indistinguishable) - 1
            are = "another epoch is" if others == 1 else f"{others} other epochs are"
            also = f"; {are} statistically indistinguishable from it (paired, 95 %)" if others else ""
            return f"{best}, the highest accuracy under attack{also}"
        assert self.most_robust is not None
        is_tie = self.natural == self.most_robust_natural
        decides = (
            "its natural accuracy is the same, so the later one is taken" if is_tie else "natural accuracy decides"
        )
        weights = " (averaged weights)" if self.most_robust_averaged else ""
        return (
            f"{best}. Epoch {self.most_robust + 1}{weights} has {self._format(self.most_robust_accuracy)} under attack, but "
            f"the two are statistically indistinguishable (paired, p = {self.p_value or 0:.2g}); {decides}"
        )

    def _format(self, score: float | None) -> str:
        return "?" if score is None else self.task.format_metric(score)


class BestEpoch:
    """The best epoch of those that are statistically indistinguishable from the most robust one.

    Robust accuracies on a few hundred images differ by chance. So the verdicts of two epochs are compared image by
    image (exact McNemar test, 95 %). The epochs that are statistically indistinguishable from the one with the highest
    robust accuracy count as equal; the best natural accuracy decides between them, then the later epoch.

    Only the weights of one epoch are stored, since the choice is made while training proceeds. Every new epoch competes
    with that one alone: both are compared with the most robust epoch so far, and of those that are indistinguishable
    from it the one with the better natural accuracy is chosen. So the choice is always indistinguishable from the most
    robust epoch of all, and cannot drift away from it by small steps. It need not have the best natural accuracy of these
    epochs. Suppose that a later epoch is significantly more robust than the present choice. Then the later epoch is
    chosen, even if an epoch between the two has a better natural accuracy, because its weights were not stored.

    An epoch whose natural accuracy is not above chance never beats one that is: a constant answer looks robust on few
    images. NaN counts as the lowest score. Without verdicts, the highest robust accuracy wins, then the natural one,
    then the earlier epoch. Without validation the last epoch is the best.

    Averaged weights compete as if they were an epoch of their own: after each epoch both are added, the average last.

    Args:
        snapshot: The best epoch of a training that is resumed.
        scored: The scores of its epochs; empty if its checkpoint is of an older version.
        robust: False for training without an adversary: compares natural accuracy, and ties go to the later epoch.
        task: What the scores are of.
        noun: What texts call the held-out examples.
    """

    def __init__(
        self,
        snapshot: Snapshot | None = None,
        scored: Iterable[ScoredEpoch] = (),
        *,
        robust: bool = True,
        task: Task = CLASSIFICATION,
        noun: str = "images",
    ) -> None:
        self.snapshot_or_none, self.scored, self.robust = snapshot, list(scored), robust
        self.task, self.noun = task, noun

    @property
    def snapshot(self) -> Snapshot:
        """The best epoch so far; there must be one."""
        assert self.snapshot_or_none is not None, "no epoch is finished"
        return self.snapshot_or_none

    @property
    def choice(self) -> BestChoice:
        """Which epoch is the best so far, and why."""
        metric = self.task.metric_names[0] if self.task.is_graded else None
        return replace(self._choice(), metric=metric, noun=self.noun, task=self.task)

    def _choice(self) -> BestChoice:
        best = self.snapshot
        scores = best.epoch, best.natural, best.robust
        chosen = next((scored for scored in self.scored if scored.is_of(best)), None)
        images = chosen.images if chosen else None
        if best.robust is None:
            return BestChoice(*scores, rule="last", averaged=best.averaged)
        if not self.robust:
            return BestChoice(*scores, rule="natural", images=images, averaged=best.averaged)
        top = max(self.scored, key=lambda scored: scored.robust_key, default=None)
        p_value = None if chosen is None or top is None or chosen is top else chosen.p_value(top)
        if chosen is None or chosen.correct is None or top is None or (chosen is not top and p_value is None):
            return BestChoice(
                *scores,
                rule="accuracy",
                most_robust=best.epoch,
                most_robust_accuracy=best.robust,
                most_robust_natural=best.natural,
                averaged=best.averaged,
                most_robust_averaged=best.averaged,
            )
        return BestChoice(
            *scores,
            rule="paired",
            images=images,
            most_robust=top.epoch,
            most_robust_accuracy=top.robust,
            most_robust_natural=top.natural,
            p_value=p_value,
            indistinguishable=tuple(dict.fromkeys(s.epoch for s in self.scored if not s.is_distinguishable_from(top))),
            averaged=best.averaged,
            most_robust_averaged=top.averaged,
        )

    def update_if_better(
        self,
        stats: EpochStats,
        model: nn.Module,
        chance_upper_bound: float | None = None,
        correct: Sequence[bool] | None = None,
        *,
        averaged: bool = False,
    ) -> float | None:
        """Copy this epoch's weights if it is the best so far.

        Args:
            stats: The epoch's statistics.
            model: The model at the end of the epoch.
            chance_upper_bound: The highest natural accuracy that may be chance, if known.
            correct: For each held-out image, whether it is right under attack.
            averaged: Whether the model has the averaged weights.

        Returns:
            The p-value of the paired comparison with the most robust epoch before this one; None without one.
        """
        new = ScoredEpoch.from_scores(
            stats.epoch, stats.val_natural, stats.val_robust, chance_upper_bound, correct, averaged=averaged
        )
        chosen = self._find_chosen(chance_upper_bound)
        top_before = max(self.scored, key=lambda scored: scored.robust_key, default=None)
        if new.robust is not None:
            self.scored.append(new)
        if chosen is None or new.robust is None or self._is_better(new, chosen):
            weights = {name: value.detach().cpu().clone() for name, value in unwrap_model(model).state_dict().items()}
            self.snapshot_or_none = Snapshot(new.epoch, new.natural, new.robust, weights, averaged)
        return new.p_value(top_before) if top_before else None

    def _find_chosen(self, chance_upper_bound: float | None) -> ScoredEpoch | None:
        """The scores of the best epoch so far; those in a checkpoint of an older version are added without verdicts."""
        best = self.snapshot_or_none
        if best is None:
            return None
        chosen = next((scored for scored in self.scored if scored.is_of(best)), None)
        if chosen is None:
            chosen = ScoredEpoch.from_scores(
                best.epoch, best.natural, best.robust, chance_upper_bound, averaged=best.averaged
            )
            self.scored += [chosen] if best.robust is not None else []
        return chosen

    def _is_better(self, new: ScoredEpoch, chosen: ScoredEpoch) -> bool:
        if self.robust:
            top = max(self.scored, key=lambda scored: scored.robust_key)
            if new.is_distinguishable_from(top):
                return False
            if chosen.is_distinguishable_from(top):
                return True
        return new.natural_key > chosen.natural_key


def _nan_as_lowest(value: float | None) -> float:
    return -math.inf if value is None or math.isnan(value) else value
