"""What options of training change of a task's losses: label smoothing, class weights and mixed labels.

They are the learner's alone. Attacks, in training and in evaluation, maximise the task's own loss.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from deat.errors import UsageError
from deat.tasks.per_example_losses import cross_entropy
from deat.tasks.task import ClassWeights, Task


@dataclass(frozen=True)
class LearnerOptions(Task):
    """A task whose cross-entropy is smoothed and weighted. MART's boosted term has the same weights.

    Args:
        label_smoothing: The share of the label that is spread over all classes.
        class_weights: The weight of each class; None for equal ones.
    """

    label_smoothing: float = 0.0
    class_weights: ClassWeights | None = None

    def _cross_entropy(self, logits: Tensor, y: Tensor) -> Tensor:
        extra = logits.shape[1] - y.shape[1] if y.is_floating_point() else 0  # outputs beyond the data's classes
        return F.cross_entropy(
            logits if logits.dtype == torch.float64 else logits.float(),
            F.pad(y, (0, extra)) if extra else y,
            weight=self._weights_like(logits),
            reduction="none",
            label_smoothing=self.label_smoothing,
        )

    def _boosted_cross_entropy(self, logits: Tensor, y: Tensor) -> Tensor:
        classes, weights = self._class_of(y), self._weights_like(logits)
        boost = super()._boosted_cross_entropy(logits, classes) - cross_entropy(logits, classes)
        return self._cross_entropy(logits, y) + (boost if weights is None else weights[classes] * boost)

    def _weights_like(self, logits: Tensor) -> Tensor | None:
        if self.class_weights is None:
            return None
        dtype = torch.promote_types(logits.dtype, torch.float32)
        weights = self.class_weights + (1.0,) * (logits.shape[1] - len(self.class_weights))
        if torch.compiler.is_compiling():
            return torch.tensor(weights, device=logits.device, dtype=dtype)
        return _weights_on(weights, logits.device, dtype)

    def _class_of(self, y: Tensor) -> Tensor:
        return y


def check_loss_is(task: Task, kind: type[Task]) -> None:
    """Check that a task has the loss of one of ours, so that options of training can change it.

    Args:
        task: The task.
        kind: The class whose loss it must have.

    Raises:
        UsageError: The task is a user's own with a loss of its own.
    """
    if type(task).loss is not kind.loss:
        raise UsageError(
            f"label smoothing, class weights and mixed labels change the loss of {kind.name}, and {type(task).__name__} "
            "has a loss of its own. Leave them out, or write them into that loss."
        )


@lru_cache(maxsize=8)
def _weights_on(weights: ClassWeights, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The weights on a device; kept, since a recorded move cannot copy them from the host."""
    return torch.tensor(weights, device=device, dtype=dtype)
