"""One call from a classifier and its data to a robust classifier."""

import inspect
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from torch import nn

from deat.data import Augment, DataLike, DataSplits, ImageSet, LazyImages, Source
from deat.data.augment import check_augment
from deat.data.loaders import data_type_name
from deat.data.sources import as_image_set
from deat.data.statistics import measure_channel_stats
from deat.errors import UsageError, unknown_name_error
from deat.evaluation.arguments import check_model
from deat.methods import Method, get_method
from deat.models import add_normalization, get_input_std
from deat.models.build import Normalization
from deat.models.normalize import parse_mean_std
from deat.runs.execute import check_checkpoint_folder, run_training
from deat.threat import ThreatModel, check_radius, get_radius_warnings, parse_threat
from deat.training.best_epoch import TrainResult
from deat.training.callbacks import Callback, check_callbacks
from deat.training.config import TrainConfig
from deat.training.data_split import open_source, open_val_source, split_train_val
from deat.training.epoch_format import EpochPrinter
from deat.training.messages import find_output_problems
from deat.training.model_checks import check_trainable, find_unused_parameters
from deat.training.optimizers import OptimizerFactory
from deat.training.trainer import Trainer
from deat.utils.distributed import SINGLE_PROCESS, Distributed

RADIUS_HINT = "Radius and norm are the threat, such as threat=deat.Linf(8 / 255) or threat='l2:0.5'."
KEYWORD_HINTS = {
    "learning_rate": "The learning rate is lr.",
    "eps": RADIUS_HINT,
    "epsilon": RADIUS_HINT,
    "norm": RADIUS_HINT,
}
"""What to use in place of a keyword that fit does not have, where its spelling does not tell."""


def fit(
    model: nn.Module,
    train: DataLike | Source | DataSplits,
    *,
    method: str | Method = "m+deat",
    threat: str | ThreatModel | None = None,
    epochs: int = 30,
    val: DataLike | Source | float | None = None,
    optimizer: OptimizerFactory | None = None,
    normalize: Normalization | str | None = None,
    augment: Augment | None = None,
    callbacks: Sequence[Callback] = (),
    checkpoints: str | os.PathLike[str] | None = None,
    inexact: bool = False,
    progress: bool = True,
    distributed: Distributed = SINGLE_PROCESS,
    **config_fields: Any,
) -> TrainResult:
    """Train a classifier in place, on any data, against a threat model.

    Images are in [0, 1] or uint8. What load_data returns brings its threat model, its augmentation and its val part.
    Anything else is trained on as it is: fit(model, photos.train) crops and flips nothing, unless augment is given.

    Args:
        model: Any network that returns logits for images in [0, 1]. One that is trained already needs a smaller
            learning rate than the default, such as lr=0.01.
        train: What load_data returns, a Dataset, a DataLoader, a pair of tensors or arrays (images, labels), or an
            ImageSet. The images of a loader are checked as they first come; it brings its own batches and
            augmentation, and takes neither batch_size nor augment.
        method: A name that `deat list methods` shows, or a Method.
        threat: Linf(8 / 255), L2, L1, or text such as "l2:0.5"; by default that of the data set, or linf:8/255.
        epochs: Number of passes over the training set.
        val: Held-out images, in the forms of train, or the fraction of train to hold out. They choose the best epoch.
        optimizer: Function from parameters to an optimizer; by default SGD.
        normalize: (mean, std), which becomes the model's first layer, or "data" for those of the data, published or
            measured on the training images. By default nothing is added. A model with a deat.models.Normalize keeps
            its own.
        augment: Random crops and flips of images in memory or in a folder, such as Augment(4).
        callbacks: Objects with a method on_epoch(trainer, stats, timing).
        checkpoints: Folder for the training's state, which is saved after every epoch. The same call resumes from it,
            exactly or not at all. SIGTERM and Ctrl-C save first and raise Interrupted.
        inexact: Resume on another machine, thread count or version too, with other numbers than an uninterrupted
            training.
        progress: Print a line for each epoch on standard error.
        distributed: Distributed.join() trains with the processes of torchrun.
        **config_fields: Fields of TrainConfig, such as batch_size, seed, lr or lr_schedule.

    Returns:
        The TrainResult: the model in eval mode, a record of each epoch, the best epoch on val, and notes.

    Raises:
        UsageError: If an argument is not accepted.
        DataError: If the data cannot be trained on.
        CheckpointError: If the state cannot be saved or read.
        NumericalError: If training diverges or runs out of memory.
        Interrupted: If training is stopped by a signal, after its state is saved.

    Example:
        >>> digits = deat.load_data("digits")
        >>> model = deat.build_model("small", in_channels=1, image_size=8)
        >>> result = deat.fit(model, digits, method="m+deat", epochs=8, val=0.1, batch_size=64, lr=0.05)
        >>> result.best.robust
    """
    check_checkpoint_folder(checkpoints, distributed)
    lines = [EpochPrinter(sys.stderr)] if progress and distributed.main else []
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
        callbacks=[*check_callbacks(callbacks), *lines],
        distributed=distributed,
    )
    _check_batch_size(config_fields.get("batch_size"), trainer.train)
    _print_messages(lines, trainer.engine_note)
    result = run_training(checkpoints, trainer, inexact=inexact, notify=partial(_print_messages, lines))
    _print_messages(lines, *result.notes)
    return result


def _print_messages(printers: list[EpochPrinter], *texts: str) -> None:
    """Say something beside an epoch's lines, where there are any."""
    for text in filter(None, texts if printers else ()):
        print(text, file=sys.stderr, flush=True)


def _make_config(config_fields: dict[str, Any]) -> TrainConfig:
    """Settings of fit's other keywords; one that nobody knows is refused by name."""
    known = {field.name for field in fields(TrainConfig)}
    for name in config_fields:
        if name not in known:
            accepted = known | inspect.signature(fit).parameters.keys() - {"config_fields"}
            raise unknown_name_error("keyword of fit", name, accepted, KEYWORD_HINTS.get(name, ""))
    return TrainConfig(**config_fields)


def _check_batch_size(batch_size: int | None, train: Source) -> None:
    """Refuse a batch size that was asked for where the data comes in batches of another."""
    if batch_size is not None and batch_size != train.batch_size:
        raise UsageError(
            f"batch_size={batch_size} is not for data that comes in its own batches, here of {train.batch_size}. Leave "
            "batch_size out, or pass the Dataset in place of its loader."
        )


def make_trainer(
    model: nn.Module,
    train: DataLike | Source | DataSplits,
    *,
    method: str | Method = "m+deat",
    threat: str | ThreatModel | None = None,
    config: TrainConfig | None = None,
    val: DataLike | Source | float | None = None,
    optimizer: OptimizerFactory | None = None,
    normalize: Normalization | str | None = None,
    augment: Augment | None = None,
    callbacks: Sequence[Callback] = (),
    distributed: Distributed = SINGLE_PROCESS,
    notify: Callable[[str], None] | None = None,
) -> Trainer:
    """Build a Trainer from what `fit` accepts, with model and data checked against each other.

    Args:
        model: Any network that returns logits for images in [0, 1].
        train: Training data, as for fit.
        method: A name that `deat list methods` shows, or a Method.
        threat: Threat model; by default that of the data set, or linf:8/255.
        config: Settings of the training; by default TrainConfig().
        val: Held-out images, or the fraction of train to hold out.
        optimizer: Function from parameters to an optimizer; by default SGD.
        normalize: (mean, std) or "data", as for fit.
        augment: Random crops and flips, as for fit.
        callbacks: Objects with a method on_epoch(trainer, stats, timing).
        distributed: Distributed.join() trains with the processes of torchrun.
        notify: Function that receives each warning about the model's outputs or the radius; by default they are
            RuntimeWarnings.

    Returns:
        The trainer, whose fit() trains.

    Raises:
        UsageError: If an argument is not accepted.
        DataError: If the data cannot be trained on.

    Example:
        >>> config = deat.TrainConfig(epochs=2, batch_size=64, lr=0.05)
        >>> trainer = deat.make_trainer(model, digits, val=0.1, config=config)
        >>> result = trainer.fit()
    """
    check_model(model)
    check_callbacks(callbacks)
    config = config or TrainConfig()
    chosen, radius = get_method(method), parse_threat(_default_threat(train) if threat is None else threat)
    corpus = train if isinstance(train, DataSplits) else None
    augment = check_augment(augment) or (corpus.augment if corpus else None)
    val = corpus.val if corpus and val is None else val
    rest, held_out = split_train_val(corpus.train if corpus else train, val, config)
    source = open_source(rest, config, augment=augment)
    source.check()
    check_radius(radius, source.shape)
    held = open_val_source(held_out, source, config)
    front = None if get_input_std(model) is not None else _resolve_normalization(normalize, corpus, rest)
    network = add_normalization(model, *front) if front else model
    outputs = check_trainable(network, source, distributed.size, corpus.train if corpus else train)
    odd = [*find_output_problems(outputs, source.num_classes), *get_radius_warnings(radius, chosen.schedule.attacks)]
    for line in odd if distributed.main else ():
        (notify or _warn)(line)
    if distributed.is_multiprocess:
        shard_source(source, network, chosen, distributed)
    return Trainer(
        network,
        source,
        method=chosen,
        threat=radius,
        config=config,
        val=held,
        optimizer=optimizer,
        callbacks=callbacks,
        distributed=distributed,
    )


def _resolve_normalization(
    normalize: Normalization | str | None, splits: DataSplits | None, train: Any
) -> Normalization | None:
    """The mean and standard deviation that go before the model, those of the data where they are asked for."""
    if not isinstance(normalize, str):
        return parse_mean_std(normalize)
    if normalize == "none":
        return None
    if normalize != "data":
        raise unknown_name_error("normalize", normalize, ["data", "none"], "Or give numbers by channel, (mean, std).")
    images = train if isinstance(train, ImageSet | LazyImages) else as_image_set(train)
    if images is None:
        raise UsageError(
            f"normalize='data' measures images in memory or in a folder, no {data_type_name(train)}; give (mean, std)."
        )
    found = splits.channel_stats(images) if splits else measure_channel_stats(images)
    return (found.mean, found.std) if found else None


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)


def shard_source(source: Source, model: nn.Module, method: Method, distributed: Distributed) -> None:
    """Make a source give this process's part of every batch; refuse what several processes cannot share."""
    if not hasattr(source, "share"):
        raise UsageError(f"a {type(source).__name__} of your own cannot be shared by processes; pass the data itself.")
    if source.batch_size < distributed.size:
        raise UsageError(
            f"a batch of {source.batch_size} cannot be shared by {distributed.size} processes; make it larger."
        )
    if method.attack.compact:
        raise UsageError("compact is for a single process: each would shrink its batch by itself. Leave it out.")
    idle = find_unused_parameters(model, source)
    if idle:
        raise UsageError(
            f"{', '.join(idle[:3])} get no gradient, for which processes would wait in vain. Use them in the model, or "
            "freeze them: requires_grad_(False)."
        )
    source.share = distributed.share


def _default_threat(train: object) -> str:
    return train.threat if isinstance(train, DataSplits) else "linf:8/255"
