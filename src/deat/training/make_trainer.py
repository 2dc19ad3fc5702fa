"""Make a trainer of a classifier and its data, checked against each other."""

import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn

from deat.data import Augment, DataLike, DataSplits, ImageSet, LazyImages, Source
from deat.data.augment import check_augment
from deat.data.loaders import data_type_name
from deat.data.sources import as_image_set
from deat.data.statistics import measure_channel_stats
from deat.errors import UsageError, unknown_name_error
from deat.methods import Method, get_method
from deat.models import add_normalization, get_input_std
from deat.models.build import Normalization
from deat.models.interface_checks import check_model
from deat.models.normalize import parse_mean_std
from deat.threat import ThreatModel, parse_threat
from deat.threat_checks import check_radius, get_radius_warnings
from deat.training.callbacks import Callback, check_callbacks
from deat.training.config import TrainConfig
from deat.training.data_split import open_source, open_val_source, split_train_val
from deat.training.messages import find_output_problems
from deat.training.model_checks import check_trainable, find_unused_parameters
from deat.training.optimizers import OptimizerFactory
from deat.training.trainer import Trainer
from deat.utils.distributed import SINGLE_PROCESS, Distributed
from deat.utils.text import MessageHandler


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
    notify: MessageHandler | None = None,
) -> Trainer:
    """Make a Trainer of what `deat.fit` accepts, with the model and the data checked against each other.

    Args:
        model: Any network that returns logits.
        train: The training data, in any form that `deat.fit` takes.
        method: The training method, or its name.
        threat: The threat model, or its text such as "l2:0.5".
        config: The settings of training.
        val: Held-out data, or a fraction of `train` to hold out.
        optimizer: A function from parameters to an optimizer; by default SGD.
        normalize: (mean, std) of a new first layer, or "data" for those of the data.
        augment: Random crops and flips.
        callbacks: Objects with a method on_epoch(trainer, stats, timing).
        distributed: The processes that train together.
        notify: Shows what is odd about the model's outputs or the radius; by default a RuntimeWarning.

    Returns:
        A trainer whose `fit` trains the model in place.

    Raises:
        UsageError: The model, the data and the settings do not fit together.
        DataError: The data are damaged.
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
    odd = [
        *find_output_problems(outputs, source.num_classes),
        *get_radius_warnings(radius, chosen.schedule.has_adversary),
    ]
    for line in odd if distributed.is_main else ():
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
    if not hasattr(source, "shard"):
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
            f"{', '.join(idle[:3])} get no gradient, and unused parameters would deadlock DDP. Use them in the model, or "
            "freeze them: requires_grad_(False)."
        )
    source.shard = distributed.shard


def _default_threat(train: object) -> str:
    return train.threat if isinstance(train, DataSplits) else "linf:8/255"
