"""One call from a classifier and its data to a robust classifier."""

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from deat.data import LazyImages
from deat.data.augment import Augment
from deat.data.source import Source, as_images, as_source
from deat.errors import DataError, UsageError
from deat.evaluation.attacks import evaluating
from deat.methods import Method
from deat.methods import method as find_method
from deat.models import normalized
from deat.threat import ThreatModel
from deat.threat import threat as find_threat
from deat.training.optimizers import OptimizerFactory
from deat.training.result import Result
from deat.training.settings import Settings, find_device
from deat.training.trainer import Callback, Trainer


def fit(
    model: nn.Module,
    train: Any,
    *,
    method: str | Method = "m+deat",
    threat: str | ThreatModel = "linf:8/255",
    epochs: int = 30,
    val: Any = None,
    optimizer: OptimizerFactory | None = None,
    normalize: tuple[Sequence[float], Sequence[float]] | None = None,
    callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> Result:
    """Train any classifier that gives logits, on any data, against a threat model.

    train and val take a Dataset, a DataLoader, a pair of tensors or an ImageSet; images are in [0, 1] or uint8.
    val may also be a fraction of train to hold out. normalize=(mean, std) becomes the model's first layer. Other
    keywords are fields of :class:`Settings`, such as batch_size, lr, seed or precision. The model is trained in place.
    """
    trainer = make_trainer(
        model,
        train,
        method=find_method(method),
        threat=find_threat(threat),
        settings=Settings(epochs=epochs, **settings),
        val=val,
        optimizer=optimizer,
        normalize=normalize,
        callbacks=callbacks,
    )
    return trainer.fit()


def make_trainer(
    model: nn.Module,
    train: Any,
    *,
    method: str | Method = "m+deat",
    threat: str | ThreatModel = "linf:8/255",
    settings: Settings | None = None,
    val: Any = None,
    optimizer: OptimizerFactory | None = None,
    normalize: tuple[Sequence[float], Sequence[float]] | None = None,
    augment: Augment | None = None,
    callbacks: Sequence[Callback] = (),
) -> Trainer:
    """A Trainer on whatever `fit` accepts, with model and data checked against each other."""
    settings = settings or Settings()
    train, val = _split(train, val, settings.seed)
    source = open_source(train, settings, augment=augment)
    source.check()
    held = None if val is None else open_source(val, settings, shuffle=False, num_classes=source.num_classes)
    if held is not None:
        held.check()
    network = normalized(model, *normalize) if normalize else model
    check_model(network, source)
    return Trainer(
        network,
        source,
        method=find_method(method),
        threat=find_threat(threat),
        settings=settings,
        val=held,
        optimizer=optimizer,
        callbacks=callbacks,
    )


def check_model(model: nn.Module, source: Source) -> None:
    """Refuse a model that has nothing to train or does not give one logit per class, before any work."""
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError("the model has no parameter that requires a gradient; there is nothing to train.")
    device = next(model.parameters()).device
    dtype = torch.promote_types(torch.float32, next(model.parameters()).dtype)
    x = torch.zeros(2, *source.shape, device=device, dtype=dtype)
    try:
        with torch.no_grad(), evaluating(model):
            logits = model(x)
    except Exception as error:  # whatever the user's own code may raise
        raise UsageError(f"the model cannot read images of shape {tuple(source.shape)}: {error}") from error
    if not isinstance(logits, torch.Tensor) or logits.dim() != 2 or logits.shape[1] < source.num_classes:
        got = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise UsageError(
            f"the model answers two images with {got}; it must give logits of shape (2, {source.num_classes}), "
            "one for each class."
        )


def _split(train: Any, val: Any, seed: int) -> tuple[Any, Any]:
    """Training and validation data; a fraction is held out of the training data, fixed by the seed."""
    if not isinstance(val, float):
        return train, val
    if not 0 < val < 1:
        raise UsageError(f"val={val!r} is not a fraction of the training data; use a number such as 0.1, or data.")
    images = train if hasattr(train, "split") else as_images(train)
    if images is None:
        raise DataError("a fraction can be held out of tensors or an ImageSet only; pass val= as data of its own.")
    return images.split(max(1, round(val * len(images))), seed)


def open_source(data: Any, settings: Settings, **options: Any) -> Source:
    """Batches of whatever `fit` accepts, under these settings; a Source is passed through."""
    if hasattr(data, "epoch") and hasattr(data, "check"):
        return data  # type: ignore[no-any-return]
    decoders = min(8, os.cpu_count() or 1) if isinstance(data, LazyImages) else 0
    return as_source(
        data,
        batch_size=settings.batch_size,
        device=find_device(settings.device),
        seed=settings.seed,
        workers=decoders if settings.workers is None else settings.workers,
        **options,
    )
