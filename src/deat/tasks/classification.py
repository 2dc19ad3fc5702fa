"""Classification: one class for each example, by a logit for each class or by a single logit for two."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deat.tasks.class_labels import check_class_numbers, check_label_format
from deat.tasks.loss_options import LearnerOptions, check_loss_is
from deat.tasks.per_example_losses import kl_divergence, margin_loss, mart_regulariser
from deat.tasks.probability_output_check import are_sigmoid
from deat.tasks.task import ClassWeights, Task


@dataclass(frozen=True)
class Classification(Task):
    """One class for each example. This is the default task, and that of the paper.

    Outputs are logits (B, classes). With two classes the network may return a single logit instead, (B, 1) or (B,): it
    is that of class 1, and class 0 has the logit 0. Labels are class numbers from 0, (B,).

    Example:
        >>> deat.fit(model, (images, labels), task="classification")
    """

    name: ClassVar[str] = "classification"
    reads_logits: ClassVar[bool] = True
    outputs_noun: ClassVar[str] = "classes"

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Compute the cross-entropy; see `Task.loss`."""
        return self._cross_entropy(as_class_logits(outputs), y)

    def is_right(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return whether the largest logit is that of the label; see `Task.is_right`."""
        logits = as_class_logits(outputs)
        return (logits.argmax(1) == y) & ~logits.isnan().any(1)

    def divergence(self, clean_outputs: Tensor, outputs: Tensor) -> Tensor:
        """Compute KL(p(clean) || p(perturbed)); see `Task.divergence`."""
        return kl_divergence(as_class_logits(clean_outputs), as_class_logits(outputs))

    def margin(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Compute the largest wrong logit minus that of the label; see `Task.margin`."""
        return margin_loss(as_class_logits(outputs), y)

    def boosted_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Compute MART's boosted cross-entropy; see `Task.boosted_loss`."""
        return self._boosted_cross_entropy(as_class_logits(outputs), y)

    def weighted_divergence(self, clean_outputs: Tensor, outputs: Tensor, y: Tensor) -> Tensor:
        """Compute KL times (1 - p_y(clean)); see `Task.weighted_divergence`."""
        return mart_regulariser(as_class_logits(clean_outputs), as_class_logits(outputs), y)

    def are_probabilities(self, outputs: Tensor) -> bool:
        """Return whether a softmax was applied, or to a single logit a sigmoid: its answer would always be class 1."""
        return super().are_probabilities(outputs) or (outputs.numel() == len(outputs) and are_sigmoid(outputs))

    def for_learner(self, label_smoothing: float, class_weights: ClassWeights | None) -> Task:
        """Return the task with smoothed and weighted losses; see `Task.for_learner`."""
        check_loss_is(self, Classification)
        return LearnerClassification(label_smoothing, class_weights)

    def with_mixed_labels(self) -> Task:
        """Return the task for labels that are shares of each class; see `Task.with_mixed_labels`."""
        check_loss_is(self, Classification)
        return LearnerClassification()

    def chance(self, labels: Tensor) -> float | None:
        """Return the share of the most common class."""
        return int(labels.bincount().max()) / len(labels)

    def describe_answers(self, outputs: Tensor, y: Tensor, classes: Sequence[str]) -> list[str]:
        """Name the predicted classes; see `Task.describe_answers`."""
        return [str(classes[index]) for index in as_class_logits(outputs).argmax(1).tolist()]

    def describe_labels(self, y: Tensor, classes: Sequence[str]) -> list[str]:
        """Name the classes; see `Task.describe_labels`."""
        return [str(classes[index]) for index in y.tolist()]

    def prepare_labels(self, labels: Tensor) -> Tensor:
        """Return class numbers as int64; see `Task.prepare_labels`."""
        labels = labels.long() if labels.dtype == torch.bool else labels
        check_label_format(labels)
        return labels.to(torch.int64)

    def check_labels(self, labels: Tensor, num_outputs: int, dataset_index: Callable[[int], int] = int) -> None:
        """Check that labels are class numbers below `num_outputs`; see `Task.check_labels`."""
        check_label_format(labels)
        check_class_numbers(labels, num_outputs, dataset_index)

    def class_labels(self, labels: Tensor) -> list[int]:
        """Return the class numbers."""
        numbers: list[int] = labels.tolist()
        return numbers

    def count_outputs(self, labels: Tensor) -> int:
        """Return one more than the largest class number."""
        return max(int(labels.max()), 0) + 1 if labels.numel() else 1

    def describe_expected_outputs(self, num_examples: int, num_outputs: int, label_shape: Sequence[int]) -> str:
        """Describe logits, one for each class."""
        single = ", or a single logit for the two classes" if num_outputs == 2 else ""
        return f"logits of shape ({num_examples}, {num_outputs}), one for each class{single}"

    def accepts_outputs(self, outputs: Tensor, num_examples: int, num_outputs: int, label_shape: Sequence[int]) -> bool:
        """Return whether there is a logit for each class, or a single one for two classes."""
        if num_outputs == 2 and outputs.shape in ((num_examples, 1), (num_examples,)):
            return True
        return outputs.dim() == 2 and len(outputs) == num_examples and outputs.shape[1] >= max(num_outputs, 1)


@dataclass(frozen=True)
class LearnerClassification(LearnerOptions, Classification):
    """Classification with options of training. Labels may also be shares of each class, (B, classes), as mixing makes.

    An answer to mixed labels is right if it is the class with the largest share; margins are about that class, too.
    """

    def is_right(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return whether the largest logit is that of the label; see `Task.is_right`."""
        return super().is_right(outputs, self._class_of(y))

    def margin(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Compute the largest wrong logit minus that of the label; see `Task.margin`."""
        return super().margin(outputs, self._class_of(y))

    def weighted_divergence(self, clean_outputs: Tensor, outputs: Tensor, y: Tensor) -> Tensor:
        """Compute KL times (1 - p_y(clean)); see `Task.weighted_divergence`."""
        return super().weighted_divergence(clean_outputs, outputs, self._class_of(y))

    def _class_of(self, y: Tensor) -> Tensor:
        return y.argmax(1) if y.is_floating_point() else y


def as_class_logits(outputs: Tensor) -> Tensor:
    """Return logits (B, classes); a single logit z becomes the two logits (0, z), whose softmax is its sigmoid."""
    if outputs.dim() > 1 and outputs.shape[1] > 1:
        return outputs
    single = outputs.reshape(-1, 1)
    return torch.cat((torch.zeros_like(single), single), 1)
