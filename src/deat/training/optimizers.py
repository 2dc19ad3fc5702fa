"""The learner's optimiser, and the hand that sets its learning rate before every batch."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from deat.training.rates import rate
from deat.training.settings import Settings

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
DEFAULT_LR = 0.1


def sgd(settings: Settings) -> OptimizerFactory:
    """SGD with momentum and weight decay on all parameters, as every method of the paper uses it."""

    def build(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            parameters,
            lr=settings.lr or DEFAULT_LR,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    return build


class Steering:
    """Sets learning rate and momentum once a batch. Groups keep the ratio of their learning rates."""

    def __init__(self, optimizer: torch.optim.Optimizer, settings: Settings, total: int) -> None:
        self.optimizer, self.total = optimizer, total
        groups = optimizer.param_groups
        self.base = float(groups[0]["lr"])
        self.ratios = [float(group["lr"]) / self.base for group in groups]
        high = float(groups[0].get("momentum", 0.0))
        cycles = settings.cycle_momentum and all("momentum" in group for group in groups)
        self.rate = rate(
            settings.rate,
            settings.lr or self.base,
            settings.epochs,
            peak=settings.peak,
            momentum=(high, max(0.0, high - 0.1)) if cycles else None,
        )
        self.lr = 0.0

    def at(self, step: int) -> None:
        """Set the rates for a batch."""
        self.lr, momentum = self.rate.at(step, self.total)
        # Asked anew every time: an optimiser that loads its state replaces its groups.
        for group, ratio in zip(self.optimizer.param_groups, self.ratios, strict=True):
            group["lr"] = self.lr * ratio
            if momentum is not None:
                group["momentum"] = momentum
