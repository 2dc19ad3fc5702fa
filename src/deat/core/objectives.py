"""What the learner minimises: losses of (net, x, delta, y), and the module that DDP and compile wrap."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from torch import Tensor, nn

from deat.core.losses import boosted_cross_entropy, cross_entropy, kl_divergence, mart_regulariser


class LossOutput(NamedTuple):
    """What a move asks the network for: the batch-mean loss and the logits at x + delta."""

    loss: Tensor
    logits_adv: Tensor


ObjectiveFunction = Callable[[Tensor, Tensor, Tensor], LossOutput]
"""An objective as a function of (x, delta, y): the module itself, compiled, or with halved weights."""


class TrainingLoss(Protocol):
    """A training loss as frozen data; `branches` is how many forwards (and backwards) it executes."""

    num_forwards: ClassVar[int]

    def __call__(self, net: nn.Module, x: Tensor, delta: Tensor, y: Tensor) -> LossOutput:
        """The outcome of a joint move on one batch."""


@dataclass(frozen=True)
class CrossEntropy:
    """Madry et al.: the cross-entropy at x + delta."""

    num_forwards: ClassVar[int] = 1

    def __call__(self, net: nn.Module, x: Tensor, delta: Tensor, y: Tensor) -> LossOutput:
        """mean CE(x + delta, y)."""
        logits = net(x + delta)
        return LossOutput(cross_entropy(logits, y).mean(), logits)


@dataclass(frozen=True)
class Trades:
    """Zhang et al. 2019: CE(x) + beta * KL(p(x) || p(x + delta)); the gradient flows into both branches."""

    beta: float = 6.0
    num_forwards: ClassVar[int] = 2

    def __call__(self, net: nn.Module, x: Tensor, delta: Tensor, y: Tensor) -> LossOutput:
        """mean CE(x, y) + beta * KL."""
        clean, adv = net(x), net(x + delta)
        return LossOutput((cross_entropy(clean, y) + self.beta * kl_divergence(clean, adv)).mean(), adv)


@dataclass(frozen=True)
class Mart:
    """Wang et al. 2020: boosted CE at x + delta, and a KL weighted by how unsure the clean answer is."""

    beta: float = 6.0
    num_forwards: ClassVar[int] = 2

    def __call__(self, net: nn.Module, x: Tensor, delta: Tensor, y: Tensor) -> LossOutput:
        """mean BCE(x + delta, y) + beta * KL * (1 - p_y(x))."""
        clean, adv = net(x), net(x + delta)
        return LossOutput((boosted_cross_entropy(adv, y) + self.beta * mart_regulariser(clean, adv, y)).mean(), adv)


class Objective(nn.Module):
    """A network together with the loss it is trained by."""

    def __init__(self, net: nn.Module, loss: TrainingLoss) -> None:
        super().__init__()
        self.net = net
        self.loss = loss

    def forward(self, x: Tensor, delta: Tensor, y: Tensor) -> LossOutput:
        """The loss's outcome on one batch."""
        return self.loss(self.net, x, delta, y)
