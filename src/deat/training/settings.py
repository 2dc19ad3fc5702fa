"""The numbers of a training run, checked before any work begins."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from deat.errors import UsageError, unknown
from deat.evaluation.attacks import attack
from deat.game.engine import ENGINES, PRECISIONS
from deat.training.rates import RATES

MOST_THREADS, MOST_EPOCHS = 1024, 100_000


@dataclass(frozen=True)
class Settings:
    """How long, how fast and how exactly to train. None leaves a choice to the trainer.

    rate is the learning rate's shape over training; milestones are the epochs at which the multistep one decays (by
    default 1/2 and 4/5 of them), peak is where the cyclic one turns, and cycle_momentum moves the momentum against it
    by a tenth. workers are processes that load a Dataset (0) or decode images (up to 8).
    deterministic makes a GPU give the same bits every time, at some cost in speed; a CPU does so anyway.
    val_attack "none" switches validation off. sync_bn takes batch-norm statistics over all processes of a run.
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
        _whole("epochs", self.epochs, 1)
        if self.epochs > MOST_EPOCHS:
            raise UsageError(f"epochs must be at most {MOST_EPOCHS:,}, not {self.epochs:,}.")
        _whole("batch_size", self.batch_size, 1)
        _whole("seed", self.seed, 0)
        if self.workers is not None:
            _whole("workers", self.workers, 0)
        if self.threads is not None:
            _whole("threads", self.threads, 1)
            if self.threads > MOST_THREADS:
                raise UsageError(f"threads must be at most {MOST_THREADS}, not {self.threads}.")
        if self.lr is not None:
            _within("lr", self.lr, 0, math.inf, "> 0, such as 0.1")
        _within("peak", self.peak, 0, 1, "between 0 and 1, such as 0.5")
        _within("momentum", self.momentum, -1e-9, 1, "from 0 to below 1, such as 0.9")
        _within("weight_decay", self.weight_decay, -1e-12, math.inf, ">= 0, such as 5e-4")
        for milestone in self.milestones or ():
            _whole("milestones", milestone, 1)
        if self.rate not in RATES:
            raise unknown("learning-rate schedule", self.rate, RATES)
        if self.precision not in PRECISIONS:
            raise unknown("precision", self.precision, PRECISIONS)
        if self.engine not in ENGINES:
            raise unknown("engine", self.engine, ENGINES)
        if self.val_attack != "none":
            attack(self.val_attack)


def find_device(name: str) -> torch.device:
    """The device of that name; "auto" is the first GPU where there is one. A missing one is an error."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError, NotImplementedError) as error:
        reason = str(error).split("\n")[0]
        there = "'cpu', 'cuda' or 'auto'" if torch.cuda.is_available() else "'cpu' or 'auto'"
        raise UsageError(f"device {name!r} is not available here ({reason}). Use {there}.") from None
    return device


def _whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name} must be a whole number >= {least}, not {value!r}.")


def _within(name: str, value: Any, low: float, high: float, text: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low < value < high:
        raise UsageError(f"{name} must be a number {text}, not {value!r}.")
