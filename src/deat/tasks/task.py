"""What a network is trained to do: its loss, when an answer is right, its metrics and its labels.

Everything that depends on the meaning of outputs and labels is here. Training, attacks and evaluation call it, and know
nothing of classes. A function that one example's answer goes through is batched, never reads the device, and can be
compiled and recorded.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from deat.errors import DataError, UsageError
from deat.tasks.per_example_losses import boosted_cross_entropy, cross_entropy
from deat.tasks.probability_output_check import are_softmax

ClassWeights = tuple[float, ...]
AttackLoss = Callable[[Tensor, Tensor, float], Tensor]
"""A loss for each example, (B,), as a function of (outputs, labels, share of the attack's steps that are done)."""


@dataclass(frozen=True)
class Task(ABC):
    """A task. A class of your own needs a `name`, `loss` and `is_right`; the rest has defaults.

    Outputs are what the network returns for a batch, a tensor with the examples first. Labels are a tensor with the
    examples first, too.

    Attributes:
        name: The name in records and messages.
        metric_names: The metrics that `summarize` returns. The first one is shown and chooses the best epoch; higher is
            better for it.
        is_graded: Whether an answer can be more or less wrong. Then attacks look for the lowest `score` of each example,
            and evaluations keep it; otherwise they stop once the answer is wrong.
        worst_score: The lowest `score` there is, at which an attack stops.
        reads_logits: Whether outputs are logits, so that probabilities would be a mistake.
        has_places: Whether a label belongs to places of the example, such as pixels. Then `augment_labels` moves them.
        outputs_noun: What the outputs stand for, in listings: "classes", "labels" or "targets".
        undefined: Why a function of the task does not exist, by the function's name, for messages.

    Example:
        >>> @dataclass(frozen=True)
        ... class Angles(deat.tasks.Task):
        ...     name = "angles"
        ...
        ...     def loss(self, outputs, y):
        ...         return 1 - torch.cos(outputs.flatten() - y)
        ...
        ...     def is_right(self, outputs, y):
        ...         return self.loss(outputs, y) < 0.01
    """

    name: ClassVar[str]
    metric_names: ClassVar[tuple[str, ...]] = ("accuracy",)
    is_graded: ClassVar[bool] = False
    worst_score: ClassVar[float] = 0.0
    reads_logits: ClassVar[bool] = False
    has_places: ClassVar[bool] = False
    outputs_noun: ClassVar[str] = "outputs"
    undefined: ClassVar[Mapping[str, str]] = {}

    @abstractmethod
    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Compute the loss of each example, which training minimises and attacks maximise.

        Args:
            outputs: The network's outputs.
            y: The labels.

        Returns:
            The losses, (B,).
        """

    @abstractmethod
    def is_right(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return whether each answer is right: FAT stops attacking examples that are wrong.

        Args:
            outputs: The network's outputs.
            y: The labels.

        Returns:
            Booleans, (B,); False where an output is NaN.
        """

    def accuracy(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return how right each answer is, from 0 to 1: its mean is the training accuracy. Default: `is_right`.

        Args:
            outputs: The network's outputs, (B, ...).
            y: The labels, (B, ...).
        """
        return self.is_right(outputs, y)

    def score(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return what an attack lowers, (B,): the worst case of an example has the lowest score. Default: `accuracy`.

        Args:
            outputs: The network's outputs, (B, ...).
            y: The labels, (B, ...).
        """
        return self.accuracy(outputs, y)

    def is_beaten(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return whether an attack has nothing left to gain, (B,) bool: wrong, or for a graded task at the worst score.

        Args:
            outputs: The network's outputs, (B, ...).
            y: The labels, (B, ...).
        """
        if not self.is_graded:
            return ~self.is_right(outputs, y)
        score = self.score(outputs, y)
        return (score <= self.worst_score) | score.isnan()

    def for_learner(self, label_smoothing: float, class_weights: ClassWeights | None) -> "Task":
        """Return the task with the losses that the learner minimises. Default: there are no classes to weigh.

        Args:
            label_smoothing: The share of the label that is spread over all classes.
            class_weights: The weight of each class; None for equal ones.

        Raises:
            UsageError: The task has no classes.
        """
        raise UsageError(
            f"label_smoothing and class_weights need classes, which the task {self.name} does not have. Leave them out."
        )

    def with_mixed_labels(self) -> "Task":
        """Return the task for labels that are shares of each class, as mixup and CutMix make them.

        Raises:
            UsageError: An example of the task does not have one class.
        """
        raise UsageError(
            f"mixup and cutmix mix the classes of two examples, and an example of the task {self.name} does not have one "
            "class. Leave them out."
        )

    def _cross_entropy(self, logits: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(logits, y)

    def _boosted_cross_entropy(self, logits: Tensor, y: Tensor) -> Tensor:
        return boosted_cross_entropy(logits, y)

    def divergence(self, clean_outputs: Tensor, outputs: Tensor) -> Tensor:
        """Compute how far each answer is from the clean one, as TRADES needs it.

        Args:
            clean_outputs: The outputs for the clean examples.
            outputs: The outputs for the perturbed examples.

        Returns:
            The divergences, (B,), differentiable in both arguments.

        Raises:
            UsageError: The task does not define it.
        """
        raise self._not_defined("divergence")

    def margin(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Compute the loss of Carlini and Wagner: how far each answer is beyond what is still right, (B,).

        Args:
            outputs: The network's outputs, (B, ...).
            y: The labels, (B, ...).

        Returns:
            The losses, differentiable in the outputs.

        Raises:
            UsageError: The task does not define it.
        """
        raise self._not_defined("margin")

    def boosted_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Compute MART's loss at the perturbed examples, (B,).

        Args:
            outputs: The network's outputs for the perturbed examples, (B, ...).
            y: The labels, (B, ...).

        Returns:
            The losses, differentiable in the outputs.

        Raises:
            UsageError: The task does not define it.
        """
        raise self._not_defined("boosted_loss")

    def weighted_divergence(self, clean_outputs: Tensor, outputs: Tensor, y: Tensor) -> Tensor:
        """Compute MART's divergence, larger where the clean answer is doubtful, (B,).

        Args:
            clean_outputs: The outputs for the clean examples.
            outputs: The outputs for the perturbed examples.
            y: The labels, (B, ...).

        Returns:
            The divergences, differentiable in both outputs.

        Raises:
            UsageError: The task does not define it.
        """
        raise self._not_defined("weighted_divergence")

    @property
    def attack_losses(self) -> Mapping[str, AttackLoss]:
        """The losses that an attack of an evaluation can maximise, by name: "ce" is the task's own loss."""
        losses: dict[str, AttackLoss] = {"ce": lambda outputs, y, done: self.loss(outputs, y)}
        if self.defines("margin"):
            losses["margin"] = lambda outputs, y, done: self.margin(outputs, y)
        return losses

    def statistics(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the numbers of each example that `summarize` needs, (B, S) float64. Default: whether it is right.

        Args:
            outputs: The network's outputs, (B, ...).
            y: The labels, (B, ...).
        """
        return self.is_right(outputs, y).double().unsqueeze(1)

    def summarize(self, statistics: Tensor) -> dict[str, float]:
        """Compute the metrics of a set of examples.

        Args:
            statistics: One row for each example, (N, S) float64 on the CPU, as `statistics` returns them.

        Returns:
            The metrics by name, in the order of `metric_names`.
        """
        return {"accuracy": float(statistics[:, 0].mean())}

    def format_metric(self, value: float) -> str:
        """Format a value of the first metric for a line: a share in percent, unless a task says otherwise.

        Args:
            value: The value.

        Returns:
            The text.
        """
        return f"{value:.1%}"

    def chance(self, labels: Tensor) -> float | None:
        """Return the first metric of the best constant answer, or None if it is not known.

        Args:
            labels: All labels, on the CPU.
        """
        return None

    def prepare_labels(self, labels: Tensor) -> Tensor:
        """Convert labels to the type that the losses take.

        Args:
            labels: Labels as the user gives them, with the examples first.

        Returns:
            The labels.

        Raises:
            DataError: They have another type or shape; the message says how to convert them.
        """
        return labels

    def check_labels(self, labels: Tensor, num_outputs: int, dataset_index: Callable[[int], int] = int) -> None:
        """Check the values of labels.

        Args:
            labels: Labels, on any device.
            num_outputs: What `count_outputs` returned, or the number of classes that the data names.
            dataset_index: Converts an index in `labels` to the one that messages show.

        Raises:
            DataError: A label is not accepted; the message names the first such example.
        """
        if labels.is_floating_point():
            check_finite_labels(labels, dataset_index)

    def check_all_labels(self, labels: Tensor) -> None:
        """Check what only all labels of a set together can show, after `check_labels`.

        Args:
            labels: All labels of a set in memory.

        Raises:
            DataError: They are not accepted.
        """
        return

    def augment_labels(self, labels: Tensor, augment: Any, params: Any) -> Tensor:
        """Move labels as an augmentation has moved their examples; called only for a task that `has_places`.

        Args:
            labels: The labels.
            augment: The augmentation, such as a `deat.Augment`.
            params: What its `draw` has returned, for these examples.

        Returns:
            The moved labels.

        Raises:
            UsageError: The labels cannot follow.
        """
        raise self._not_defined("augment_labels")

    def describe_answers(self, outputs: Tensor, y: Tensor, classes: Sequence[str]) -> list[str]:
        """Describe each answer in a few words, for a gallery. Default: its score.

        Args:
            outputs: The network's outputs, (B, ...).
            y: The labels, (B, ...).
            classes: The names of the classes; empty if there are none.

        Returns:
            A text for each example.
        """
        return [f"score {score:.3g}" for score in self.score(outputs, y).tolist()]

    def describe_labels(self, y: Tensor, classes: Sequence[str]) -> list[str]:
        """Describe each label in a few words, for a gallery. Default: nothing.

        Args:
            y: The labels, (B, ...).
            classes: The names of the classes; empty if there are none.

        Returns:
            A text for each example.
        """
        return [""] * len(y)

    def masks(self, outputs: Tensor) -> Tensor | None:
        """Return the class number of each pixel, (B, H, W), for a gallery; None for a task without masks.

        Args:
            outputs: The network's outputs, (B, ...).
        """
        return None

    def class_labels(self, labels: Tensor) -> list[int]:
        """Return the class of each example, for tables by class; empty for a task without one class each.

        Args:
            labels: The labels, (N, ...).
        """
        return []

    def are_probabilities(self, outputs: Tensor) -> bool:
        """Return whether outputs are probabilities where the task reads logits. Default: whether a softmax was applied.

        Args:
            outputs: The network's outputs for a few examples, with their autograd graph.
        """
        return self.reads_logits and are_softmax(outputs)

    def count_outputs(self, labels: Tensor) -> int:
        """Return how many outputs (classes, labels or numbers) a network needs at least for these labels.

        Args:
            labels: All labels, on the CPU.
        """
        return 1

    def describe_expected_outputs(self, num_examples: int, num_outputs: int, label_shape: Sequence[int]) -> str:
        """Describe the outputs that the task needs, for messages.

        Args:
            num_examples: The number of examples of a batch.
            num_outputs: The number of outputs that the data needs.
            label_shape: The shape of one example's label.

        Returns:
            The text, such as "(64, 10)".
        """
        return f"one answer for each of {num_examples} examples, on axis 0"

    def explain_too_many_classes(self, num_outputs: int) -> str:
        """Return a sentence, beginning with a space, on labels that need more outputs than a network has, or nothing.

        Args:
            num_outputs: The number of outputs that the data needs.
        """
        return ""

    def accepts_outputs(self, outputs: Tensor, num_examples: int, num_outputs: int, label_shape: Sequence[int]) -> bool:
        """Return whether outputs have a shape that the task can read; the arguments are those of the description.

        Args:
            outputs: The network's outputs.
            num_examples: The number of examples of the batch.
            num_outputs: The number of outputs that the data needs.
            label_shape: The shape of one example's label.
        """
        return outputs.dim() >= 1 and len(outputs) == num_examples

    def defines(self, name: str) -> bool:
        """Return whether the task has a function, such as "divergence" or "margin".

        Args:
            name: The function's name.
        """
        return getattr(type(self), name) is not getattr(Task, name)

    def describe(self) -> dict[str, Any]:
        """Return the task as JSON values, for records."""
        settings = {f.name: getattr(self, f.name) for f in fields(self)}
        is_json = {name: isinstance(value, str | int | float | None) for name, value in settings.items()}
        return {
            "name": self.name,
            **{name: value if is_json[name] else repr(value) for name, value in settings.items()},
            "metrics": list(self.metric_names),
            "graded": self.is_graded,
        }

    def __str__(self) -> str:
        changed = [f"{f.name}={v}" for f in fields(self) if (v := getattr(self, f.name)) != f.default]
        return f"{self.name}({', '.join(changed)})" if changed else self.name

    def why_undefined(self, name: str) -> str:
        """Return why a function is not defined, as the end of a sentence.

        Args:
            name: The function's name.
        """
        reason = self.undefined.get(name)
        return f"the task {self.name} does not define {name}" + (f": {reason}" if reason else "")

    def _not_defined(self, name: str) -> UsageError:
        return UsageError(f"{self.why_undefined(name)}.")


def check_finite_labels(labels: Tensor, dataset_index: Callable[[int], int]) -> None:
    """Raise DataError if a number among the labels is NaN or infinite."""
    is_bad = ~labels.isfinite().reshape(len(labels), -1).all(1)
    if bool(is_bad.any()):
        index = int(is_bad.to(torch.uint8).argmax())
        raise DataError(f"the label of example {dataset_index(index)} is not finite. Remove or repair the example.")


def rows_of(values: Tensor) -> Tensor:
    """Return one row of numbers for each example, (B, n), at least in float32."""
    rows = values.reshape(len(values), -1)
    return rows if rows.dtype == torch.float64 else rows.float()
