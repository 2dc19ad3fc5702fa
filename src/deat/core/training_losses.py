"""The training losses, and the module of network and loss that DDP and torch.compile wrap."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from torch import Tensor, nn

from deat.core.loss_terms import boosted_cross_entropy, cross_entropy, kl_divergence, mart_regulariser


class LossOutput(NamedTuple):
    """The result of a loss on one batch.

    Attributes:
        loss: The mean over the batch.
        logits_adv: The logits at x + delta.
    """

    loss: Tensor
    logits_adv: Tensor


ObjectiveFunction = Callable[[Tensor, Tensor, Tensor], LossOutput]
"""An objective as a function of (x, delta, y): the module itself, compiled, or with half-precision weights."""


class TrainingLoss(Protocol):
    """A training loss. Frozen dataclasses are described in full in run.json.

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
            The mean loss and the logits at x + delta.
        """


@dataclass(frozen=True)
class CrossEntropy:
    """The cross-entropy at x + delta (Madry et al. 2018)."""

    num_forwards: ClassVar[int] = 1

    def __call__(self, net: nn.Module, x: Tensor, delta: Tensor, y: Tensor) -> LossOutput:
        """Compute the mean of CE(x + delta, y)."""
        logits = net(x + delta)
        return LossOutput(cross_entropy(logits, y).mean(), logits)


@dataclass(frozen=True)
class Trades:
    """The loss of TRADES (Zhang et al. 2019): CE(x, y) + beta * KL(p(x) || p(x + delta)).

    The gradient flows through both forward passes.

    Args:
        beta: The weight of the divergence.
    """

    beta: float = 6.0
    num_forwards: ClassVar[int] = 2

    def __call__(self, net: nn.Module, x: Tensor, delta: Tensor, y: Tensor) -> LossOutput:
        """Compute the mean of CE(x, y) + beta * KL(p(x) || p(x + delta))."""
        clean, adv = net(x), net(x + delta)
        return LossOutput((cross_entropy(clean, y) + self.beta * kl_divergence(clean, adv)).mean(), adv)


@dataclass(frozen=True)
class Mart:
    """The loss of MART (Wang et al. 2020): BCE(x + delta, y) + beta * KL(p(x) || p(x + delta)) * (1 - p_y(x)).

    BCE is the boosted cross-entropy, see `boosted_cross_entropy`.

    Args:
        beta: The weight of the divergence.
    """

    beta: float = 6.0
    num_forwards: ClassVar[int] = 2

    def __call__(self, net: nn.Module, x: Tensor, delta: Tensor, y: Tensor) -> LossOutput:
        """Compute the mean of BCE(x + delta, y) + beta * KL * (1 - p_y(x))."""
        clean, adv = net(x), net(x + delta)
        return LossOutput((boosted_cross_entropy(adv, y) + self.beta * mart_regulariser(clean, adv, y)).mean(), adv)


class Objective(nn.Module):
    """A network together with its training loss, as one module.

    Args:
        net: The network.
        loss: The training loss.

    Example:
        >>> objective = deat.Objective(net, deat.Trades(beta=6.0))
        >>> objective(x, delta, y).loss.backward()
    """

    def __init__(self, net: nn.Module, loss: TrainingLoss) -> None:
        super().__init__()
        self.net = net
        self.loss = loss

    def forward(self, x: Tensor, delta: Tensor, y: Tensor) -> LossOutput:
        """Compute the loss on one batch; the arguments are those of the loss."""
        return self.loss(self.net, x, delta, y)
