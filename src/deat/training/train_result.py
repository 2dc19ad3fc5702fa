"""The result of training: the model, the history, the best epoch and notes."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from deat.models.weights import unwrap_model
from deat.training.best_epoch import Snapshot
from deat.training.epoch_records import EpochStats


@dataclass(frozen=True, eq=False)
class TrainResult:
    """The result of training.

    Attributes:
        model: The trained model, with the weights of the last epoch, in eval mode.
        history: The statistics of each epoch.
        best: The best epoch, its validation scores and its weights.
        seconds: The duration of training, without validation.
        notes: Remarks for the user, such as that the best weights are at chance level.

    Example:
        >>> result = deat.fit(model, train, method="n-fgsm", val=0.1)
        >>> model = result.load_best()
    """

    model: nn.Module
    history: list[EpochStats]
    best: Snapshot
    seconds: float
    notes: Sequence[str] = ()

    def __repr__(self) -> str:
        scores = {"natural": self.best.natural, "robust": self.best.robust}
        validation = "".join(f", {name} {score:.1%}" for name, score in scores.items() if score is not None)
        return (
            f"TrainResult({type(self.model).__name__}, {len(self.history)} epochs, {self.seconds:.1f} s of training, "
            f"best.epoch {self.best.epoch}{validation})"
        )

    def load_best(self) -> nn.Module:
        """Load the best epoch's weights into `model` and return it, in eval mode."""
        unwrap_model(self.model).load_state_dict(self.best.weights)
        return self.model.eval()
