"""Make a trainer for a model and its data, and check that they fit together."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from deat.data import Augment, BatchSource, DataLike, DataSplits, ImageSet, LazyImages
from deat.data.augment import check_augment
from deat.data.batch_source import as_image_set
from deat.data.channel_stats import measure_channel_stats
from deat.data.dataloader_source import data_type_name
from deat.data.datasets import adapt_data
from deat.errors import UsageError, unknown_name_error
from deat.evaluation.evaluation_request import choose_task
from deat.methods import Method, get_method
from deat.methods.method import check_method_on_task, check_method_on_threat
from deat.models import add_normalization, get_input_std
from deat.models.interface_checks import check_model
from deat.models.logits_wrapper import return_logits, take_logits
from deat.models.model_registry import Normalization
from deat.models.normalize import parse_mean_std
from deat.radius_checks import check_radius, get_radius_warnings
from deat.tasks import Task
from deat.threat import UNIT_BOX, ThreatModel, parse_threat
from deat.training.callbacks import CallbackLike, check_callbacks
from deat.training.config import TrainConfig
from deat.training.data_split import open_source, open_val_source, split_train_val, take_train_part
from deat.training.messages import find_output_problems
from deat.training.model_checks import check_trainable, find_unused_parameters
from deat.training.optimizers import OptimizerFactory
from deat.training.trainer import Trainer
from deat.utils.anonymize_paths import anonymize_paths
from deat.utils.distributed import SINGLE_PROCESS, Distributed
from deat.utils.text import MessageHandler, show_as_warning


def make_trainer(
    model: nn.Module,
    train: DataLike | BatchSource | DataSplits,
    *,
    method: str | Method = "m+deat",
    threat: str | ThreatModel | None = None,
    config: TrainConfig | None = None,
    val: DataLike | BatchSource | float | None = None,
    optimizer: OptimizerFactory | None = None,
    normalize: Normalization | str | None = None,
    augment: Augment | None = None,
    callbacks: Sequence[CallbackLike] = (),
    distributed: Distributed = SINGLE_PROCESS,
    notify: MessageHandler | None = None,
    task: str | Task | None = None,
    n_train: int | None = None,
) -> Trainer:
    """Make a Trainer of what `deat.fit` accepts, with the model and the data checked against each other.

    Args:
        model: Any network that returns logits, or an object with `logits`.
        train: The training data, in any form that `deat.fit` takes.
        method: The training method, or its name.
        threat: The threat model, or its text such as "l2:0.5".
        config: The settings of training.
        val: Held-out data, or a fraction of `train` to hold out.
        optimizer: A function from parameters to an optimizer; by default the one that `config` names, SGD.
        normalize: (mean, std) of a new first layer, or "data" for those of the data.
        augment: Random crops and flips.
        callbacks: Functions f(trainer, stats, timing) called after each epoch, or objects with methods of `Callback`.
        distributed: The processes that train together.
        notify: Shows remarks on the model's outputs or the radius; by default a RuntimeWarning.
        task: What outputs and labels mean; by default that of the data, or classification.
        n_train: The number of training images to use, of which `val` may hold out a fraction.

    Returns:
        A trainer whose `fit` trains the model in place.

    Raises:
        UsageError: The model, the data and the settings do not fit together.
        DataError: The data are damaged.
    """
    check_model(model)
    check_callbacks(callbacks)
    config = config or TrainConfig()
    train, val = adapt_data(train), adapt_data(val)
    splits = train if isinstance(train, DataSplits) else None
    features = splits.features if splits else {}
    method, threat = get_method(method), parse_threat(_default_threat(train) if threat is None else threat, **features)
    task = choose_task(task, train)
    check_method_on_task(method, task)
    check_method_on_threat(method, threat)
    original_train = splits.train if splits else train
    if n_train is not None:
        original_train = take_train_part(original_train, n_train, task)
    augment = check_augment(augment) or (splits.augment if splits else None)
    val = splits.val if splits and val is None else val
    train_data, val_data = split_train_val(original_train, val, config, task, threat.box)
    train_source = open_source(train_data, config, augment=augment, task=task, box=threat.box)
    train_source.check()
    check_radius(threat, train_source.shape)
    val_source = open_val_source(val_data, train_source, config, task=task, box=threat.box)
    has_normalization = get_input_std(model) is not None
    mean_std = None if has_normalization else _resolve_normalization(normalize, splits, train_data, task)
    model = add_normalization(model, *mean_std, threat.box == UNIT_BOX) if mean_std else model
    output = check_trainable(model, train_source, distributed.size, original_train, task)
    model = return_logits(model, output)
    remarks = find_output_problems(take_logits(output), train_source.num_classes, task)
    remarks += get_radius_warnings(threat, method.schedule.has_adversary)
    for remark in remarks if distributed.is_main else ():
        (notify or show_as_warning)(remark)
    if distributed.is_multiprocess:
        shard_source(train_source, model, method, distributed)
    trainer = Trainer(
        model,
        train_source,
        method=method,
        threat=threat,
        config=config,
        val=val_source,
        optimizer=optimizer,
        callbacks=callbacks,
        distributed=distributed,
        task=task,
    )
    trainer.data_name = anonymize_paths(splits.name) if splits else None
    trainer.n_train = n_train if n_train is not None else splits.n_train if splits else None
    return trainer


def _resolve_normalization(
    normalize: Normalization | str | None, splits: DataSplits | None, train: Any, task: Task
) -> Normalization | None:
    """Return the mean and standard deviation of the normalisation layer; None without one."""
    if not isinstance(normalize, str):
        return parse_mean_std(normalize)
    if normalize == "none":
        return None
    if normalize != "data":
        raise unknown_name_error("normalize", normalize, ["data", "none"], "Or give numbers by channel, (mean, std).")
    images = train if isinstance(train, ImageSet | LazyImages) else as_image_set(train, task=task)
    if images is None:
        raise UsageError(
            f"normalize='data' needs images in memory or in a folder, not a {data_type_name(train)}; give (mean, std)."
        )
    stats = splits.channel_stats(images, on_request=True) if splits else measure_channel_stats(images)
    return (stats.mean, stats.std) if stats else None


def shard_source(source: BatchSource, model: nn.Module, method: Method, distributed: Distributed) -> None:
    """Make a source return only this process's part of every batch.

    Args:
        source: The training source; changed in place.
        model: The network.
        method: The training method.
        distributed: The processes that train together.

    Raises:
        UsageError: The source, the batch size, the method or the network cannot be used by several processes.
    """
    if not hasattr(source, "shard"):
        raise UsageError(f"a {type(source).__name__} of your own cannot be shared by processes; pass the data itself.")
    if source.batch_size < distributed.size:
        raise UsageError(
            f"a batch of {source.batch_size} cannot be shared by {distributed.size} processes; make it larger."
        )
    if method.attack.compact:
        raise UsageError("compact needs a single process: each would shrink its batch differently. Leave it out.")
    unused = find_unused_parameters(model, source)
    if unused:
        raise UsageError(
            f"{', '.join(unused[:3])} get no gradient: unused parameters would deadlock the processes. Use them in the model, "
            "or freeze them with requires_grad_(False)."
        )
    source.shard = distributed.shard


def _default_threat(train: object) -> str:
    return train.threat if isinstance(train, DataSplits) else "linf:8/255"
