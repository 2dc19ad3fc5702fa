"""deat.load_run: a run's network, history, settings and evaluations, from its folder."""

import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from deat.errors import CheckpointError, DeatError, UsageError, unknown_name_error
from deat.evaluation.results import Evaluation, load_evaluation
from deat.models import add_normalization, build_model, get_input_std
from deat.models.interface_checks import check_model
from deat.models.saved_normalization import split_normalization
from deat.models.weights import SavedWeights, load_saved_weights, read_weights
from deat.runs.fit_checkpoint_folder import read_checkpoint_folder
from deat.runs.record_files import (
    HISTORY_FILE,
    RUN_FILE,
    WEIGHTS_FILE,
    EpochChoice,
    RunRecord,
    describe_record_change,
    parse_record,
    read_record,
)
from deat.runs.run_dir import has_checkpoint
from deat.runs.trained_run import confirm_model, find_run_weights
from deat.tasks import CLASSIFICATION, Task
from deat.threat import ThreatModel, format_threat
from deat.training.checkpoints import load_checkpoint_weights
from deat.training.config import TrainConfig, resolve_device
from deat.training.epoch_records import EpochStats, read_history
from deat.training.history_display import history_to_pandas, render_history
from deat.training.run_record import UNNAMED_DATA
from deat.utils.user_paths import expand_path

EPOCHS: tuple[EpochChoice, ...] = ("best", "last", "averaged")


@dataclass(frozen=True, eq=False)
class SavedRun:
    """A run that was loaded from its folder.

    Attributes:
        path: The folder.
        model: The network with the weights of `epoch`, in eval mode; its normalisation is part of it.
        epoch: Whose weights the network has: "best", "last" or "averaged".
        history: The statistics of each epoch.
        settings: The settings of training.
        method: The name of the method.
        threat: The threat model that it was trained against.
        data: The name of the data set; None if it has none.
        classes: The names of the classes, in the order of the network's outputs.
        image_shape: Channels, height and width of an image; empty if that is not recorded.
        evaluations: Every evaluation in the folder, by the name of its file.
        task: What outputs and labels mean.

    Example:
        >>> run = deat.load_run("runs/digits-m+deat")
        >>> run.model(images).argmax(1)
    """

    path: Path
    model: nn.Module = field(repr=False)
    epoch: EpochChoice
    history: list[EpochStats] = field(repr=False)
    settings: TrainConfig
    method: str
    threat: ThreatModel
    data: str | None
    classes: tuple[str, ...]
    image_shape: tuple[int, ...]
    evaluations: dict[str, Evaluation] = field(repr=False)
    task: Task = CLASSIFICATION

    def __repr__(self) -> str:
        evaluations = ", ".join(self.evaluations) or "none"
        return (
            f"SavedRun({str(self.path)!r}, {self.method} on {self.data or UNNAMED_DATA}, "
            f"{format_threat(self.threat, with_rule=True)}, {type(self.model).__name__} of the "
            f"{self.epoch} epoch, {len(self.history)} of {self.settings.epochs} epochs, evaluations: {evaluations})"
        )

    def to_pandas(self) -> Any:
        """Return the history as a pandas.DataFrame; see `TrainResult.to_pandas`."""
        return history_to_pandas(self.history)

    def _repr_html_(self) -> str:
        lines = [f"{name}: {evaluation!r}" for name, evaluation in self.evaluations.items()]
        return render_history(repr(self), lines, self.history)


def load_run(
    path: str | os.PathLike[str],
    *,
    model: nn.Module | str | None = None,
    epoch: EpochChoice = "best",
    device: str = "auto",
) -> SavedRun:
    """Load a run from its folder, without its data.

    Args:
        path: A folder of `deat train`, of `TrainResult.save`, of a run in a bench, or of `fit(checkpoints=)`.
        model: The network, where it is code: a Module, into which the weights are loaded in place, or its name, such
            as "my_net.py:Net". Code that only a record names is never run.
        epoch: Which weights: those of the "best" or the "last" epoch, or the "averaged" ones of training with ema.
        device: Where the network is put: "cpu", "cuda", "cuda:1"; "auto" takes a GPU if there is one.

    Returns:
        The run. Its network answers as it did in training: if it was trained behind a normalisation, that is part of
        `run.model`, also where a bare network was given.

    Raises:
        CheckpointError: If the folder is no run, is damaged, or has no weights of that epoch, or they do not fit.
        UsageError: If the network is code and is not given, or the epoch or the device is not accepted.

    Example:
        >>> run = deat.load_run("runs/photos", model=Net(), epoch="last")
        >>> [(stats.k, stats.val_robust) for stats in run.history]
    """
    if epoch not in EPOCHS:
        raise unknown_name_error("epoch", epoch, EPOCHS)
    folder = expand_path(path)
    record, history = _read_records(folder)
    if changed := describe_record_change(folder):
        warnings.warn(changed, RuntimeWarning, stacklevel=2)
    saved = read_run_weights(folder, epoch)
    network = _get_network(record, model, saved)
    load_saved_weights(network, saved)
    return SavedRun(
        path=folder,
        model=network.to(resolve_device(device)).eval(),
        epoch=epoch,
        history=history,
        settings=record.config,
        method=record.request.method,
        threat=record.threat,
        task=record.task,
        data=record.request.data or None,
        classes=record.classes,
        image_shape=record.image_shape,
        evaluations=load_evaluations(folder),
    )


def load_evaluations(folder: Path) -> dict[str, Evaluation]:
    """Load every evaluation in a run's folder, by the name of its file."""
    return {file.name: load_evaluation(file) for file in sorted(folder.glob("evaluation*.json"))}


def read_run_weights(folder: Path, epoch: EpochChoice) -> SavedWeights:
    """Read a run's weights from its own file if there is one, and else from its checkpoints.

    Args:
        folder: A run's folder, or one of checkpoints.
        epoch: Which weights.

    Raises:
        CheckpointError: If there are none, or they are damaged.
    """
    if has_checkpoint(folder) and not (folder / epoch / WEIGHTS_FILE).is_file():
        tensors = load_checkpoint_weights(folder, epoch)
        return SavedWeights(folder, tensors, split_normalization(tensors)[1])
    return read_weights(find_run_weights(folder, epoch))


def _read_records(folder: Path) -> tuple[RunRecord, list[EpochStats]]:
    """The record and the history of a run, or what the checkpoints of fit say in their place."""
    if (folder / RUN_FILE).is_file():
        return read_record(folder), read_history(folder / HISTORY_FILE)
    if not has_checkpoint(folder):
        raise CheckpointError(
            f"{str(folder)!r} is no run: give a folder with {RUN_FILE}, or one of fit(checkpoints=). deat.load_weights "
            "reads files of weights."
        )
    checkpoints = read_checkpoint_folder(folder)
    try:
        return parse_record(checkpoints.record), checkpoints.history
    except (ValueError, KeyError, TypeError, AttributeError, DeatError) as error:
        raise CheckpointError(
            f"the checkpoints in {str(folder)!r} are not of a training of deat's ({error})."
        ) from None


def _get_network(record: RunRecord, model: nn.Module | str | None, saved: SavedWeights) -> nn.Module:
    """The given network, or a new one of the recorded name, with the normalisation of the weights in front."""
    if isinstance(model, str) or model is None:
        name = confirm_model(record, model)
        if not record.image_shape:
            raise UsageError(
                f"the run does not say how large its images are: give the network itself, model={name}(...)."
            )
        model = build_model(name, len(record.classes), record.image_shape[0], record.image_shape[-1])
    check_model(model)
    if saved.normalization and get_input_std(model) is None:
        return add_normalization(model, **saved.normalization, unit_range=False)
    return model
