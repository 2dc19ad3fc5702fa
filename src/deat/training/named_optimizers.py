"""Optimizers by name, each with the settings that it takes and their usual values."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import unwrap
from typing import Any

import torch

from deat.errors import UsageError, unknown_name_error


@dataclass(frozen=True)
class NamedOptimizer:
    """An optimizer that `TrainConfig.optimizer` can name.

    Attributes:
        build: Makes it of parameters, lr and its settings.
        lr: The learning rate where none is given.
        settings: The fields of TrainConfig that it takes, with the values where none are given.
        can_record: Whether a GPU can record its step in a CUDA graph.
    """

    build: Callable[..., torch.optim.Optimizer]
    lr: float
    settings: Mapping[str, Any]
    can_record: bool = False


class _WithoutCompiler(torch.optim.Optimizer):
    """An optimizer of torch that does not import torch's compiler, which takes seconds.

    torch wraps these methods so that its compiler leaves them out, and the first call of any of them imports it. The
    arithmetic is the same. Subclasses keep torch's names, which checkpoints record.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the weights."""
        return unwrap(super().step)(self, closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        unwrap(super().zero_grad)(self, set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters."""
        unwrap(super().add_param_group)(self, param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        state: dict[str, Any] = unwrap(super().state_dict)(self)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state."""
        unwrap(super().load_state_dict)(self, state_dict)


class SGD(_WithoutCompiler, torch.optim.SGD):
    """torch.optim.SGD."""


class Adam(_WithoutCompiler, torch.optim.Adam):
    """torch.optim.Adam."""


class AdamW(_WithoutCompiler, torch.optim.AdamW):
    """torch.optim.AdamW."""


class NAdam(_WithoutCompiler, torch.optim.NAdam):
    """torch.optim.NAdam."""


class RMSprop(_WithoutCompiler, torch.optim.RMSprop):
    """torch.optim.RMSprop."""


OPTIMIZERS: dict[str, NamedOptimizer] = {
    "sgd": NamedOptimizer(
        partial(SGD, fused=True),
        0.1,
        {"momentum": 0.9, "weight_decay": 5e-4},
        can_record=True,
    ),
    "adam": NamedOptimizer(Adam, 1e-3, {"betas": (0.9, 0.999), "weight_decay": 0.0}),
    "adamw": NamedOptimizer(AdamW, 1e-3, {"betas": (0.9, 0.999), "weight_decay": 0.01}),
    "nadam": NamedOptimizer(NAdam, 2e-3, {"betas": (0.9, 0.999), "weight_decay": 0.0}),
    "rmsprop": NamedOptimizer(RMSprop, 1e-3, {"momentum": 0.0, "weight_decay": 0.0}),
}
"""The optimizers by name. SGD has the paper's settings, the others those of torch, RMSprop a smaller learning rate."""
OPTIMIZER_SETTINGS = tuple(dict.fromkeys(name for known in OPTIMIZERS.values() for name in known.settings))
"""Every setting that some optimizer takes."""


def get_optimizer(name: str) -> NamedOptimizer:
    """Return the optimizer of a name.

    Raises:
        UsageError: If no optimizer has this name.
    """
    if name not in OPTIMIZERS:
        raise unknown_name_error(
            "optimizer",
            name,
            OPTIMIZERS,
            "In Python: fit(optimizer=lambda params: torch.optim.Adagrad(params, lr=0.01)).",
        )
    return OPTIMIZERS[name]


def resolve_optimizer_settings(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a named optimizer.

    Args:
        name: The optimizer's name.
        given: Values of `OPTIMIZER_SETTINGS`; None for those that are not given.

    Returns:
        The values that apply; None for settings that this optimizer does not have.

    Raises:
        UsageError: If there is no such optimizer, or it does not have a setting that is given.
    """
    known = get_optimizer(name).settings
    for setting, value in given.items():
        if value is not None and setting not in known:
            others = " and ".join(other for other, optimizer in OPTIMIZERS.items() if setting in optimizer.settings)
            raise UsageError(
                f"{setting}={value!r} is a setting of {others}, and not of {name}, which takes {', '.join(known)}. "
                f"Omit {setting}, or choose another optimizer."
            )
    return {setting: known.get(setting) if value is None else value for setting, value in given.items()}
