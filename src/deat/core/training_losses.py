"""The training losses, and the module of network and loss that DDP and torch.compile wrap."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from deat.errors import UsageError
from deat.tasks import CLASSIFICATION, Task
from deat.utils.user_code import accepts_argument


class LossOutput(NamedTuple):
    """The result of a loss on one batch.

    Attributes:
        loss: The mean over the batch.
        logits_adv: The outputs at x + delta.
    """

    loss: Tensor
    logits_adv: Tensor


class PenalisedOutput(NamedTuple):
    """The result of a loss with a penalty on one batch.

    Attributes:
        loss: The mean over the batch, with the penalty.
        logits_adv: The outputs at x + delta.
        input_grad: The gradient with respect to delta of the mean without the penalty; None if the penalty does not
            depend on delta.
    """

    loss: Tensor
    logits_adv: Tensor
    input_grad: Tensor | None


ObjectiveFunction = Callable[..., LossOutput]
"""An objective as a function of (x, delta, y) and the optional arguments of `Objective.forward`: the module itself,
compiled, or with half-precision weights."""


Penalty = Callable[..., PenalisedOutput]
"""What adds to a training loss, as a function of (loss, net, x, delta, y, task)."""


class TrainingLoss(Protocol):
    """A training loss. Frozen dataclasses are described in full in run.json.

    A loss with a parameter called `task` receives the task, and names what it takes from it in `requires`; it can then
    be used with every task that defines these. A loss without the parameter reads outputs and labels itself. A loss
    with a parameter called `start` receives the perturbation that the batch started from.

    Attributes:
        num_forwards: How many forward (and backward) passes of the network it executes.
    """

    num_forwards: ClassVar[int]

    def __call__(self, net: nn.Module, x: Tensor, delta: Tensor, y: Tensor) -> LossOutput:
        """Compute the loss on one batch.

        Args:
            net: The network.
            x: The images.
            delta: The perturbation.
            y: The labels.

        Returns:
            The mean loss and the outputs at x + delta.
        """


@dataclass(frozen=True)
class CrossEntropy:
    """The task's loss at x + delta: the cross-entropy (Madry et al. 2018), or the squared error of a regression."""

    num_forwards: ClassVar[int] = 1
    requires: ClassVar[tuple[str, ...]] = ("loss",)

    def __call__(self, net: nn.Module, x: Tensor, delta: Tensor, y: Tensor, task: Task = CLASSIFICATION) -> LossOutput:
        """Compute the mean of CE(x + delta, y)."""
        outputs = net(x + delta)
        return LossOutput(task.loss(outputs, y).mean(), outputs)


@dataclass(frozen=True)
class Trades:
    """The loss of TRADES (Zhang et al. 2019): CE(x, y) + beta * KL(p(x) || p(x + delta)).

    CE and KL are the loss and the divergence of the task. The gradient flows through both forward passes.

    Args:
        beta: The weight of the divergence.
    """

    beta: float = 6.0
    num_forwards: ClassVar[int] = 2
    requires: ClassVar[tuple[str, ...]] = ("loss", "divergence")

    def __call__(self, net: nn.Module, x: Tensor, delta: Tensor, y: Tensor, task: Task = CLASSIFICATION) -> LossOutput:
        """Compute the mean of CE(x, y) + beta * KL(p(x) || p(x + delta))."""
        clean, adv = net(x), net(x + delta)
        return LossOutput((task.loss(clean, y) + self.beta * task.divergence(clean, adv)).mean(), adv)


@dataclass(frozen=True)
class Mart:
    """The loss of MART (Wang et al. 2020): BCE(x + delta, y) + beta * KL(p(x) || p(x + delta)) * (1 - p_y(x)).

    BCE is the boosted cross-entropy, see `boosted_cross_entropy`. A task needs classes for it.

    Args:
        beta: The weight of the divergence.
    """

    beta: float = 6.0
    num_forwards: ClassVar[int] = 2
    requires: ClassVar[tuple[str, ...]] = ("boosted_loss", "weighted_divergence")

    def __call__(self, net: nn.Module, x: Tensor, delta: Tensor, y: Tensor, task: Task = CLASSIFICATION) -> LossOutput:
        """Compute the mean of BCE(x + delta, y) + beta * KL * (1 - p_y(x))."""
        clean, adv = net(x), net(x + delta)
        return LossOutput((task.boosted_loss(adv, y) + self.beta * task.weighted_divergence(clean, adv, y)).mean(), adv)


@dataclass(frozen=True)
class StartConsistency:
    """The loss of FGSM-PGI (Jia et al. 2022): CE(x + delta, y) + beta * |z(x + delta) - z(x + start)|^2 / n.

    CE is the loss of the task, z the n outputs of the network for an example, and start the perturbation that the
    attack started from. The gradient flows through both forward passes.

    Args:
        beta: The weight of the difference.
    """

    beta: float = 10.0
    num_forwards: ClassVar[int] = 2
    requires: ClassVar[tuple[str, ...]] = ("loss",)

    def __call__(
        self,
        net: nn.Module,
        x: Tensor,
        delta: Tensor,
        y: Tensor,
        task: Task = CLASSIFICATION,
        start: Tensor | None = None,
    ) -> LossOutput:
        """Compute the mean of CE(x + delta, y) + beta * |z(x + delta) - z(x + start)|^2 / n.

        Raises:
            UsageError: The play does not say where the perturbation started.
        """
        if start is None:
            raise UsageError("this loss compares outputs with those at delta's start, which yopo's moves do not give.")
        before, adv = net(x + start), net(x + delta)
        change = (adv - before).flatten(1)
        if change.dtype in (torch.float16, torch.bfloat16):
            change = change.float()
        return LossOutput(task.loss(adv, y).mean() + self.beta * change.square().mean(), adv)


class Objective(nn.Module):
    """A network together with its training loss, as one module.

    Args:
        net: The network.
        loss: The training loss.
        task: What outputs and labels mean.
        learner_task: The task whose losses are minimised, where options of training change them; `task` by default.

    Attributes:
        needs_start: Whether the loss has a parameter `start`.

    Example:
        >>> objective = deat.Objective(net, deat.Trades(beta=6.0))
        >>> objective(x, delta, y).loss.backward()
    """

    def __init__(
        self, net: nn.Module, loss: TrainingLoss, task: Task = CLASSIFICATION, learner_task: Task | None = None
    ) -> None:
        super().__init__()
        self.net = net
        self.loss = loss
        self.task = task
        self.needs_start = accepts_argument(loss, "start")
        self._options: dict[str, Task] = {"task": learner_task or task} if accepts_argument(loss, "task") else {}

    def forward(
        self, x: Tensor, delta: Tensor, y: Tensor, penalty: Penalty | None = None, start: Tensor | None = None
    ) -> LossOutput | PenalisedOutput:
        """Compute the loss on one batch; the arguments are those of the loss, and a penalty to be added to it."""
        loss: Callable[..., LossOutput] = self.loss
        options: dict[str, Any] = {**self._options, **({"start": start} if self.needs_start else {})}
        if penalty is not None:
            return penalty(partial(loss, **options), self.net, x, delta, y, self.task)
        return loss(self.net, x, delta, y, **options)
