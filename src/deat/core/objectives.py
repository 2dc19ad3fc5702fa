"""What the learner minimises: losses of (net, x, delta, y), and the module that DDP and compile wrap."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from torch import Tensor, nn

from deat.core.losses import boosted_cross_entropy, cross_entropy, kl, mart_regulariser


class Outcome(NamedTuple):
    """What a move asks the network for: the batch-mean loss and the logits at x + delta."""

    loss: Tensor
    logits_adv: Tensor


ObjectiveCall = Callable[[Tensor, Tensor, Tensor], Outcome]
"""An objective as a function of (x, delta, y): the module itself, compiled, or with halved weights."""


class Loss(Protocol):
    """A training loss as frozen data; `branches` is how many forwards (and backwards) it executes."""

    branches: ClassVar[int]

    def __call__(self, net: nn.Module, x: Tensor, delta: Tensor, y: Tensor) -> Outcome:
        """The outcome of a joint move on one batch."""


@dataclass(frozen=True)
class CrossEntropy:
    """Madry et al.: the cross-entropy at x + delta."""

    branches: ClassVar[int] = 1

    def __call__(self, net: nn.Module, x: Tensor, delta: Tensor, y: Tensor) -> Outcome:
        """mean CE(x + delta, y)."""
        logits = net(x + delta)
        return Outcome(cross_entropy(logits, y).mean(), logits)


@dataclass(frozen=True)
class Trades:
    """Zhang et al. 2019: CE(x) + beta * KL(p(x) || p(x + delta)); the gradient flows into both branches."""

    beta: float = 6.0
    branches: ClassVar[int] = 2

    def __call__(self, net: nn.Module, x: Tensor, delta: Tensor, y: Tensor) -> Outcome:
        """mean CE(x, y) + beta * KL."""
        clean, adv = net(x), net(x + delta)
        return Outcome((cross_entropy(clean, y) + self.beta * kl(clean, adv)).mean(), adv)


@dataclass(frozen=True)
class Mart:
    """Wang et al. 2020: boosted CE at x + delta, and a KL weighted by how unsure the clean answer is."""

    beta: float = 6.0
    branches: ClassVar[int] = 2

    def __call__(self, net: nn.Module, x: Tensor, delta: Tensor, y: Tensor) -> Outcome:
        """mean BCE(x + delta, y) + beta * KL * (1 - p_y(x))."""
        clean, adv = net(x), net(x + delta)
        return Outcome((boosted_cross_entropy(adv, y) + self.beta * mart_regulariser(clean, adv, y)).mean(), adv)


class Objective(nn.Module):
    """A network together with the loss it is trained by."""

    def __init__(self, net: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.net = net
        self.loss = loss

    def forward(self, x: Tensor, delta: Tensor, y: Tensor) -> Outcome:
        """The loss's outcome on one batch."""
        return self.loss(self.net, x, delta, y)
