"""The numbers of a training run, checked before any work begins."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from deat.engine.precision import ENGINES, PRECISIONS
from deat.errors import UsageError, unknown_name_error
from deat.evaluation.attacks import parse_attack
from deat.training.lr_schedules import LR_SCHEDULES
from deat.utils.numbers import check_int, check_number, convert_number_fields
from deat.utils.torch_utils import choose_threads, use_threads

MAX_THREADS, MAX_EPOCHS = 1024, 100_000


@dataclass(frozen=True)
class TrainConfig:
    """How long, how fast and how exactly to train. None leaves a choice to the trainer.

    lr is the highest learning rate (0.1, or that of an optimizer of one's own) and rate its shape over training:
    cyclic, multistep, cosine or flat. milestones are the epochs at which the multistep one decays (by default 1/2 and
    4/5 of them), peak is where the cyclic one turns, and cycle_momentum moves the momentum against it by a tenth.
    val_attack is what held-out images are attacked by after every epoch; "none" switches validation off. workers are
    processes that load a Dataset (0) or decode images (up to 8). deterministic makes a GPU give the same bits every
    time, at some cost in speed; a CPU does so anyway. sync_bn takes batch-norm statistics over all processes of a run.
    """

    epochs: int = 30
    batch_size: int = 128
    lr: float | None = None
    rate: str = "cyclic"
    milestones: tuple[int, ...] | None = None
    peak: float = 0.5
    cycle_momentum: bool = True
    momentum: float = 0.9
    weight_decay: float = 5e-4
    precision: str = "auto"
    engine: str = "auto"
    device: str = "auto"
    seed: int = 0
    threads: int | None = None
    workers: int | None = None
    val_attack: str = "cw-20"
    deterministic: bool = False
    sync_bn: bool = False

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
        check_number("momentum", self.momentum, lambda v: 0 <= v < 1, "from 0 to below 1, such as 0.9")
        check_number("weight_decay", self.weight_decay, lambda v: v >= 0, ">= 0, such as 5e-4")
        if not isinstance(self.milestones, tuple | list | None):
            raise UsageError(f"milestones must be epochs, such as (25, 40) or (25,), not {self.milestones!r}.")
        for milestone in self.milestones or ():
            check_int("milestones", milestone, 1)
        if self.rate not in LR_SCHEDULES:
            raise unknown_name_error("learning-rate schedule", self.rate, LR_SCHEDULES)
        if self.precision not in PRECISIONS:
            raise unknown_name_error("precision", self.precision, PRECISIONS)
        if self.engine not in ENGINES:
            raise unknown_name_error("engine", self.engine, ENGINES)
        if self.val_attack != "none":
            parse_attack(self.val_attack)


def resolve_device(name: str) -> torch.device:
    """The device of that name; "auto" is the first GPU where there is one. A missing one is an error."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, dtype=torch.float64, device=device)  # which sums are kept in; Apple's GPUs have none
        torch.Generator(device)
    except (RuntimeError, AssertionError, ImportError, NotImplementedError, TypeError) as error:
        reason = str(error).split("\n")[0]
        there = "'cpu', 'cuda' or 'auto'" if torch.cuda.is_available() else "'cpu' or 'auto'"
        raise UsageError(f"device {name!r} is not available here ({reason}). Use {there}.") from None
    return device


def choose_num_threads(config: TrainConfig, model: nn.Module) -> int:
    """The threads that a network computes with: those asked for, or as many as do one of its size good."""
    return config.threads or choose_threads(model)


@contextmanager
def torch_backend_flags(threads: int, *, cudnn_benchmark: bool, deterministic: bool) -> Iterator[None]:
    """Inside: so many threads, a search for the fastest convolutions, and the same bits every time, as asked for."""
    before = torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()
    try:
        torch.backends.cudnn.benchmark = (before[0] or cudnn_benchmark) and not deterministic
        torch.use_deterministic_algorithms(before[1] or deterministic)
        with use_threads(threads):
            yield
    finally:
        torch.backends.cudnn.benchmark = before[0]
        torch.use_deterministic_algorithms(before[1])
