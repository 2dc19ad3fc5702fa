"""The word each family spells with the moves A and J; its length is its cost in backprops."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from deat.core.buffers import Budget, Buffers
from deat.core.first_layer import FirstLayer
from deat.core.moves import Game


class Play(Protocol):
    """How one minibatch is played.

    crafts says that delta is finished before theta first moves, which is what M+ stretches its step for and
    F+ needs. records says that its moves may be CUDA graphs.
    """

    crafts_first: ClassVar[bool]
    records: ClassVar[bool]

    def __call__(self, game: Game, x: Tensor, y: Tensor, budget: Budget) -> None:
        """Play one minibatch."""

    def backprops(self, budget: Budget) -> int:
        """The exact cost of one minibatch."""


@dataclass(frozen=True)
class Craft:
    """A^k J: craft an adversarial example, then update. PGD-k, U-FGSM, TRADES, MART, FAT, Amata, DAT."""

    crafts_first: ClassVar[bool] = True
    records: ClassVar[bool] = True

    def __call__(self, game: Game, x: Tensor, y: Tensor, budget: Budget) -> None:
        """k ascents, one joint move."""
        r = game.open(x, y, budget)
        for _ in range(budget.k):
            game.ascend(r)
        game.joint_update(r)
        game.close(r)

    def backprops(self, budget: Budget) -> int:
        """k ascents and one joint move."""
        return budget.k + 1


@dataclass(frozen=True)
class Replay:
    """J^(k+1): every pass updates both delta and theta. FREE-m (m = k + 1), DEAT."""

    crafts_first: ClassVar[bool] = False
    records: ClassVar[bool] = True

    def __call__(self, game: Game, x: Tensor, y: Tensor, budget: Budget) -> None:
        """k + 1 joint moves, delta stepping between them."""
        r = game.open(x, y, budget)
        for _ in range(budget.k):
            game.joint_update(r)
            game.step(r)
        game.joint_update(r)
        if game.attack.persistent and budget.k:
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
    crafts_first: ClassVar[bool] = False
    records: ClassVar[bool] = True

    def __call__(self, game: Game, x: Tensor, y: Tensor, budget: Budget) -> None:
        """k + 1 full passes, each but the last followed by first-layer steps."""
        r = game.open(x, y, budget)
        layer = game.first_layer(r)
        for _ in range(budget.k):
            game.accumulate_gradients(r, partial(self._full_pass_and_first_layer_steps, game, layer))
        game.joint_update(r)
        game.close(r)

    def backprops(self, budget: Budget) -> int:
        """k + 1 full passes; first-layer steps are not counted, as in the paper."""
        return budget.k + 1

    def _full_pass_and_first_layer_steps(self, game: Game, layer: FirstLayer, buffers: Buffers) -> None:
        """J0 a^n."""
        costates = _compute_costates(game, buffers, layer)
        game.step_delta(buffers)  # the full pass has just taken the gradient of the first step
        for _ in range(self.inner - 1):
            buffers.grad.copy_(_first_layer_gradient(game, buffers, layer, costates))
            game.step_delta(buffers)


def _compute_costates(game: Game, buffers: Buffers, layer: FirstLayer) -> list[Tensor]:
    """J0: accumulate theta's gradient, and the loss's gradient by the first layer's outputs."""
    probes = [probe for probe in layer.output_offsets[buffers] if probe is not None]
    for probe in probes:
        probe.grad = None
    game.compute_both_gradients(buffers, layer)
    return [probe.grad for probe in probes if probe.grad is not None]


def _first_layer_gradient(game: Game, buffers: Buffers, layer: FirstLayer, costates: list[Tensor]) -> Tensor:
    """a: the gradient of <costate, first layer(x + delta)> by delta."""
    delta = buffers.delta.detach().requires_grad_()
    with game.engine.autocast():
        outputs = game.calls.first_layer_outputs(buffers, delta, layer)
    (grad,) = torch.autograd.grad(outputs, delta, grad_outputs=costates)
    return game.engine.unscale(grad, game.effective_batch_size(buffers))
