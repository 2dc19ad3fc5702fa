"""One call from a classifier and its data to a robust classifier."""

import inspect
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from deat.data import Augment, Corpus, Data, ImageSet, LazyImages, Source, as_source
from deat.data.content import check_fits
from deat.data.imageset import split_indices
from deat.data.source import as_images, refuse_text
from deat.data.statistics import measure
from deat.errors import DataError, UsageError, unknown
from deat.evaluation.question import check_model
from deat.loading import described
from deat.methods import Method
from deat.methods import method as find_method
from deat.models import normalized, pixel_scale
from deat.models.registry import Normalization
from deat.modes import device_of, evaluating
from deat.ranks import ALONE, Ranks
from deat.threat import ThreatModel
from deat.threat import threat as find_threat
from deat.training.following import check_callbacks
from deat.training.kept import fit_kept, fit_unkept
from deat.training.lines import EpochLines
from deat.training.optimizers import OptimizerFactory
from deat.training.radii import check_room, odd_radius
from deat.training.remarks import odd_outputs
from deat.training.result import Result
from deat.training.settings import Settings, find_device
from deat.training.trainer import Callback, Trainer

RADIUS = "Radius and norm are the threat, such as threat=deat.Linf(8 / 255) or threat='l2:0.5'."
OTHER_NAMES = {"learning_rate": "The learning rate is lr.", "eps": RADIUS, "epsilon": RADIUS, "norm": RADIUS}
"""What to use in place of a keyword that fit does not have, where its spelling does not tell."""


def fit(
    model: nn.Module,
    train: Data | Source | Corpus,
    *,
    method: str | Method = "m+deat",
    threat: str | ThreatModel | None = None,
    epochs: int = 30,
    val: Data | Source | float | None = None,
    optimizer: OptimizerFactory | None = None,
    normalize: Normalization | str | None = None,
    augment: Augment | None = None,
    callbacks: Sequence[Callback] = (),
    checkpoints: str | os.PathLike[str] | None = None,
    progress: bool = True,
    ranks: Ranks = ALONE,
    **settings: Any,
) -> Result:
    """Train any classifier that gives logits, on any data, against a threat model.

    train and val take a Dataset, a DataLoader, a pair of tensors or an ImageSet; images are in [0, 1] or uint8. val may
    also be a fraction of train to hold out. A Corpus, which deat.load_data gives, brings its own threat model and
    augmentation; with anything else the threat is linf of 8/255 and images stay as they are, so that fit(model,
    photos.train) crops and flips nothing. augment=photos.augment does, or another Augment(4), for images that are held
    in memory or decoded as they come.

    Nothing is put before the model unless asked for, on the command line as here. normalize=(mean, std) becomes its
    first layer; normalize="data" takes those of the data, published or measured on the images that are trained on. A
    model that holds a deat.models.Normalize keeps its own.

    Other keywords are fields of :class:`Settings`, such as batch_size, lr, seed or precision. ranks=Ranks.join() trains
    with all the processes that torchrun started. The model is trained in place and comes back in eval mode.

    checkpoints is a folder that the state is kept in after every epoch: the same call goes on from there, exactly.
    While it is given, SIGTERM and Ctrl-C save first and then raise deat.errors.Interrupted. Every epoch is a line on
    standard error, unless progress=False.
    """
    lines = [EpochLines(sys.stderr)] if progress and ranks.main else []
    trainer = make_trainer(
        model,
        train,
        method=method,
        threat=threat,
        settings=_settings({"epochs": epochs, **settings}),
        val=val,
        optimizer=optimizer,
        normalize=normalize,
        augment=augment,
        callbacks=[*check_callbacks(callbacks), *lines],
        ranks=ranks,
    )
    if lines and trainer.engine_news:
        print(trainer.engine_news, file=sys.stderr)
    return fit_unkept(trainer) if checkpoints is None else fit_kept(trainer, Path(checkpoints))


def _settings(given: dict[str, Any]) -> Settings:
    """Settings of fit's other keywords; one that nobody knows is refused by name."""
    known = {field.name for field in fields(Settings)}
    for name in given:
        if name not in known:
            accepted = known | inspect.signature(fit).parameters.keys() - {"settings"}
            raise unknown("keyword of fit", name, accepted, OTHER_NAMES.get(name, ""))
    return Settings(**given)


def make_trainer(
    model: nn.Module,
    train: Data | Source | Corpus,
    *,
    method: str | Method = "m+deat",
    threat: str | ThreatModel | None = None,
    settings: Settings | None = None,
    val: Data | Source | float | None = None,
    optimizer: OptimizerFactory | None = None,
    normalize: Normalization | str | None = None,
    augment: Augment | None = None,
    callbacks: Sequence[Callback] = (),
    ranks: Ranks = ALONE,
    say: Callable[[str], None] | None = None,
) -> Trainer:
    """A Trainer on whatever `fit` accepts, with model and data checked against each other.

    say is told what is strange about the model's outputs or the radius, and is a RuntimeWarning by default.
    """
    check_model(model)
    check_callbacks(callbacks)
    settings = settings or Settings()
    chosen, radius = find_method(method), find_threat(_usual_threat(train) if threat is None else threat)
    corpus = train if isinstance(train, Corpus) else None
    augment = augment or (corpus.augment if corpus else None)
    rest, held_out = _split(corpus.train if corpus else train, val, settings)
    source = open_source(rest, settings, augment=augment)
    source.check()
    check_room(radius, source.shape)
    held = _held_out(held_out, source, settings)
    front = None if pixel_scale(model) is not None else _front(normalize, corpus, rest)
    network = normalized(model, *front) if front else model
    outputs = check_fit(network, source, ranks.size)
    odd = [*odd_outputs(outputs, source.num_classes), *odd_radius(radius, chosen.schedule.attacks)]
    for line in odd if ranks.main else ():
        (say or _warn)(line)
    if ranks.many:
        share(source, network, chosen, ranks)
    return Trainer(
        network,
        source,
        method=chosen,
        threat=radius,
        settings=settings,
        val=held,
        optimizer=optimizer,
        callbacks=callbacks,
        ranks=ranks,
    )


def _front(normalize: Normalization | str | None, corpus: Corpus | None, train: Any) -> Normalization | None:
    """The mean and standard deviation that go before the model, those of the data where they are asked for."""
    if not isinstance(normalize, str):
        return normalize
    if normalize != "data":
        raise unknown("normalize", normalize, ["data"], "Or give numbers by channel, (mean, std).")
    images = train if isinstance(train, ImageSet | LazyImages) else as_images(train)
    if images is None:
        raise UsageError(
            f"normalize='data' measures images in memory or in a folder, no {type(train).__name__}; give (mean, std)."
        )
    found = corpus.statistics(images) if corpus else measure(images)
    return (found.mean, found.std) if found else None


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)


def share(source: Source, model: nn.Module, chosen: Method, ranks: Ranks) -> None:
    """Make a source give this process's part of every batch; refuse what several processes cannot share."""
    if not hasattr(source, "share"):
        raise UsageError(f"a {type(source).__name__} of your own cannot be shared by processes; pass the data itself.")
    if source.batch_size < ranks.size:
        raise UsageError(f"a batch of {source.batch_size} cannot be shared by {ranks.size} processes; make it larger.")
    if chosen.ascent.compact:
        raise UsageError("compact is for a single process: each would shrink its batch by itself. Leave it out.")
    idle = idle_parameters(model, source)
    if idle:
        raise UsageError(
            f"{', '.join(idle[:3])} get no gradient, for which processes would wait in vain. Use them in the model, or "
            "freeze them: requires_grad_(False)."
        )
    source.share = ranks.share


def idle_parameters(model: nn.Module, source: Source) -> list[str]:
    """The parameters that want a gradient and that the model's answer does not depend on."""
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with evaluating(model):
        found = torch.autograd.grad(model(_two_images(model, source)).sum(), list(learning.values()), allow_unused=True)
    return [name for name, grad in zip(learning, found, strict=True) if grad is None]


def check_fit(model: nn.Module, source: Source, processes: int = 1) -> Tensor:
    """Refuse a model that has nothing to train or does not give one logit per class; its answer to two images."""
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError("the model has no parameter that requires a gradient; there is nothing to train.")
    if source.num_classes < 2:
        raise DataError("the data has a single class; there is nothing to tell apart.")
    lengths = {source.batch_size, source.num_examples % source.batch_size} - {0}
    lonely = any(length // processes <= 1 for length in lengths)
    if lonely and any(isinstance(m, nn.BatchNorm1d) for m in model.modules()):
        raise DataError(
            f"{source.num_examples} images in batches of {source.batch_size} leave a process with a batch of one, on "
            "which BatchNorm1d cannot train. Use another batch size, or one image less."
        )
    x = _two_images(model, source)
    try:
        with torch.no_grad(), evaluating(model):
            logits = model(x)
    except Exception as error:  # whatever the user's own code may raise
        raise UsageError(
            f"the model cannot read images of shape {tuple(source.shape)}: {described(error)}"
            f"{_order_hint(source.shape)}"
        ) from error
    if not isinstance(logits, torch.Tensor) or logits.dim() != 2 or logits.shape[1] < source.num_classes:
        got = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise UsageError(
            f"the model answers two images with {got}; it must give logits of shape (2, {source.num_classes}), "
            f"one for each class.{_counting_hint(logits, source.num_classes)}"
        )
    return logits


def _counting_hint(logits: object, classes: int) -> str:
    """What to do about labels that seem to count from 1."""
    if not isinstance(logits, torch.Tensor) or logits.shape[1:] != (classes - 1,):
        return ""
    return f" The largest label is {classes - 1}: if your labels count from 1, take 1 off, since deat's count from 0."


def _two_images(model: nn.Module, source: Source) -> Tensor:
    """Noise, of which a network makes something, drawn from a stream of its own."""
    dtype = torch.promote_types(torch.float32, next(model.parameters()).dtype)
    noise = torch.rand(2, *source.shape, generator=torch.Generator().manual_seed(0))
    return noise.to(device_of(model), dtype)


def _order_hint(shape: Sequence[int]) -> str:
    """What to do about images whose channels seem to come last."""
    if shape[-1] not in (1, 3) or shape[0] in (1, 3):
        return ""
    return (
        "\nImages are N x C x H x W, and these look like N x H x W x C: give images.permute(0, 3, 1, 2), or a Dataset "
        "whose images are C x H x W."
    )


def _usual_threat(train: object) -> str:
    return f"{train.norm}:{train.eps!r}" if isinstance(train, Corpus) else "linf:8/255"


def _held_out(val: Data | Source | None, train: Source, settings: Settings) -> Source | None:
    """The validation data as a source, checked against the training data's classes."""
    if val is None:
        return None
    held = open_source(val, settings, shuffle=False, num_classes=train.num_classes)
    held.check()
    if held.num_classes > train.num_classes:
        raise DataError(
            f"the validation data has {held.num_classes} classes, the training data {train.num_classes}; "
            "both must number their classes alike."
        )
    return held


def _split(train: Any, val: Any, settings: Settings) -> tuple[Any, Any]:
    """Training and validation data; a fraction is held out of the training data, fixed by the seed."""
    refuse_text(train)
    if not isinstance(val, float):
        return train, val
    if not 0 < val < 1:
        raise UsageError(f"val={val!r} is not a fraction of the training data; use a number such as 0.1, or data.")
    images = train if isinstance(train, ImageSet | LazyImages) else as_images(train)
    rest: Any
    held: Any
    if images is not None:
        rest, held = images.split(max(1, round(val * len(images))), settings.seed)
    elif isinstance(train, Dataset) and hasattr(train, "__getitem__") and hasattr(train, "__len__"):
        parts = split_indices(len(train), max(1, round(val * len(train))), settings.seed)
        rest, held = (Subset(train, part.tolist()) for part in parts)
    else:
        raise DataError(
            "a fraction cannot be held out of a loader; pass val= as data of its own, or the Dataset itself."
        )
    check_fits(len(rest), settings.batch_size, held_out=len(held))
    return rest, held


def open_source(data: Data | Source, settings: Settings, **options: Any) -> Source:
    """Batches of whatever `fit` accepts, under these settings; a Source is passed through."""
    if hasattr(data, "epoch") and hasattr(data, "check"):
        return data  # type: ignore[return-value]
    decoders = min(8, os.cpu_count() or 1) if isinstance(data, LazyImages) else 0
    return as_source(
        data,
        batch_size=settings.batch_size,
        device=find_device(settings.device),
        seed=settings.seed,
        workers=decoders if settings.workers is None else settings.workers,
        **options,
    )
