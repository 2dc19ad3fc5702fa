"""Regression: one or more numbers for each example."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deat.errors import DataError, UsageError
from deat.tasks.task import Task, check_finite_labels, rows_of

_NO_CLASSES = "MART compares the probabilities of classes, and regression has none. Use trades, or pgd-7"


@dataclass(frozen=True)
class Regression(Task):
    """One or more numbers for each example, by the squared error.

    Outputs and labels are numbers, (B,) or (B, targets). An example's score is minus its mean absolute error, so that an
    attack pushes the answer as far away as it can. Metrics are R² (uniform average over targets), the mean absolute
    error (MAE) and the root of the mean squared error (RMSE). Scale targets to a deviation of about 1, so that learning
    rates and `tolerance` fit.

    Args:
        tolerance: The largest absolute error of an answer that counts as right, in units of the targets: what training
            accuracy counts, and what FAT and F+ ask for.

    Example:
        >>> deat.fit(model, (features, targets), task="regression", threat=deat.Linf(0.1, box=None))
    """

    tolerance: float = 0.5
    name: ClassVar[str] = "regression"
    outputs_noun: ClassVar[str] = "targets"
    metric_names: ClassVar[tuple[str, ...]] = ("R2", "MAE", "RMSE")
    is_graded: ClassVar[bool] = True
    worst_score: ClassVar[float] = -torch.inf
    undefined: ClassVar[Mapping[str, str]] = {"boosted_loss": _NO_CLASSES, "weighted_divergence": _NO_CLASSES}

    def __post_init__(self) -> None:
        if isinstance(self.tolerance, bool) or not isinstance(self.tolerance, int | float) or not self.tolerance > 0:
            raise UsageError(f"tolerance must be a number above 0, such as 0.5, not {self.tolerance!r}.")

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Compute the mean squared error; see `Task.loss`."""
        return (rows_of(outputs) - rows_of(y)).square().mean(1)

    def is_right(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return whether no target is further away than `tolerance`; see `Task.is_right`."""
        return self._largest_error(outputs, y) <= self.tolerance

    def score(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return minus the mean absolute error; see `Task.score`."""
        return -(rows_of(outputs) - rows_of(y)).abs().mean(1)

    def divergence(self, clean_outputs: Tensor, outputs: Tensor) -> Tensor:
        """Compute the mean squared difference; see `Task.divergence`."""
        return (rows_of(clean_outputs) - rows_of(outputs)).square().mean(1)

    def margin(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Compute the largest absolute error minus `tolerance`; see `Task.margin`."""
        return self._largest_error(outputs, y) - self.tolerance

    def statistics(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the answers and the targets."""
        return torch.cat((rows_of(outputs), rows_of(y)), 1).double()

    def summarize(self, statistics: Tensor) -> dict[str, float]:
        """Compute R², the mean absolute error and the root of the mean squared error."""
        answers, targets = statistics.chunk(2, 1)
        squared = (answers - targets).square()
        spread = (targets - targets.mean(0)).square().sum(0)
        unexplained = squared.sum(0) / spread.clamp(min=torch.finfo(torch.float64).tiny)
        # As scikit-learn does: a constant target is explained by an exact answer only.
        r2 = torch.where(spread > 0, 1 - unexplained, (squared.sum(0) == 0).double())
        return {
            "R2": float(r2.mean()),
            "MAE": float((answers - targets).abs().mean()),
            "RMSE": float(squared.mean().sqrt()),
        }

    def format_metric(self, value: float) -> str:
        """Format R², which is no share: it is negative for answers worse than the mean."""
        return f"{value:.3f}"

    def chance(self, labels: Tensor) -> float | None:
        """Return 0, the R² of the mean as a constant answer."""
        return 0.0

    def prepare_labels(self, labels: Tensor) -> Tensor:
        """Return numbers as float32; see `Task.prepare_labels`."""
        if labels.dim() not in (1, 2) or labels.is_complex():
            raise DataError(
                f"targets are {labels.dtype} of shape {tuple(labels.shape)}; expected numbers of shape (N,) or (N, targets)."
            )
        return labels if labels.dtype == torch.float64 else labels.to(torch.float32)

    def check_labels(self, labels: Tensor, num_outputs: int, dataset_index: Callable[[int], int] = int) -> None:
        """Check that targets are finite; see `Task.check_labels`."""
        check_finite_labels(labels, dataset_index)

    def describe_answers(self, outputs: Tensor, y: Tensor, classes: Sequence[str]) -> list[str]:
        """Format the numbers; see `Task.describe_answers`."""
        return [", ".join(f"{value:.3g}" for value in row) for row in rows_of(outputs).tolist()]

    def describe_labels(self, y: Tensor, classes: Sequence[str]) -> list[str]:
        """Format the targets; see `Task.describe_labels`."""
        return self.describe_answers(y, y, classes)

    def count_outputs(self, labels: Tensor) -> int:
        """Return the number of targets."""
        return 1 if labels.dim() == 1 else int(labels.shape[1])

    def describe_expected_outputs(self, num_examples: int, num_outputs: int, label_shape: Sequence[int]) -> str:
        """Describe one number for each target."""
        return f"numbers of shape ({num_examples}, {num_outputs}), one for each target"

    def accepts_outputs(self, outputs: Tensor, num_examples: int, num_outputs: int, label_shape: Sequence[int]) -> bool:
        """Return whether there is a number for each target."""
        shapes = [(num_examples, num_outputs), *([(num_examples,)] if num_outputs == 1 else [])]
        return tuple(outputs.shape) in shapes

    def _largest_error(self, outputs: Tensor, y: Tensor) -> Tensor:
        return (rows_of(outputs) - rows_of(y)).abs().amax(1)
