"""A run: what a person asks for in one command, resolved against data and checked before anything is created."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deat.data import Augment, Corpus, Source, load
from deat.data.checks import check_fits, sampled
from deat.data.image_set import split_indices
from deat.data.statistics import Statistics
from deat.data.streaming import Part
from deat.errors import UsageError, unknown
from deat.methods import Method
from deat.methods import method as find_method
from deat.methods.tune import tune
from deat.models import build
from deat.runs.fit import make_trainer
from deat.threat import ThreatModel, check_room
from deat.threat import threat as find_threat
from deat.training.config import Settings, find_device, threads_of
from deat.training.data_split import open_source
from deat.training.model_checks import content_of, fine_tune, statistics_of
from deat.training.optimizers import DEFAULT_LR
from deat.training.overfit_watch import OverfitWatch
from deat.training.resume_checks import config_of, digest, reasons_against_exactness
from deat.training.trainer import Trainer
from deat.utils.distributed import ALONE, Ranks
from deat.utils.numbers import number
from deat.utils.paths import tidy
from deat.utils.seeding import derive
from deat.utils.torch_utils import threaded
from deat.utils.user_code import code_digest, is_file_spec

DEFAULTS: dict[str, dict[str, Any]] = {
    "digits": {"epochs": 30, "batch_size": 64, "lr": 0.05, "peak": 0.3, "cycle_momentum": False},
}
"""Settings that a data set brings with it, where the general ones would not do."""

FINE_TUNING = 10
"""What the usual learning rate is divided by where training starts from given weights, which it makes forget."""

CHOICES = {"normalize": ("auto", "data", "none"), "augment": ("auto", "none")}
"""What may stand for what is done to images on their way into the network."""


def say_nothing(text: str) -> None:
    """Leave it to whoever speaks, or spoke."""


@dataclass(frozen=True)
class Request:
    """Everything that identifies a run. None takes the default of the data set or method."""

    data: str = "digits"
    model: str = "auto"
    method: str = "m+deat"
    rules: str = "paper"
    norm: str | None = None
    eps: float | None = None
    alpha: float | None = None
    gamma: float | None = None
    max_steps: int | None = None
    beta: float | None = None
    tau: int | None = None
    start: str | None = None
    persistent: bool | None = None
    compact: bool | None = None
    space: str | None = None
    init: str | None = None
    held_out: int | None = None
    watch: str | None = None
    normalize: str = "auto"
    augment: str = "auto"
    data_root: str | None = None
    size: int | None = None
    download: bool = False

    @property
    def tuned(self) -> dict[str, Any]:
        """The method's settings that were given."""
        names = ("alpha", "gamma", "max_steps", "beta", "tau", "start", "persistent", "compact", "space")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, eq=False)
class Run:
    """A request resolved: data, model, method and threat model that fit together.

    `recorded` are the statistics that a run's record or a file of weights says, which are never measured again. A run
    that goes on has its weights in a checkpoint, and starts from no others.
    """

    request: Request
    settings: Settings
    corpus: Corpus
    threat: ThreatModel
    method: Method
    model_name: str
    validates: bool = True
    recorded: Statistics | None = None
    goes_on: bool = False

    def trainer(self, ranks: Ranks = ALONE, say: Callable[[str], None] = say_nothing) -> Trainer:
        """A trainer on this run's training set, its validation part held out; say is told of strange outputs."""
        train, val = self._parts()
        return make_trainer(
            self.model(),
            train,
            val=val,
            method=self.method,
            threat=self.threat,
            settings=self.settings,
            augment=self.augment,
            ranks=ranks,
            say=say,
        )

    def model(self) -> nn.Module:
        """A fresh model, its weights a function of the seed, or those of `init`."""
        channels, side = self.corpus.train.shape[0], self.corpus.train.shape[-1]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(self.settings.seed, "init"))
            model = build(self.model_name, self.corpus.train.num_classes, channels, side, self.normalization)
        if self.start:
            fine_tune(model, self.start)
        return model

    @property
    def start(self) -> str | None:
        """The weights that training is to start from, if any."""
        return None if self.goes_on else self.request.init

    @property
    def normalization(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """Mean and standard deviation that go before the network."""
        return (self.statistics.mean, self.statistics.std) if self.statistics else None

    @cached_property
    def statistics(self) -> Statistics | None:
        """What images are normalised by: what is recorded, what fine-tuned weights expect, or the data's own.

        A user's own network is taken as it is, unless that is asked for. Held-out images are not looked at.
        """
        if self.request.normalize == "none":
            return None
        if self.recorded or (self.request.normalize == "auto" and is_file_spec(self.model_name)):
            return self.recorded
        expected = statistics_of(self.start) if self.start else None
        return expected or self.corpus.statistics(self._sample())

    def _sample(self) -> Part:
        """As many of the images that are trained on as are measured."""
        train = self.corpus.train
        kept = split_indices(len(train), self.held_out, self.settings.seed)[0] if self.held_out else range(len(train))
        return train.subset(kept[sampled(len(kept))])

    @property
    def usual_lr(self) -> float:
        """The learning rate of training from nothing on this data, where none is given."""
        return float(DEFAULTS.get(self.corpus.name, {}).get("lr", DEFAULT_LR))

    @property
    def augment(self) -> Augment | None:
        """The data's crops and flips, unless nothing is to be changed."""
        return None if self.request.augment == "none" else self.corpus.augment

    def baseline(self) -> "Run":
        """The same run, on the same training images, by natural training and without validation."""
        return replace(self, method=find_method("natural"), validates=False, goes_on=False)

    def threads_for(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, a network is judged with as many threads as training has: more would fight over a small one."""
        return threaded(threads_of(self.settings, model))

    def watch(self, trainer: Trainer, **options: Any) -> OverfitWatch | None:
        """The overfit watch on this run's validation part; it warns unless told otherwise, or None where it is off."""
        action: Any = self._watch_action(trainer)
        if action == "none":
            return None
        if trainer.val is None:
            raise UsageError(f"watch {action!r} needs images that are held out; leave --held-out and --val-attack be.")
        return OverfitWatch(trainer.val, self.threat, action, seed=self.settings.seed, **options)

    def test_images(self, most: int) -> Source | None:
        """The first images of the test set, at most so many; None where there are none."""
        held = self.corpus.test
        if held is None or most == 0:
            return None
        return open_source(held.subset(range(min(most, len(held)))), self.settings, shuffle=False)

    @property
    def code(self) -> dict[str, str]:
        """The specs of what comes from files, by the names under which their hashes are compared."""
        specs = {"code.method": self.request.method, "code.model": self.model_name}
        return {name: spec for name, spec in specs.items() if is_file_spec(spec)}

    def identity(self, trainer: Trainer) -> dict[str, Any]:
        """What must be the same when the run goes on, beside what the trainer knows: data, network, code, watch."""
        code = {name.removeprefix("code."): code_digest(spec) for name, spec in self.code.items()}
        return {
            "code": code,
            "network": "code" if "model" in code else self.model_name,
            "images": {"name": self.corpus.name, "digest": self.corpus.digest()},
            "watch": self._watch_action(trainer),
        }

    def record(self, trainer: Trainer) -> dict[str, Any]:
        """run.json's account: the request, what it was resolved to, and whether it can go on exactly."""
        doubts, identity = reasons_against_exactness(trainer), self.identity(trainer)
        return {
            "digest": digest({**config_of(trainer), **identity}),
            "digest_of_init": content_of(self.start) if self.start else None,
            "exact": not doubts,
            "not_exact_because": doubts,
            "code": identity["code"],
            "request": {name: tidy(value) for name, value in asdict(self.request).items()},
            "settings": asdict(self.settings),
            "method": self.method.describe(),
            "schedule": repr(trainer.schedule),
            "model": {"name": tidy(self.model_name), "parameters": trainer.num_parameters},
            "data": {
                **identity["images"],
                "train": trainer.train.num_examples,
                "held_out": trainer.validator.source.num_examples if trainer.validator else 0,
                "classes": list(self.corpus.train.classes),
                "image": list(self.corpus.train.shape),
                "normalized_by": self.normalization,
                "measured_on": self.statistics.images if self.statistics else 0,
                "augmented_by": asdict(self.augment) if self.augment else None,
            },
            "threat": {"norm": self.threat.name, "eps": self.threat.eps},
            "device": trainer.engine.device.type,
            "precision": trainer.engine.precision,
            "engine": trainer.engine.name,
            "threads": trainer.threads,
            "processes": trainer.ranks.size,
            "watch": self._watch_action(trainer),
        }

    def about(self, weights: Path, epoch: str | None) -> dict[str, Any]:
        """What an evaluation's record says of the network and the images that it judged."""
        asked = {name: getattr(self.request, name) for name in ("data", "data_root", "size", "normalize")}
        return {**asked, "model": self.model_name, "weights": str(weights), "epoch": epoch}

    def _watch_action(self, trainer: Trainer) -> str:
        return self.request.watch or ("none" if trainer.val is None else "warn")

    def _parts(self) -> tuple[Any, Any]:
        """The training part, and the held-out part where there is one and it is to be used."""
        train, val = self.corpus.train, self.own_val
        if self.held_out:
            train, val = train.split(self.held_out, self.settings.seed)
            check_fits(len(train), self.settings.batch_size, held_out=len(val))
        return train, val if self.validates else None

    @property
    def held_out(self) -> int:
        """How many training images are held out to choose the best epoch."""
        usual = 0 if self.own_val or self.settings.val_attack == "none" else min(1000, len(self.corpus.train) // 10)
        return usual if self.request.held_out is None else self.request.held_out

    @property
    def own_val(self) -> Part | None:
        """The data's own images to choose the best epoch, unless others are asked for, or none."""
        asked = self.request.held_out is not None or self.settings.val_attack == "none"
        return None if asked else self.corpus.val


def resolve(request: Request, *, recorded: bool = False, statistics: Statistics | None = None, **given: Any) -> Run:
    """The run that a request means; `given` are settings, None where the default of the data set holds.

    What can be refused without the data is refused before they are read, which may take long. A data root that is
    recorded, and so a file's word, is looked into and never written to. Statistics are a record's or a file's.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    for name, known in CHOICES.items():
        if getattr(request, name) not in known:
            raise unknown(name, getattr(request, name), known)
    find_device(Settings(**chosen).device)
    method = find_method(request.method, rules=request.rules)
    if request.eps is not None:
        tune(method, find_threat(f"{request.norm or 'linf'}:{request.eps!r}"), **request.tuned)
    root, also = (None, request.data_root) if recorded else (request.data_root, None)
    corpus = load(request.data, root=root, also=also, download=request.download, size=request.size)
    threat = _threat(request, corpus)
    name = _model_for(corpus) if request.model == "auto" else request.model
    settings = Settings(**{**DEFAULTS.get(corpus.name, {}), **chosen})
    tuned = tune(method, threat, **request.tuned)
    run = Run(request, settings, corpus, threat, tuned, name, recorded=statistics)
    if not request.init or "lr" in chosen:
        return run
    return replace(run, settings=replace(settings, lr=run.usual_lr / FINE_TUNING))


def _threat(request: Request, corpus: Corpus) -> ThreatModel:
    norm = (request.norm or corpus.norm).lower()
    if request.eps is None and norm != corpus.norm:
        raise UsageError(f"norm {norm!r} needs an eps of its own: {corpus.name}'s default is for {corpus.norm}.")
    eps = corpus.eps if request.eps is None else number(request.eps)
    found = find_threat(f"{norm}:{eps!r}")
    check_room(found, corpus.train.shape)
    return found


def _model_for(corpus: Corpus) -> str:
    side = corpus.train.shape[-1]
    return "small" if side < 16 else "preact_resnet18" if side <= 96 else "resnet50"
