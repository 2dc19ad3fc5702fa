"""Multi-label classification: any number of labels for each example, each with a logit of its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deat.errors import DataError, UsageError
from deat.tasks.loss_options import LearnerOptions, check_loss_is
from deat.tasks.per_example_losses import kl_divergence, margin_loss, mart_regulariser
from deat.tasks.probability_output_check import are_sigmoid, are_softmax
from deat.tasks.task import ClassWeights, Task, rows_of


@dataclass(frozen=True)
class MultiLabel(Task):
    """Several labels for each example, each present (1) or not (0).

    Outputs are logits (B, labels), and labels are 0 or 1, (B, labels). Each label is a classification of two classes,
    and losses are means over labels. An example's score is the share of its labels that are right, so that an attack
    turns as many labels as it can, and their probability decides ties; the answer is right if all are. Metrics are the
    exact match and the mean average precision (mAP) over the labels that occur.

    Example:
        >>> deat.fit(model, (images, present), task="multilabel")
    """

    name: ClassVar[str] = "multilabel"
    outputs_noun: ClassVar[str] = "labels"
    metric_names: ClassVar[tuple[str, ...]] = ("exact match", "mAP")
    is_graded: ClassVar[bool] = True

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Compute the mean binary cross-entropy; see `Task.loss`."""
        return self._cross_entropy(_pairs(outputs), y).mean(1)

    def is_right(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return whether every label is right; see `Task.is_right`."""
        return self._is_label_right(outputs, y).all(1)

    def accuracy(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return 1 where every label is right."""
        return self.is_right(outputs, y)

    def score(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the share of labels that are right, a little less where they are less likely; see `Task.score`.

        The mAP falls with every logit that moves, also where none changes its sign. So of two answers with as many right
        labels, the one that gives the labels a lower mean probability is worse: less than a label makes up for.
        """
        right = self._is_label_right(outputs, y).float()
        probability = torch.sigmoid(outputs.float() * (2 * y - 1))
        return right.mean(1) + (probability.mean(1) - 1) / outputs.shape[1]

    def divergence(self, clean_outputs: Tensor, outputs: Tensor) -> Tensor:
        """Compute the mean KL of the labels' probabilities; see `Task.divergence`."""
        return kl_divergence(_pairs(clean_outputs), _pairs(outputs)).mean(1)

    def margin(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Compute the mean margin of the labels that are still right; see `Task.margin`."""
        return margin_loss(_pairs(outputs), y).clamp(max=0).mean(1)

    def boosted_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Compute the mean of MART's boosted cross-entropy; see `Task.boosted_loss`."""
        return self._boosted_cross_entropy(_pairs(outputs), y).mean(1)

    def weighted_divergence(self, clean_outputs: Tensor, outputs: Tensor, y: Tensor) -> Tensor:
        """Compute the mean of KL times (1 - p_y(clean)); see `Task.weighted_divergence`."""
        return mart_regulariser(_pairs(clean_outputs), _pairs(outputs), y).mean(1)

    def for_learner(self, label_smoothing: float, class_weights: ClassWeights | None) -> Task:
        """Return the task with smoothed losses; see `Task.for_learner`. Labels have no classes to weigh."""
        check_loss_is(self, MultiLabel)
        if class_weights is not None:
            raise UsageError("class_weights are for tasks with one class an example or pixel, not for multilabel.")
        return LearnerMultiLabel(label_smoothing)

    def statistics(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the logits and the labels."""
        return torch.cat((rows_of(outputs), rows_of(y)), 1).double()

    def summarize(self, statistics: Tensor) -> dict[str, float]:
        """Compute the exact match and the mAP."""
        logits, present = statistics.chunk(2, 1)
        exact = ((logits > 0) == (present > 0.5)).all(1) & ~logits.isnan().any(1)
        precisions = [average_precision(*column) for column in zip(logits.T, present.T > 0.5, strict=True)]
        known = [value for value in precisions if value is not None]
        return {"exact match": float(exact.double().mean()), "mAP": sum(known) / len(known) if known else 0.0}

    def chance(self, labels: Tensor) -> float | None:
        """Return the share of the most common combination of labels."""
        counts: Tensor = labels.unique(dim=0, return_counts=True)[1]  # type: ignore[no-untyped-call]
        return int(counts.max()) / len(labels)

    def prepare_labels(self, labels: Tensor) -> Tensor:
        """Return 0 and 1 as int64; see `Task.prepare_labels`."""
        if labels.dim() != 2:
            raise DataError(
                f"multi-labels have shape {tuple(labels.shape)}; expected (N, labels) of 0 and 1. For class numbers use "
                "task='classification', or pass torch.nn.functional.one_hot(labels)."
            )
        if labels.is_floating_point() and not bool((labels == labels.round()).all()):
            row = int((labels != labels.round()).any(1).to(torch.uint8).argmax())
            raise DataError(f"the labels of example {row} are {labels[row].tolist()}; expected 0 or 1 for each label.")
        return labels.to(torch.int64)

    def check_labels(self, labels: Tensor, num_outputs: int, dataset_index: Callable[[int], int] = int) -> None:
        """Check that there are `num_outputs` labels of 0 or 1 each; see `Task.check_labels`."""
        self.prepare_labels(labels)
        is_bad = ((labels != 0) & (labels != 1)).any(1)
        if bool(is_bad.any()):
            row = int(is_bad.to(torch.uint8).argmax())
            raise DataError(
                f"the labels of example {dataset_index(row)} are {labels[row].tolist()}; expected 0 or 1 for each label."
            )
        if labels.shape[1] != num_outputs:
            raise DataError(
                f"example {dataset_index(0)} has {labels.shape[1]} labels, and the data {num_outputs}. Give every example the "
                "same number of labels."
            )

    def describe_answers(self, outputs: Tensor, y: Tensor, classes: Sequence[str]) -> list[str]:
        """Name the labels that are predicted; see `Task.describe_answers`."""
        return self.describe_labels(outputs > 0, classes)

    def describe_labels(self, y: Tensor, classes: Sequence[str]) -> list[str]:
        """Name the labels that are present; see `Task.describe_labels`."""
        names = [[str(name) for name, hit in zip(classes, row, strict=False) if hit] for row in (y > 0).tolist()]
        return [", ".join(row) or "none" for row in names]

    def are_probabilities(self, outputs: Tensor) -> bool:
        """Return whether a sigmoid or a softmax was applied: every label would be answered as present."""
        return are_sigmoid(outputs) or are_softmax(outputs)

    def count_outputs(self, labels: Tensor) -> int:
        """Return the number of labels."""
        return int(labels.shape[1])

    def describe_expected_outputs(self, num_examples: int, num_outputs: int, label_shape: Sequence[int]) -> str:
        """Describe logits, one for each label."""
        return f"logits of shape ({num_examples}, {num_outputs}), one for each label"

    def accepts_outputs(self, outputs: Tensor, num_examples: int, num_outputs: int, label_shape: Sequence[int]) -> bool:
        """Return whether there is a logit for each label."""
        return tuple(outputs.shape) == (num_examples, num_outputs)

    def _is_label_right(self, outputs: Tensor, y: Tensor) -> Tensor:
        return ((outputs > 0) == (y > 0)) & ~outputs.isnan()


@dataclass(frozen=True)
class LearnerMultiLabel(LearnerOptions, MultiLabel):
    """Multi-label classification with options of training."""


def _pairs(outputs: Tensor) -> Tensor:
    """Return two logits for each label, (B, 2, labels): 0 for absent, the output for present."""
    return torch.stack((torch.zeros_like(outputs), outputs), 1)


def average_precision(scores: Tensor, is_present: Tensor) -> float | None:
    """Compute the average precision of one label: the mean, over its examples, of the precision at their rank.

    Args:
        scores: A number for each example, higher where the label is more likely. Ties share the precision of the last.
        is_present: Whether each example has the label.

    Returns:
        The average precision, or None if no example has the label.
    """
    positives = int(is_present.sum())
    if not positives:
        return None
    order = scores.nan_to_num(-torch.inf).argsort(descending=True, stable=True)
    ranked, hits = scores[order], is_present[order].double().cumsum(0)
    precision = hits / torch.arange(1, len(scores) + 1, dtype=torch.float64)
    is_last_of_tie = torch.ones_like(ranked, dtype=torch.bool)
    is_last_of_tie[:-1] = ranked[:-1] != ranked[1:]
    gained = torch.diff(hits[is_last_of_tie], prepend=hits.new_zeros(1))
    return float((gained * precision[is_last_of_tie]).sum() / positives)
