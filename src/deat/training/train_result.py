"""The result of training: the model, the history, the best epoch and notes."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from deat.errors import UsageError
from deat.models.weights import get_state_dict, unwrap_model
from deat.training.best_epoch import BestChoice, Snapshot
from deat.training.epoch_records import EpochStats
from deat.training.history_display import history_to_pandas, render_history
from deat.training.run_record import write_result_folder
from deat.utils.user_paths import expand_path


@dataclass(frozen=True, eq=False)
class TrainResult:
    """The result of training.

    Attributes:
        model: The trained model, with the weights of the last epoch, in eval mode. In a partial result they are those of
            the batch at which training stopped.
        history: The statistics of each epoch.
        best: The best epoch, its validation scores and its weights.
        choice: Why this epoch is the best; `print(result.choice.reason)` says it in a sentence.
        seconds: The duration of training, without validation.
        notes: Remarks for the user, such as that the best weights are at chance level.
        record: The settings, the method, the network, the data and the threat model, as in run.json.
        averaged: The average of the weights after the last batch; None in training without `ema`.
        stopped_after: For a partial result, the number of finished epochs, and of batches of the next one; None if
            training was finished.

    Example:
        >>> result = deat.fit(model, train, method="n-fgsm", val=0.1)
        >>> model = result.load_best()
    """

    model: nn.Module
    history: list[EpochStats]
    best: Snapshot
    choice: BestChoice
    seconds: float
    notes: Sequence[str] = ()
    record: Mapping[str, Any] = field(default_factory=dict, repr=False)
    stopped_after: tuple[int, int] | None = None
    averaged: dict[str, Tensor] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_versions", self._count_changes())

    def __repr__(self) -> str:
        scores = {"natural": self.best.natural, "robust": self.best.robust}
        validation = "".join(f", {name} {score:.1%}" for name, score in scores.items() if score is not None)
        return f"TrainResult({self._describe_training()}, best.epoch {self.best.epoch}{validation})"

    def _describe_training(self) -> str:
        partial = f"partial: {len(self.history)} of {self.record['settings']['epochs']}" if self.is_partial else ""
        name = type(self.model).__name__
        return f"{name}, {partial or len(self.history)} epochs, {self.seconds:.1f} s of training"

    @property
    def is_partial(self) -> bool:
        """Whether training was stopped by Ctrl-C before its last epoch."""
        return self.stopped_after is not None

    def to_pandas(self) -> Any:
        """Return the history as a pandas.DataFrame, one row for each epoch.

        Raises:
            UsageError: pandas is not installed.

        Example:
            >>> result.to_pandas()[["epoch", "k", "val_robust"]]
        """
        return history_to_pandas(self.history)

    def _repr_html_(self) -> str:
        title = f"{self.record['method']['name']}: {self._describe_training()}"
        return render_history(title, [self.choice.reason, *self.notes], self.history)

    def load_best(self) -> nn.Module:
        """Load the best epoch's weights into `model` and return it, in eval mode.

        Returns:
            The model.
        """
        unwrap_model(self.model).load_state_dict(self.best.weights)
        return self.model.eval()

    def load_averaged(self) -> nn.Module:
        """Load the averaged weights into `model` and return it, in eval mode.

        Returns:
            The model.

        Raises:
            UsageError: There is no average.
        """
        if self.averaged is None:
            raise UsageError("the weights were not averaged: train with ema=0.999 (--ema 0.999).")
        unwrap_model(self.model).load_state_dict(self.averaged)
        return self.model.eval()

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the result as the folder of a run.

        `deat.load_run`, `deat evaluate` and `deat report` read it. `best/` has the best epoch's weights, and `last/`
        those of the last epoch if the model still has them, which is so before `load_best` and for training that was
        not stopped inside an epoch.

        Args:
            folder: A folder that does not exist, or an empty one.

        Returns:
            The folder.

        Raises:
            UsageError: If the folder has content.
            CheckpointError: If it cannot be written.

        Example:
            >>> result = deat.fit(model, train, val=0.1)
            >>> result.save("runs/mine")
            >>> deat.load_run("runs/mine", model=Net()).history
        """
        path = expand_path(folder)
        is_unchanged = self._count_changes() == vars(self)["_versions"]
        is_end_of_epoch = self.stopped_after is None or self.stopped_after[1] == 0
        last = get_state_dict(self.model) if is_unchanged and is_end_of_epoch else None
        if self.best.epoch == self.history[-1].epoch and not self.best.averaged:
            last = self.best.weights
        write_result_folder(self, path, last)
        return path

    def _count_changes(self) -> int:
        """A number that grows when the model's weights are changed in place."""
        state = unwrap_model(self.model).state_dict()
        return sum(tensor._version for tensor in state.values() if isinstance(tensor, Tensor))
