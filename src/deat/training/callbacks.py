"""Who may follow a training: those who are told of its epochs, and the one who keeps its state."""

import inspect
import math
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from deat.errors import UsageError
from deat.training.records import EpochStats, EpochTiming

if TYPE_CHECKING:
    from deat.training.trainer import Trainer


class Callback(Protocol):
    """Somebody who is told between epochs; there are no calls inside the batch loop."""

    def on_epoch(self, trainer: "Trainer", stats: EpochStats, timing: EpochTiming) -> None:
        """An epoch has ended and was recorded."""


class Checkpointer(Protocol):
    """Somebody who keeps a trainer's state where it survives the process; told when all callbacks have been."""

    def on_train_begin(self, trainer: "Trainer") -> None:
        """Training is about to begin or to go on."""

    def save_if_due(self, trainer: "Trainer", *, force: bool = False) -> None:
        """An epoch has ended, or, with now, training stops here."""


def check_callbacks(callbacks: Any) -> list[Callback]:
    """The callbacks, or the refusal of what could not be told of an epoch."""
    needed = "callbacks is a list of objects with a method on_epoch(trainer, stats, timing)"
    if not isinstance(callbacks, list | tuple):
        raise UsageError(f"callbacks is of type {type(callbacks).__name__}; {needed}.")
    for callback in callbacks:
        told = getattr(callback, "on_epoch", None)
        if isinstance(callback, type) or not callable(told):
            kind = f"the class {callback.__name__}" if isinstance(callback, type) else f"a {type(callback).__name__}"
            raise UsageError(f"a callback is {kind}, which has no on_epoch to call; {needed}.")
        if not _accepts_three_arguments(told):
            raise UsageError(f"on_epoch of a {type(callback).__name__} does not take three arguments; {needed}.")
    return list(callbacks)


def _accepts_three_arguments(told: Any) -> bool:
    try:
        inspect.signature(told).bind(None, None, None)
    except TypeError:
        return False
    except ValueError:  # of which Python does not know
        return True
    return True


WEIGHT_LAYER_TYPES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def log10_lipschitz(net: nn.Module) -> float:
    """log10 of the product of the convolution and linear layers' Frobenius norms, in one host read.

    Batch norm and shortcuts are left out, and a kernel's norm is not its convolution's: only the trend of
    this number means something.
    """
    weights: list[Tensor] = [m.weight.detach() for m in net.modules() if isinstance(m, WEIGHT_LAYER_TYPES)]
    if not weights:
        return 0.0
    norms = torch.stack([torch.linalg.vector_norm(w.float()) for w in weights]).double()
    return float(norms.clamp_min(1e-300).log().sum()) / math.log(10)
