"""A run: what one command requests, resolved against its data and checked before anything is created."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deat.data import Augment, BatchSource, DataSplits, load_data
from deat.data.channel_stats import ChannelStats
from deat.data.csv_tables import TableEncoding
from deat.data.datasets import name_path_kind, split_data_root
from deat.data.image_label_checks import check_dataset_size
from deat.data.image_set import sample_slice, split_indices
from deat.data.streaming import AnyImageSet
from deat.errors import UsageError, unknown_name_error
from deat.methods import Method, get_method
from deat.methods.change_settings import configure_method
from deat.methods.method import check_method_on_task, check_method_on_threat
from deat.methods.method_registry import find_method_plugin
from deat.models import add_normalization, build_model, get_input_std
from deat.models.model_registry import find_model_plugin
from deat.models.pretrained import fetch_architecture, fetch_pretrained, is_pretrained_spec
from deat.radius_checks import check_radius
from deat.tasks import Segmentation, Task, find_task_plugin
from deat.threat import UNIT_BOX, ThreatModel, parse_threat
from deat.training.config import TrainConfig, choose_num_threads, resolve_device
from deat.training.data_split import open_source
from deat.training.initial_weights import load_initial_weights, read_channel_stats
from deat.training.make_trainer import make_trainer
from deat.training.named_optimizers import get_optimizer
from deat.training.overfit_watch import OverfitWatch
from deat.training.trainer import Trainer
from deat.utils.distributed import SINGLE_PROCESS, Distributed
from deat.utils.numbers import parse_number
from deat.utils.seeding import derive_seed
from deat.utils.text import MessageHandler, ignore_message
from deat.utils.torch_contexts import use_threads
from deat.utils.user_code import hash_code_file, is_file_spec

DATASET_DEFAULTS: dict[str, dict[str, Any]] = {
    "digits": {"epochs": 30, "batch_size": 64, "lr": 0.05, "peak": 0.3, "cycle_momentum": False},
}
"""Settings that a data set brings with it, where the general ones would not do."""

FINE_TUNING_LR_DIVISOR = 10
"""What the usual learning rate is divided by where training starts from given weights, which it makes forget."""

PREPROCESSING_CHOICES = {"normalize": ("auto", "data", "none"), "augment": ("auto", "none")}
"""The accepted values of the settings of preprocessing."""


@dataclass(frozen=True)
class Request:
    """Everything that identifies a run. None takes the default of the data set or method."""

    data: str = "digits"
    model: str = "auto"
    method: str = "m+deat"
    rules: str = "default"
    norm: str | None = None
    eps: float | None = None
    threat: str | None = None
    threat_rule: str | None = None
    alpha: float | None = None
    gamma: float | None = None
    max_steps: int | None = None
    beta: float | None = None
    tau: int | None = None
    start: str | None = None
    persistent: bool | None = None
    compact: bool | None = None
    space: str | None = None
    g_weight: float | None = None
    g_step: float | None = None
    g_form: str | None = None
    awp_gamma: float | None = None
    awp_warmup: int | None = None
    init: str | None = None
    held_out: int | None = None
    watch: str | None = None
    normalize: str = "auto"
    augment: str = "auto"
    data_root: str | None = None
    size: int | None = None
    download: bool = False
    task: str | None = None
    target: str | None = None
    n_train: int | None = None

    @property
    def method_options(self) -> dict[str, Any]:
        """The method's settings that were given."""
        names = ["alpha", "gamma", "max_steps", "beta", "tau", "start", "persistent", "compact", "space"]
        names += ["g_weight", "g_step", "g_form", "awp_gamma", "awp_warmup"]
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, eq=False)
class Run:
    """A request resolved: data, model, method and threat model that fit together.

    `recorded` are the statistics in a run's record or a file of weights, which are never measured again. A run that
    `goes_on` is resumed: its weights are in a checkpoint, so that it does not start from those of `init`.
    """

    request: Request
    config: TrainConfig
    splits: DataSplits
    threat: ThreatModel
    method: Method
    model_name: str
    uses_validation: bool = True
    recorded: ChannelStats | None = None
    goes_on: bool = False

    def trainer(self, distributed: Distributed = SINGLE_PROCESS, notify: MessageHandler = ignore_message) -> Trainer:
        """Make a trainer on this run's training set without its held-out part; `notify` shows problems of the outputs."""
        train, val = self._split_train_val()
        trainer = make_trainer(
            self.model(),
            train,
            val=val,
            method=self.method,
            threat=self.threat,
            config=self.config,
            augment=self.augment,
            distributed=distributed,
            notify=notify,
            task=self.task,
        )
        trainer.n_train = self.splits.n_train
        return trainer

    def model(self) -> nn.Module:
        """A fresh model, its weights a function of the seed, or those of `init`."""
        channels, side = self.splits.train.shape[0], self.splits.train.shape[-1]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(self.config.seed, "init"))
            is_image = self.splits.box == UNIT_BOX
            normalize = self.normalization if is_image else None
            model = build_model(self.model_name, self.splits.train.num_classes, channels, side, normalize)
            if not is_image and self.normalization and get_input_std(model) is None:
                model = add_normalization(model, *self.normalization, unit_range=False)
        if self.start:
            load_initial_weights(model, self.start)
        return model

    @property
    def task(self) -> Task:
        """What the labels of the data mean."""
        return self.splits.task

    @property
    def start(self) -> str | None:
        """The weights that training is to start from, if any."""
        return None if self.goes_on else self.request.init

    @property
    def normalization(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """Mean and standard deviation that go before the network."""
        return (self.statistics.mean, self.statistics.std) if self.statistics else None

    @cached_property
    def statistics(self) -> ChannelStats | None:
        """What images are normalised by: what is recorded, what fine-tuned weights expect, or the data's own.

        A user's own network gets the data's own only on request. Held-out images are not read.
        """
        if self.request.normalize == "none":
            return None
        expected = self.recorded or (read_channel_stats(self.start) if self.start else None)
        if expected or (self.request.normalize == "auto" and is_file_spec(self.model_name)):
            return expected
        return self.measure_channel_stats()

    def measure_channel_stats(self) -> ChannelStats | None:
        """The data's own statistics: published ones, or those of as many of the images that are trained on as needed."""
        train = self.splits.train
        indices = split_indices(len(train), self.held_out, self.config.seed)[0] if self.held_out else range(len(train))
        images = train.subset(indices[sample_slice(len(indices))])
        return self.splits.channel_stats(images, on_request=self.request.normalize == "data")

    @property
    def default_lr(self) -> float:
        """The learning rate of training from random weights on this data, where none is given."""
        return get_default_lr(self.splits.name, self.config.optimizer)

    @property
    def augment(self) -> Augment | None:
        """The data's crops and flips, unless nothing is to be changed."""
        return None if self.request.augment == "none" else self.splits.augment

    def baseline(self) -> "Run":
        """The same run, on the same training images, by natural training and without validation."""
        return replace(self, method=get_method("natural"), uses_validation=False, goes_on=False)

    def limit_threads(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, a network is evaluated with as many threads as training has: more would slow a small one down."""
        return use_threads(choose_num_threads(self.config, model))

    def watch(self, trainer: Trainer, **options: Any) -> OverfitWatch | None:
        """The overfit watch on this run's validation part; by default it warns. None where it is off."""
        action: Any = self._watch_action(trainer)
        if action == "none":
            return None
        if trainer.val is None:
            raise UsageError(f"watch {action!r} needs images that are held out; leave --held-out and --val-attack be.")
        return OverfitWatch(trainer.val, self.threat, action, seed=self.config.seed, **options)

    def test_images(self, max_images: int) -> BatchSource | None:
        """The first images of the test set, at most `max_images`; None without test images."""
        test = self.splits.test
        if test is None or max_images == 0:
            return None
        return open_source(
            test.subset(range(min(max_images, len(test)))),
            self.config,
            shuffle=False,
            task=self.task,
            box=self.threat.box,
        )

    @property
    def code(self) -> dict[str, str]:
        """The specs of what comes from files, by the names under which their hashes are compared."""
        specs = {"code.method": self.request.method, "code.model": self.model_name}
        return {name: spec for name, spec in specs.items() if is_file_spec(spec)}

    def identity(self, trainer: Trainer) -> dict[str, Any]:
        """What must be the same when the run is resumed, besides what the trainer knows: data, network, code, watch."""
        code = {name.removeprefix("code."): hash_code_file(spec) for name, spec in self.code.items()}
        return {
            "code": code,
            "network": "code" if "model" in code else self.model_name,
            "images": {"name": self.splits.name, "digest": self.splits.train.digest()},
            "watch": self._watch_action(trainer),
            **self._plugins(),
        }

    def _plugins(self) -> dict[str, dict[str, str]]:
        """The packages of what comes from plugins, which are part of what a run was trained with."""
        origins = {
            "method": find_method_plugin(self.request.method),
            "model": find_model_plugin(self.model_name),
            "task": find_task_plugin(self.task),
        }
        used = {part: origin for part, origin in origins.items() if origin}
        return {"plugins": used} if used else {}

    def about(self, weights: Path, epoch: str | None) -> dict[str, Any]:
        """What evaluation.json says of the network and the images."""
        requested = {name: getattr(self.request, name) for name in ("data", "data_root", "size", "normalize")}
        requested |= _reading(self.request)
        return {**requested, "model": self.model_name, "weights": str(weights), "epoch": epoch}

    def _watch_action(self, trainer: Trainer) -> str:
        return self.request.watch or ("none" if trainer.val is None else "warn")

    def _split_train_val(self) -> tuple[Any, Any]:
        """The training part, and the held-out part or None."""
        train, val = self.splits.train, self.dataset_val
        if self.held_out:
            train, val = train.split(self.held_out, self.config.seed)
            check_dataset_size(len(train), self.config.batch_size, held_out=len(val))
        return train, val if self.uses_validation else None

    @property
    def held_out(self) -> int:
        """How many training images are held out to choose the best epoch."""
        usual = 0 if self.dataset_val or self.config.val_attack == "none" else min(1000, len(self.splits.train) // 10)
        return usual if self.request.held_out is None else self.request.held_out

    @property
    def dataset_val(self) -> AnyImageSet | None:
        """The data's own images to choose the best epoch, unless the request holds out others, or none."""
        is_replaced = self.request.held_out is not None or self.config.val_attack == "none"
        return None if is_replaced else self.splits.val


def resolve_request(
    request: Request,
    *,
    is_recorded: bool = False,
    statistics: ChannelStats | None = None,
    table: TableEncoding | None = None,
    **config_fields: Any,
) -> Run:
    """Resolve a request against its data.

    What can be refused without the data is refused before they are read, which may take long.

    Args:
        request: What identifies the run.
        is_recorded: Whether the data root comes from a run's record; it is then read and never written to.
        statistics: The mean and standard deviation in a record or a file of weights.
        table: How a recorded run read the columns of its table.
        **config_fields: Fields of `TrainConfig`; None takes the default of the data set.

    Returns:
        Data, model, method and threat model that fit together.

    Raises:
        UsageError: A part of the request is not accepted.
        DataError: The data are missing or damaged.
    """
    settings = {name: value for name, value in config_fields.items() if value is not None}
    data, data_root = split_data_root(name_path_kind(request.data), request.data_root)
    request = replace(request, data=data, data_root=None if data_root is None else str(data_root))
    for name, known in PREPROCESSING_CHOICES.items():
        if getattr(request, name) not in known:
            raise unknown_name_error(name, getattr(request, name), known)
    if request.init and is_pretrained_spec(request.init):
        kept_in = Path(request.data_root).expanduser() / "pretrained" if request.data_root else None
        request = replace(request, init=str(fetch_pretrained(request.init, kept_in, download=request.download)))
    if request.download:
        fetch_architecture(request.model)
    resolve_device(TrainConfig(**settings).device)
    method = get_method(request.method, rules=request.rules)
    named = read_requested_threat(request)
    if named is not None:
        configure_method(method, named, **request.method_options)
        check_method_on_threat(method, named)
    root, also = (None, request.data_root) if is_recorded else (request.data_root, None)
    corpus = load_data(
        request.data,
        root=root,
        fallback_root=also,
        download=request.download,
        size=request.size,
        n_train=request.n_train,
        table=table,
        **_reading(request),
    )
    check_method_on_task(method, corpus.task)
    threat = _resolve_threat(request, corpus)
    name = _default_model(corpus) if request.model == "auto" else request.model
    usual = {**DATASET_DEFAULTS.get(corpus.name, {}), **settings}
    if "lr" in usual and "lr" not in settings:
        usual["lr"] = get_default_lr(corpus.name, settings.get("optimizer", TrainConfig.optimizer))
    config = TrainConfig(**usual)
    tuned = configure_method(method, threat, **request.method_options)
    run = Run(request, config, corpus, threat, tuned, name, recorded=statistics)
    if not request.init or "lr" in settings:
        return run
    return replace(run, config=replace(config, lr=run.default_lr / FINE_TUNING_LR_DIVISOR))


def get_default_lr(data_name: str, optimizer: str) -> float:
    """Return the learning rate of training from random weights; those of data sets are for SGD, the default.

    Args:
        data_name: The name of the data set.
        optimizer: The name of the optimizer.

    Raises:
        UsageError: If there is no such optimizer.
    """
    usual = DATASET_DEFAULTS.get(data_name, {}).get("lr") if optimizer == TrainConfig.optimizer else None
    return float(usual or get_optimizer(optimizer).lr)


def _reading(request: Request) -> dict[str, Any]:
    """How the data are to be read, where the request says so."""
    return {name: value for name in ("task", "target") if (value := getattr(request, name)) is not None}


def read_requested_threat(request: Request, **features: Any) -> ThreatModel | None:
    """Read the threat model that a request names by `threat`, or by `norm` and `eps`; None where it leaves it to the data.

    Args:
        request: The request.
        **features: The box, scale and mutable features of the data.

    Raises:
        UsageError: It is not accepted, or named in both ways.
    """
    if request.threat is None:
        if request.threat_rule is not None:
            raise UsageError(
                f"the threat rule {request.threat_rule!r} is for several balls: add --threat, such as "
                "linf:8/255+l2:0.5+l1:12."
            )
        return None if request.eps is None else parse_threat(f"{request.norm or 'linf'}:{request.eps!r}", **features)
    if request.norm is not None or request.eps is not None:
        raise UsageError(
            f"threat {request.threat!r} names norm and radius: leave --norm and --eps out, or use them alone."
        )
    return parse_threat(request.threat, rule=request.threat_rule, **features)


def _resolve_threat(request: Request, splits: DataSplits) -> ThreatModel:
    if request.threat is not None and (threat := read_requested_threat(request, **splits.features)):
        check_radius(threat, splits.train.shape)
        return threat
    norm = (request.norm or splits.norm).lower()
    if request.eps is None and norm != splits.norm:
        raise UsageError(f"norm {norm!r} needs an eps of its own: {splits.name}'s default is for {splits.norm}.")
    eps = splits.eps if request.eps is None else parse_number(request.eps)
    threat = parse_threat(f"{norm}:{eps!r}", **splits.features)
    check_radius(threat, splits.train.shape)
    return threat


def _default_model(splits: DataSplits) -> str:
    shape, side = splits.train.shape, splits.train.shape[-1]
    if isinstance(splits.task, Segmentation):
        return "unet"
    if len(shape) < 3:
        return "mlp" if len(shape) == 1 else "audio_cnn"
    return "small" if side < 16 else "preact_resnet18" if side <= 96 else "resnet50"
