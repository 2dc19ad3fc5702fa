"""The settings of a training run, checked before any work begins."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from deat.engine.engine import ENGINES
from deat.engine.precision import PRECISIONS
from deat.errors import UsageError, unknown_name_error
from deat.evaluation.attacks import parse_attack
from deat.training.lr_schedules import LR_SCHEDULES
from deat.training.named_optimizers import OPTIMIZER_SETTINGS, resolve_optimizer_settings
from deat.utils.numbers import check_int, check_number, convert_number_fields
from deat.utils.torch_contexts import choose_threads, use_threads

MAX_THREADS, MAX_EPOCHS = 1024, 100_000


RECORDED_NAMES = {"lr_schedule": "rate"}
"""Settings that run records, bench records and checkpoints have under another name."""
CURRENT_NAMES = {recorded: name for name, recorded in RECORDED_NAMES.items()}
OMITTED_IF_EQUAL = {
    "optimizer": "sgd",
    "betas": None,
    "ema": None,
    "clip_grad_norm": None,
    "label_smoothing": 0.0,
    "class_weights": None,
    "mixup": 0.0,
    "cutmix": 0.0,
    "random_erasing": 0.0,
}
"""Settings that records have only with another value than this one, since older records do not have them."""


def to_recorded_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Rename settings to the names that records use.

    Args:
        settings: Values by the names of TrainConfig; others are left as they are.

    Returns:
        The same values by their recorded names.
    """
    return {RECORDED_NAMES.get(name, name): value for name, value in settings.items()}


def from_recorded_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Rename recorded settings to the names of TrainConfig.

    Args:
        settings: Values by their recorded names.

    Returns:
        The same values by the names of TrainConfig.
    """
    return {CURRENT_NAMES.get(name, name): value for name, value in settings.items()}


@dataclass(frozen=True)
class TrainConfig:
    """How long, how fast and how exactly to train. None leaves a choice to the trainer.

    Args:
        epochs: Number of passes over the training set.
        batch_size: Images in a batch.
        optimizer: "sgd", "adam", "adamw", "nadam" or "rmsprop". `fit` also takes a function from parameters to an
            optimizer.
        lr: Highest learning rate; by default 0.1 for SGD, 0.002 for nadam, 0.001 for the others, or the learning rate
            of an optimizer of your own.
        lr_schedule: Shape of the learning rate over training: "cyclic" (a triangle that turns at `peak`), "multistep"
            (decays at `milestones`), "cosine" or "flat".
        milestones: Epochs at which the multistep schedule decays; by default 1/2 and 4/5 of training.
        peak: Fraction of training at which the cyclic schedule turns.
        cycle_momentum: Let the cyclic schedule lower the momentum by 0.1 while the learning rate rises.
        momentum: Momentum of sgd (by default 0.9) and rmsprop (0).
        betas: Decay rates of the averages of adam, adamw and nadam; by default (0.9, 0.999).
        weight_decay: Weight decay; by default 5e-4 for sgd, 0.01 for adamw and 0 for the others.
        precision: "fp32", "bf16" or "fp16"; "auto" is bf16 where the hardware is fast at it.
        engine: How moves run: "eager", "graph" (recorded as CUDA graphs) or "compile"; "auto" records on a GPU and
            compiles where that pays.
        device: "cpu", "cuda", "cuda:1", ...; "auto" is the first GPU where there is one.
        seed: Seed of every random draw.
        threads: CPU threads; by default one for small networks.
        workers: Processes that load a Dataset (by default 0) or decode images (by default up to 8).
        val_attack: Attack on held-out examples after every epoch; "none" switches validation off.
        deterministic: Compute the same bits every time on a GPU, at some cost in speed. A CPU always does.
        sync_bn: Take batch-norm statistics over all processes of a run.
        ema: Decay of an exponential moving average of the weights and of batch-norm statistics, such as 0.999. It is
            scored beside the weights after every epoch, and either may be the best. By default there is none.
        clip_grad_norm: Largest norm of the gradient with respect to all weights; a longer one is shortened to it before
            each update.
        label_smoothing: Share of each label that is spread over all classes, in the learner's loss alone: attacks keep
            the loss of the labels. TRADES and MART smooth their cross-entropy, not their divergence.
        class_weights: A weight of each class in the same loss, or "balanced": inversely proportional to how many
            training examples it has.
        mixup: Blend each two images of a batch by a share from Beta(mixup, mixup), such as 0.2.
        cutmix: Paste a rectangle of one image into another, of an area from Beta(cutmix, cutmix), such as 1.
        random_erasing: Share of training images in which a random rectangle is erased, such as 0.25.

    Raises:
        UsageError: If a value is not accepted.

    Example:
        >>> deat.TrainConfig(epochs=12, batch_size=64, lr=0.05, lr_schedule="cosine")
    """

    epochs: int = 30
    batch_size: int = 128
    lr: float | None = None
    lr_schedule: str = "cyclic"
    milestones: tuple[int, ...] | None = None
    peak: float = 0.5
    cycle_momentum: bool = True
    momentum: float | None = None
    weight_decay: float | None = None
    precision: str = "auto"
    engine: str = "auto"
    device: str = "auto"
    seed: int = 0
    threads: int | None = None
    workers: int | None = None
    val_attack: str = "cw-20"
    deterministic: bool = False
    sync_bn: bool = False
    optimizer: str = "sgd"
    betas: tuple[float, ...] | None = None
    ema: float | None = None
    clip_grad_norm: float | None = None
    label_smoothing: float = 0.0
    class_weights: tuple[float, ...] | str | None = None
    mixup: float = 0.0
    cutmix: float = 0.0
    random_erasing: float = 0.0

    def __post_init__(self) -> None:
        convert_number_fields(self)
        check_int("epochs", self.epochs, 1)
        if self.epochs > MAX_EPOCHS:
            raise UsageError(f"epochs must be at most {MAX_EPOCHS:,}, not {self.epochs:,}.")
        check_int("batch_size", self.batch_size, 1)
        check_int("seed", self.seed, 0)
        for name, value, least in (("workers", self.workers, 0), ("threads", self.threads, 1)):
            if value is not None:
                check_int(name, value, least)
                if value > MAX_THREADS:
                    raise UsageError(f"{name} must be at most {MAX_THREADS}, not {value}.")
        if self.lr is not None:
            check_number("lr", self.lr, lambda v: v > 0, "> 0, such as 0.1")
        check_number("peak", self.peak, lambda v: 0 < v < 1, "between 0 and 1, such as 0.5")
        self._resolve_optimizer_settings()
        if self.ema is not None:
            check_number("ema", self.ema, lambda v: 0 < v < 1, "between 0 and 1, such as 0.999")
        if self.clip_grad_norm is not None:
            check_number("clip_grad_norm", self.clip_grad_norm, lambda v: v > 0, "> 0, such as 1.0")
        check_number("label_smoothing", self.label_smoothing, lambda v: 0 <= v < 1, "from 0 to below 1, such as 0.1")
        check_number("mixup", self.mixup, lambda v: 0 <= v <= 100, "from 0 to 100, such as 0.2")
        check_number("cutmix", self.cutmix, lambda v: 0 <= v <= 100, "from 0 to 100, such as 1")
        check_number("random_erasing", self.random_erasing, lambda v: 0 <= v <= 1, "from 0 to 1, such as 0.25")
        _check_class_weights(self.class_weights)
        if not isinstance(self.milestones, tuple | list | None):
            raise UsageError(f"milestones must be epochs, such as (25, 40) or (25,), not {self.milestones!r}.")
        for milestone in self.milestones or ():
            check_int("milestones", milestone, 1)
        if self.lr_schedule not in LR_SCHEDULES:
            raise unknown_name_error("lr_schedule", self.lr_schedule, LR_SCHEDULES)
        if self.precision not in PRECISIONS:
            raise unknown_name_error("precision", self.precision, PRECISIONS)
        if self.engine not in ENGINES:
            raise unknown_name_error("engine", self.engine, ENGINES)
        if self.val_attack != "none":
            parse_attack(self.val_attack)

    def _resolve_optimizer_settings(self) -> None:
        """Give the optimizer's settings that are not given their usual values, and check all of them."""
        explicit = {name: getattr(self, name) for name in OPTIMIZER_SETTINGS}
        for name, value in resolve_optimizer_settings(self.optimizer, explicit).items():
            object.__setattr__(self, name, value)
        if self.momentum is not None:
            check_number("momentum", self.momentum, lambda v: 0 <= v < 1, "from 0 to below 1, such as 0.9")
        if self.weight_decay is not None:
            check_number("weight_decay", self.weight_decay, lambda v: v >= 0, ">= 0, such as 5e-4")
        if self.betas is None:
            return
        if not isinstance(self.betas, tuple | list) or len(self.betas) != 2:
            raise UsageError(f"betas must be two numbers, such as (0.9, 0.999), not {self.betas!r}.")
        for beta in self.betas:
            check_number("betas", beta, lambda v: 0 <= v < 1, "from 0 to below 1, such as 0.9 and 0.999")
        object.__setattr__(self, "betas", tuple(map(float, self.betas)))

    @property
    def optimizer_settings(self) -> dict[str, Any]:
        """The settings that the optimizer has, by name."""
        return {name: value for name in OPTIMIZER_SETTINGS if (value := getattr(self, name)) is not None}

    def describe(self) -> dict[str, Any]:
        """Return the settings under the names that records use.

        Returns:
            A dictionary that JSON can hold, for run records and checkpoints.
        """
        values = asdict(self)
        for name, usual in OMITTED_IF_EQUAL.items():
            if values[name] == usual:
                del values[name]
        return to_recorded_names(values)


def _check_class_weights(weights: Any) -> None:
    if weights is None or weights == "balanced":
        return
    if not isinstance(weights, tuple) or not weights:
        raise UsageError(
            f'class_weights must be one number for each class, as a tuple, or "balanced", not {weights!r}.'
        )
    for weight in weights:
        check_number("class_weights", weight, lambda v: v >= 0, 'numbers >= 0, or "balanced"')
    if not any(weights):
        raise UsageError(f"class_weights {weights!r} are all 0, so nothing would be learned. Make one of them > 0.")


def resolve_device(name: str) -> torch.device:
    """Return the device of a name.

    Args:
        name: Such as "cpu" or "cuda:1"; "auto" is the first GPU where there is one, and else the CPU.

    Returns:
        The device.

    Raises:
        UsageError: If the device is not available here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, dtype=torch.float64, device=device)  # the type of sums; Apple's GPUs do not have it
        torch.Generator(device)
    except (RuntimeError, AssertionError, ImportError, NotImplementedError, TypeError) as error:
        reason = str(error).split("\n")[0]
        available = "'cpu', 'cuda' or 'auto'" if torch.cuda.is_available() else "'cpu' or 'auto'"
        raise UsageError(f"device {name!r} is not available here ({reason}). Use {available}.") from None
    return device


def choose_num_threads(config: TrainConfig, model: nn.Module) -> int:
    """Return the number of CPU threads to use.

    Args:
        config: Settings of the training.
        model: Network that is trained.

    Returns:
        config.threads, or by default one for a small network and else what torch uses.
    """
    return config.threads or choose_threads(model)


@contextmanager
def torch_backend_flags(threads: int, *, cudnn_benchmark: bool, deterministic: bool) -> Iterator[None]:
    """Set torch's threads and backend flags inside a with block, and restore them afterwards.

    Args:
        threads: CPU threads.
        cudnn_benchmark: Search for the fastest convolutions, unless `deterministic` is set.
        deterministic: Use deterministic algorithms only.
    """
    before = torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()
    try:
        torch.backends.cudnn.benchmark = (before[0] or cudnn_benchmark) and not deterministic
        _use_deterministic_algorithms(before[1] or deterministic)
        with use_threads(threads):
            yield
    finally:
        torch.backends.cudnn.benchmark = before[0]
        _use_deterministic_algorithms(before[1])


def _use_deterministic_algorithms(wanted: bool) -> None:
    if wanted != torch.are_deterministic_algorithms_enabled():  # torch's function imports its compiler
        torch.use_deterministic_algorithms(wanted)
