"""The word each family spells with the moves A and J; its length is its cost in backprops."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from deat.core.buffers import Budget, Round
from deat.core.first_layer import FirstLayer
from deat.core.moves import Game


class Play(Protocol):
    """How one minibatch is played.

    crafts says that delta is finished before theta first moves, which is what M+ stretches its step for and
    F+ needs. records says that its moves may be CUDA graphs.
    """

    crafts: ClassVar[bool]
    records: ClassVar[bool]

    def __call__(self, game: Game, x: Tensor, y: Tensor, budget: Budget) -> None:
        """Play one minibatch."""

    def backprops(self, budget: Budget) -> int:
        """The exact cost of one minibatch."""


@dataclass(frozen=True)
class Craft:
    """A^k J: craft an adversarial example, then update. PGD-k, U-FGSM, TRADES, MART, FAT, Amata, DAT."""

    crafts: ClassVar[bool] = True
    records: ClassVar[bool] = True

    def __call__(self, game: Game, x: Tensor, y: Tensor, budget: Budget) -> None:
        """k ascents, one joint move."""
        r = game.open(x, y, budget)
        for _ in range(budget.k):
            game.ascend(r)
        game.joint(r)
        game.close(r)

    def backprops(self, budget: Budget) -> int:
        """k ascents and one joint move."""
        return budget.k + 1


@dataclass(frozen=True)
class Replay:
    """J^(k+1): every pass updates both delta and theta. FREE-m (m = k + 1), DEAT."""

    crafts: ClassVar[bool] = False
    records: ClassVar[bool] = True

    def __call__(self, game: Game, x: Tensor, y: Tensor, budget: Budget) -> None:
        """k + 1 joint moves, delta stepping between them."""
        r = game.open(x, y, budget)
        for _ in range(budget.k):
            game.joint(r)
            game.step(r)
        game.joint(r)
        if game.ascent.persistent and budget.k:
            game.step(r)  # nobody looks at the last delta unless it is carried over
        game.close(r)

    def backprops(self, budget: Budget) -> int:
        """k + 1 joint moves."""
        return budget.k + 1


@dataclass(frozen=True)
class Relay:
    """(J0 a^n)^k J, theta stepping once, on the summed gradients. YOPO-m-n (m = k + 1).

    Steps of delta after the last full pass would go unseen, so they are not taken.
    """

    inner: int = 3
    crafts: ClassVar[bool] = False
    records: ClassVar[bool] = True

    def __call__(self, game: Game, x: Tensor, y: Tensor, budget: Budget) -> None:
        """k + 1 full passes, each but the last followed by first-layer steps."""
        r = game.open(x, y, budget)
        layer = game.first_layer(r)
        for _ in range(budget.k):
            game.accumulate(r, partial(self._pass_and_steps, game, layer))
        game.joint(r)
        game.close(r)

    def backprops(self, budget: Budget) -> int:
        """k + 1 full passes; first-layer steps are not counted, as in the paper."""
        return budget.k + 1

    def _pass_and_steps(self, game: Game, layer: FirstLayer, r: Round) -> None:
        """J0 a^n."""
        costates = _joint_with_costates(game, r, layer)
        game.step_delta(r)  # the full pass has just taken the gradient of the first step
        for _ in range(self.inner - 1):
            r.grad.copy_(_costate_gradient(game, r, layer, costates))
            game.step_delta(r)


def _joint_with_costates(game: Game, r: Round, layer: FirstLayer) -> list[Tensor]:
    """J0: accumulate theta's gradient, and the loss's gradient by the first layer's outputs."""
    probes = [probe for probe in layer.probes[r] if probe is not None]
    for probe in probes:
        probe.grad = None
    game.take_both_gradients(r, layer)
    return [probe.grad for probe in probes if probe.grad is not None]


def _costate_gradient(game: Game, r: Round, layer: FirstLayer, costates: list[Tensor]) -> Tensor:
    """a: the gradient of <costate, first layer(x + delta)> by delta."""
    delta = r.delta.detach().requires_grad_()
    with game.engine.autocast():
        outputs = game.runner.first_outputs(r, delta, layer)
    (grad,) = torch.autograd.grad(outputs, delta, grad_outputs=costates)
    return game.engine.unscale(grad, game.mean_over(r))
