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

from deat.data import Augment, Corpus, Data, ImageSet, LazyImages, Source
from deat.data.augment import check_augment
from deat.data.loaders import kind_of
from deat.data.sources import as_images
from deat.data.statistics import measure
from deat.errors import UsageError, unknown
from deat.evaluation.arguments import check_model
from deat.methods import Method
from deat.methods import method as find_method
from deat.models import normalized, pixel_scale
from deat.models.build import Normalization
from deat.models.normalize import check_pair
from deat.runs.execute import check_place, fit_in
from deat.threat import ThreatModel, check_room, odd_radius
from deat.threat import threat as find_threat
from deat.training.best_epoch import Result
from deat.training.callbacks import Callback, check_callbacks
from deat.training.config import Settings
from deat.training.data_split import divide, open_held_out, open_source
from deat.training.epoch_lines import EpochLines
from deat.training.messages import odd_outputs
from deat.training.model_checks import check_fit, idle_parameters
from deat.training.optimizers import OptimizerFactory
from deat.training.trainer import Trainer
from deat.utils.distributed import ALONE, Ranks

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
    inexact: bool = False,
    progress: bool = True,
    ranks: Ranks = ALONE,
    **settings: Any,
) -> Result:
    """Train any classifier that gives logits, in place, on any data, against a threat model.

    method is a name that `deat list methods` shows, or a Method; threat is Linf(8 / 255), L2, L1 or text such as
    "l2:0.5". The Result has the model in eval mode, a record of each epoch, the best epoch on val, and notes.

    train and val take a Dataset, a DataLoader, a pair of tensors or an ImageSet; images are in [0, 1] or uint8. val may
    also be a fraction of train to hold out. A loader's images are checked as they first come; it brings its own
    batches, and takes neither batch_size nor augment. A Corpus, which deat.load_data gives, brings its own threat
    model, augmentation and val/ part; with anything else the threat is linf of 8/255 and images stay as they are, so
    that fit(model, photos.train) crops and flips nothing: augment=photos.augment does, or another Augment(4).

    normalize=(mean, std) becomes the model's first layer, normalize="data" with those of the data, published or
    measured on the images that are trained on; unasked, nothing does. A model with a deat.models.Normalize keeps it.

    Other keywords are fields of :class:`Settings`, such as batch_size, seed or lr: 0.1 unless it is given, where a
    trained model wants less, such as 0.01. optimizer is a function from parameters to an optimizer, by default SGD.
    callbacks have a method on_epoch(trainer, stats, timing). ranks=Ranks.join() trains with torchrun's processes.

    checkpoints is a folder of their own that the state is kept in after every epoch: the same call goes on from there,
    exactly, or not at all; inexact=True lets it go on with another machine, thread count or version, to other numbers.
    SIGTERM and Ctrl-C then save first and raise deat.errors.Interrupted. progress=False says nothing of epochs.
    """
    check_place(checkpoints, ranks)
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
    _check_batch_size(settings.get("batch_size"), trainer.train)
    _say(lines, trainer.engine_news)
    result = fit_in(checkpoints, trainer, inexact=inexact, say=partial(_say, lines))
    _say(lines, *result.notes)
    return result


def _say(lines: list[EpochLines], *texts: str) -> None:
    """Say something beside an epoch's lines, where there are any."""
    for text in filter(None, texts if lines else ()):
        print(text, file=sys.stderr, flush=True)


def _settings(given: dict[str, Any]) -> Settings:
    """Settings of fit's other keywords; one that nobody knows is refused by name."""
    known = {field.name for field in fields(Settings)}
    for name in given:
        if name not in known:
            accepted = known | inspect.signature(fit).parameters.keys() - {"settings"}
            raise unknown("keyword of fit", name, accepted, OTHER_NAMES.get(name, ""))
    return Settings(**given)


def _check_batch_size(given: int | None, train: Source) -> None:
    """Refuse a batch size that was asked for where the data comes in batches of another."""
    if given is not None and given != train.batch_size:
        raise UsageError(
            f"batch_size={given} is not for data that comes in its own batches, here of {train.batch_size}. Leave "
            "batch_size out, or pass the Dataset in place of its loader."
        )


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
    augment = check_augment(augment) or (corpus.augment if corpus else None)
    val = corpus.val if corpus and val is None else val
    rest, held_out = divide(corpus.train if corpus else train, val, settings)
    source = open_source(rest, settings, augment=augment)
    source.check()
    check_room(radius, source.shape)
    held = open_held_out(held_out, source, settings)
    front = None if pixel_scale(model) is not None else _front(normalize, corpus, rest)
    network = normalized(model, *front) if front else model
    outputs = check_fit(network, source, ranks.size, corpus.train if corpus else train)
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
        return check_pair(normalize)
    if normalize == "none":
        return None
    if normalize != "data":
        raise unknown("normalize", normalize, ["data", "none"], "Or give numbers by channel, (mean, std).")
    images = train if isinstance(train, ImageSet | LazyImages) else as_images(train)
    if images is None:
        raise UsageError(
            f"normalize='data' measures images in memory or in a folder, no {kind_of(train)}; give (mean, std)."
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


def _usual_threat(train: object) -> str:
    return f"{train.norm}:{train.eps!r}" if isinstance(train, Corpus) else "linf:8/255"
