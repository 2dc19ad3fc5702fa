"""deat.fit: from a network and its data to a robust network in one call."""

import inspect
import os
import signal
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from deat.checkpoint.store import CHECKPOINT_NAME_PATTERN
from deat.data import Augment, BatchSource, DataLike, DataSplits
from deat.errors import CheckpointError, Interrupted, UsageError, unknown_name_error
from deat.evaluation.evaluator import RADIUS_HINT
from deat.integrations.loggers import Logger, RunLog, get_loggers
from deat.methods import Method
from deat.models.model_registry import Normalization
from deat.models.weights import unwrap_model
from deat.runs.fit_progress import FitProgress
from deat.runs.folder_training import FolderOptions, FolderTraining, ResumePolicy
from deat.runs.run_dir import LOGS_FOLDER, create_unique_folder
from deat.tasks import Task
from deat.threat import ThreatModel
from deat.training.callbacks import CallbackLike, check_callbacks
from deat.training.config import TrainConfig
from deat.training.make_trainer import make_trainer
from deat.training.messages import describe_resume_position, describe_stop_position
from deat.training.optimizers import OptimizerFactory
from deat.training.train_result import TrainResult
from deat.training.trainer import Trainer
from deat.utils.distributed import SINGLE_PROCESS, Distributed
from deat.utils.file_locks import LOCK_FILE_NAME
from deat.utils.numbers import check_int
from deat.utils.signals import raise_keyboard_interrupt, signal_reason
from deat.utils.text import MessageHandler
from deat.utils.user_paths import expand_path

KEYWORD_HINTS = {
    "learning_rate": "The learning rate is lr.",
    "eps": RADIUS_HINT,
    "epsilon": RADIUS_HINT,
    "norm": RADIUS_HINT,
    "transform": "Crops and flips are augment=deat.Augment(4); a transform of your own is part of your Dataset.",
    "scheduler": "The learning rate over training is lr_schedule, such as 'cosine'.",
    "num_workers": "The processes that load data are workers.",
}
"""What to use in place of a keyword that fit does not have, where did_you_mean cannot suggest it."""
NOT_SAVED_HINT = (
    "nothing was saved, since fit was given no folder: with checkpoints='some/folder' the same call resumes"
)
"""What the message says about an interrupted fit without a folder."""


def fit(
    model: nn.Module,
    train: DataLike | BatchSource | DataSplits,
    *,
    method: str | Method = "m+deat",
    threat: str | ThreatModel | None = None,
    task: str | Task | None = None,
    epochs: int = 30,
    val: DataLike | BatchSource | float | None = None,
    n_train: int | None = None,
    optimizer: str | OptimizerFactory | None = None,
    normalize: Normalization | str | None = None,
    augment: Augment | None = None,
    callbacks: Sequence[CallbackLike] = (),
    loggers: str | Sequence[str | Logger] = (),
    log_every: int = 0,
    log_checkpoints: bool = False,
    checkpoints: str | os.PathLike[str] | None = None,
    inexact: bool = False,
    progress: bool = True,
    distributed: Distributed = SINGLE_PROCESS,
    **config_fields: Any,
) -> TrainResult:
    """Train a network in place, on any data, against a threat model.

    Images are in [0, 1] or uint8. Other inputs are float tensors with the examples first, in the box of the threat
    model, such as threat=Linf(0.002, box=(-1, 1)) for waveforms. What load_data returns brings its threat model, its
    augmentation and its val part. Anything else is trained on as it is: fit(model, photos.train) crops and flips
    nothing, unless augment is given.

    Ctrl-C, or "interrupt" in a notebook, stops training after the running batch and returns what there is: a partial
    result with the history and the best weights so far, the model in eval mode. With checkpoints it saves and raises.

    Args:
        model: Any network that returns logits for images in [0, 1], or an object with `logits`, or what else the task
            reads. One that is trained already needs a smaller learning rate than the default, such as lr=0.01.
        train: What load_data returns, a Dataset, a DataLoader, a pair of tensors or arrays (images, labels), or an
            ImageSet. The images of a loader are checked as they first come; it brings its own batches and
            augmentation, and takes neither batch_size nor augment.
        method: A name that `deat list methods` shows, or a Method.
        threat: Linf(8 / 255), L2, L1, a Union of them, or text such as "l2:0.5" or "linf:8/255+l2:0.5"; by default that
            of the data set, or linf:8/255.
        task: What outputs and labels mean: "classification", "multilabel", "segmentation", "regression", or a task such
            as tasks.Segmentation(ignore_index=255); by default that of the data, or classification.
        epochs: Number of passes over the training set.
        val: Held-out images, in the forms of train, or the fraction of train to hold out. They choose the best epoch.
        n_train: Number of training images to use, of which val may hold out a fraction. They are chosen at random, the
            same ones for every seed, so that each class keeps its share; a smaller number is a part of a larger one.
        optimizer: "sgd" (the default), "adam", "adamw", "nadam" or "rmsprop", with the settings momentum, betas and
            weight_decay; or a function from parameters to an optimizer.
        normalize: (mean, std), which becomes the model's first layer, or "data" for those of the data, published or
            measured on the training images. By default nothing is added. A model with a deat.models.Normalize keeps
            its own.
        augment: Random crops and flips of images in memory or in a folder, such as Augment(4).
        callbacks: Functions f(trainer, stats, timing) called after each epoch, or objects with methods of `Callback`.
        loggers: Where to log, such as "tensorboard,csv" or ["wandb"]: names that `deat list loggers` shows, or Logger
            objects. Files go to logs/ in the folder of checkpoints, or to a new folder below logs/.
        log_every: Also log the loss of every so many batches; 0 for none.
        log_checkpoints: Also store every checkpoint as an artefact of the loggers that have them; needs checkpoints.
        checkpoints: Folder for the training's state, which is saved after every epoch. The same call resumes from it,
            exactly or not at all. SIGTERM and Ctrl-C save first and raise Interrupted.
        inexact: Resume on another machine, thread count or version too, with other numbers than an uninterrupted
            training.
        progress: Show a line for each epoch on standard error, or in a notebook's cell, and below it on a terminal and
            in a notebook a bar with the time left. In a pipe, an epoch of more than a minute prints how far it is. False
            shows nothing.
        distributed: Distributed.initialize() trains with the processes of torchrun.
        **config_fields: Fields of TrainConfig, such as batch_size, seed, lr or lr_schedule.

    Returns:
        The TrainResult: the model in eval mode, a record of each epoch, the best epoch on val, and notes. After Ctrl-C
        without checkpoints its is_partial is true.

    Raises:
        UsageError: If an argument is not accepted.
        DataError: If the data cannot be trained on.
        CheckpointError: If the state cannot be saved or read.
        NumericalError: If training diverges or runs out of memory.
        Interrupted: If training is stopped by SIGTERM or by a callback, or with checkpoints by Ctrl-C. The state is
            saved first if there are checkpoints.
        KeyboardInterrupt: On Ctrl-C in the first epoch, without checkpoints: there is no result yet.

    Example:
        >>> digits = deat.load_data("digits")
        >>> model = deat.build_model("small", in_channels=1, image_size=8)
        >>> result = deat.fit(model, digits, method="m+deat", epochs=8, val=0.1, batch_size=64, lr=0.05)
        >>> result.best.robust
    """
    _check_checkpoint_folder(checkpoints, distributed)
    tools = get_loggers(loggers)
    check_int("log_every", log_every, 0)
    if log_checkpoints and checkpoints is None:
        raise UsageError("log_checkpoints stores checkpoints, and there are none: add checkpoints=FOLDER.")
    shown = [FitProgress()] if progress and distributed.is_main else []
    if isinstance(optimizer, str):
        config_fields, optimizer = {**config_fields, "optimizer": optimizer}, None
    trainer = make_trainer(
        model,
        train,
        method=method,
        threat=threat,
        config=_make_config({"epochs": epochs, **config_fields}),
        val=val,
        optimizer=optimizer,
        normalize=normalize,
        augment=augment,
        callbacks=[*check_callbacks(callbacks), *shown],
        distributed=distributed,
        task=task,
        n_train=n_train,
    )
    _check_batch_size(config_fields.get("batch_size"), trainer.train)
    _print_messages(shown, trainer.engine_note)
    notify = partial(_print_messages, shown)
    heard = notify if shown else None
    with _logging(trainer, tools, checkpoints, heard, every=log_every, checkpoints=log_checkpoints):
        if checkpoints is None:
            result = _train_without_checkpoints(trainer, shown)
        else:
            result = _train_with_checkpoints(trainer, expand_path(checkpoints), shown, inexact=inexact, notify=notify)
    _print_messages(shown, result.choice.reason, *result.notes)
    return result


def _check_checkpoint_folder(folder: str | os.PathLike[str] | None, distributed: Distributed) -> None:
    """Refuse a folder for checkpoints that holds other things and no checkpoint, before any work."""
    if folder is not None and os.fspath(folder) == "":
        raise UsageError("checkpoints='' names no folder: name one, such as checkpoints='kept'.")
    if folder is not None:
        distributed.run_on_main(lambda: _check_folder_content(expand_path(folder)))


def _check_folder_content(path: Path) -> None:
    names: list[str] = []
    with suppress(OSError):  # what cannot be read, or is no folder, is refused where it is made
        names = sorted(child.name for child in path.iterdir() if child.name != LOCK_FILE_NAME and child.name[0] != ".")
    if names and not any(map(CHECKPOINT_NAME_PATTERN.fullmatch, names)):
        raise UsageError(
            f"{str(path)!r} holds other things than checkpoints, such as {names[0]!r}. Name a folder of their own, "
            f"such as checkpoints={str(path / 'kept')!r}."
        )


def _logging(
    trainer: Trainer,
    loggers: list[Logger],
    folder: str | os.PathLike[str] | None,
    notify: MessageHandler | None,
    **options: Any,
) -> AbstractContextManager[object]:
    """Log the training that happens inside, if there are loggers."""
    if not loggers or not trainer.distributed.is_main:
        return nullcontext()
    name = f"{trainer.method.name}-{trainer.data_name or type(unwrap_model(trainer.model)).__name__}"
    logs = create_unique_folder(Path("logs"), name) if folder is None else Path(folder) / LOGS_FOLDER
    log = RunLog(loggers, logs, name=name, notify=notify, **options)
    trainer.callbacks.append(log)
    if notify:
        notify(f"logging to {', '.join(x.name or type(x).__name__ for x in loggers)}; files are in {str(logs)!r}")
    return log


def _train_without_checkpoints(trainer: Trainer, shown: list[FitProgress]) -> TrainResult:
    """Train without a folder. Ctrl-C ends training after the running batch, with what there is by then."""
    try:
        with trainer.interruption.catch_signals(raise_keyboard_interrupt):
            return _run(trainer, shown)
    except (Interrupted, KeyboardInterrupt) as error:
        trainer.model.eval()
        position = describe_stop_position(trainer)
        if not isinstance(error, KeyboardInterrupt) and str(error) != signal_reason(signal.SIGINT):
            raise Interrupted(f"{error}{position}; {NOT_SAVED_HINT}") from None
        if trainer.history:
            return trainer.make_result(is_partial=True)
    no_result = KeyboardInterrupt()
    no_result.add_note(f"interrupted{position}; {NOT_SAVED_HINT}")
    raise no_result


def _train_with_checkpoints(
    trainer: Trainer, path: Path, shown: list[FitProgress], *, inexact: bool, notify: MessageHandler
) -> TrainResult:
    """Train with checkpoints in a folder, resuming from those that are there."""
    options = FolderOptions(
        create_folder=lambda: _create_checkpoint_folder(path),
        resume=ResumePolicy.IF_STARTED,
        inexact=inexact,
        resume_hint=lambda folder: f"saved in {str(folder)!r}. The same call resumes from there.",
    )
    training = FolderTraining(lambda: trainer, options)
    with training.session():
        if training.resumed and trainer.was_loaded_finished:
            notify(f"finished already in {str(path)!r}: nothing is trained")
        elif training.resumed:
            notify(f"resuming in {str(path)!r} at {describe_resume_position(trainer)}")
        return _run(trainer, shown)


def _run(trainer: Trainer, shown: list[FitProgress]) -> TrainResult:
    with ExitStack() as stack:
        for progress in shown:
            stack.enter_context(progress.showing(trainer))
        return trainer.fit()


def _create_checkpoint_folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot keep checkpoints in {str(path)!r}: {error.strerror}.") from None
    return path


def _print_messages(shown: list[FitProgress], *texts: str) -> None:
    """Print messages where progress is shown."""
    for progress in shown:
        for text in filter(None, texts):
            progress.print(text)


def _make_config(config_fields: dict[str, Any]) -> TrainConfig:
    """A TrainConfig from fit's other keywords; an unknown one is refused by name."""
    known = {field.name for field in fields(TrainConfig)}
    for name in config_fields:
        if name not in known:
            accepted = known | inspect.signature(fit).parameters.keys() - {"config_fields"}
            hint = KEYWORD_HINTS.get(name, "")
            raise unknown_name_error("keyword of fit", name, accepted, hint, suggests=not hint)
    return TrainConfig(**config_fields)


def _check_batch_size(batch_size: int | None, train: BatchSource) -> None:
    """Refuse a batch size if the data comes in batches of another size."""
    if batch_size is not None and batch_size != train.batch_size:
        raise UsageError(
            f"batch_size={batch_size} is not for data that comes in its own batches, here of {train.batch_size}. Leave "
            "batch_size out, or pass the Dataset in place of its loader."
        )
