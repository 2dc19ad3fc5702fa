"""How each family of methods orders the moves of a batch: A, an attack step, and J, an update. Each costs one backprop.

A class here is a play: it gets the game (`core/game.py`) and a batch, and calls the game's moves in its order.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from deat.core.batch_buffers import Budget, Buffers
from deat.core.first_layer import FirstLayer
from deat.core.game import Game
from deat.core.gradient_penalty import AddedPenalty
from deat.core.union_rules import compares_losses
from deat.core.weight_perturbation import WeightPerturbation
from deat.errors import UsageError
from deat.threat import ThreatModel

PlayT = TypeVar("PlayT")


class Play(Protocol):
    """The order of the moves of one batch.

    Attributes:
        crafts_first: Whether delta is complete before theta first changes. M+ stretches its step size only then, and F+
            requires it.
        can_record: Whether the moves may be recorded as CUDA graphs.
    """

    @property
    def crafts_first(self) -> bool:
        """See above."""

    @property
    def can_record(self) -> bool:
        """See above."""

    def __call__(self, game: Game, x: Tensor, y: Tensor, budget: Budget) -> None:
        """Train on one batch.

        Args:
            game: The game whose moves to call.
            x: The images.
            y: The labels.
            budget: The number and the size of the attack's steps.
        """

    def backprops(self, budget: Budget) -> int:
        """Return the number of backprops of one batch.

        Args:
            budget: The k and the step size of the batch.
        """


@dataclass(frozen=True)
class Craft:
    """Crafts an attack, then updates: A^k J, k attack steps and one update. PGD-k, U-FGSM, TRADES, MART, FAT, Amata, DAT."""

    crafts_first: ClassVar[bool] = True
    can_record: ClassVar[bool] = True

    def __call__(self, game: Game, x: Tensor, y: Tensor, budget: Budget) -> None:
        """Train on one batch: k attack steps, then one update."""
        buffers = game.begin_batch(x, y, budget)
        for _ in range(budget.k):
            game.ascend(buffers)
        game.joint_update(buffers)
        game.end_batch(buffers)

    def backprops(self, budget: Budget) -> int:
        """Return k + 1."""
        return budget.k + 1


@dataclass(frozen=True)
class Replay:
    """Replays the batch: J^(k+1), every pass updates both delta and the weights. FREE-m (m = k + 1), DEAT."""

    crafts_first: ClassVar[bool] = False
    can_record: ClassVar[bool] = True

    def __call__(self, game: Game, x: Tensor, y: Tensor, budget: Budget) -> None:
        """Train on one batch: k + 1 updates, with a step of delta between them."""
        buffers = game.begin_batch(x, y, budget)
        for _ in range(budget.k):
            game.joint_update(buffers, last=False)
            game.step_delta(buffers)
        game.joint_update(buffers)
        if game.attack.persistent and (budget.k or game.attack.random_start_at_k0):
            game.step_delta(buffers)  # the next batch starts from it
        game.end_batch(buffers)

    def backprops(self, budget: Budget) -> int:
        """Return k + 1."""
        return budget.k + 1


@dataclass(frozen=True)
class Relay:
    """YOPO: full passes, cheap first-layer steps after each, one update at the end. YOPO-m-n is (J0 a^n)^k J, m = k + 1.

    J0 is J without its step of theta: the gradients of all full passes are summed. Each of the n cheap steps "a" of
    delta uses the first layer only. There are none after the last full pass, since its delta is not used.

    Args:
        inner: n, the number of steps of delta after each full pass but the last.
    """

    inner: int = 3
    crafts_first: ClassVar[bool] = False
    can_record: ClassVar[bool] = True

    def __call__(self, game: Game, x: Tensor, y: Tensor, budget: Budget) -> None:
        """Train on one batch: k + 1 full passes, with first-layer steps after each but the last."""
        buffers = game.begin_batch(x, y, budget)
        layer = game.prepare_first_layer(buffers)
        for _ in range(budget.k):
            game.accumulate_gradients(buffers, partial(self._full_pass_and_first_layer_steps, game, layer))
        game.joint_update(buffers)
        game.end_batch(buffers)

    def check_threat(self, threat: ThreatModel) -> None:
        """Raise UsageError for a union whose steps compare losses, which the first layer alone cannot compute.

        Args:
            threat: The threat model.

        Raises:
            UsageError: Its steps compare losses.
        """
        if compares_losses(threat):
            raise UsageError(
                "yopo's cheap steps see the network's first layer alone, and a union with the rule 'worst' compares losses at "
                "every step, which takes the whole network. Use the rule 'magnitude', 'random' or 'error', or another method."
            )

    def backprops(self, budget: Budget) -> int:
        """Return k + 1, the number of full passes; first-layer steps do not count, as in the paper."""
        return budget.k + 1

    def _full_pass_and_first_layer_steps(self, game: Game, layer: FirstLayer, buffers: Buffers) -> None:
        costates = _compute_costates(game, buffers, layer)
        game.step_delta_in_move(buffers)  # the full pass has computed the gradient of the first step
        for _ in range(self.inner - 1):
            buffers.grad.copy_(_first_layer_gradient(game, buffers, layer, costates))
            game.step_delta_in_move(buffers)


class _ChangesLastUpdate:
    """Base class of plays that play another one, with something added to the last update of each batch."""

    play: Play
    prefix: ClassVar[str]

    @property
    def crafts_first(self) -> bool:
        """Whether the other play does."""
        return self.play.crafts_first

    @property
    def can_record(self) -> bool:
        """Whether the other play does."""
        return self.play.can_record

    def check_threat(self, threat: ThreatModel) -> None:
        """Raise UsageError for a threat model that the other play refuses."""
        if callable(check := getattr(self.play, "check_threat", None)):
            check(threat)

    def _play_inside(self, game: Game, x: Tensor, y: Tensor, budget: Budget) -> None:
        before = game.last_updates
        self.play(game, x, y, budget)
        if (updates := game.last_updates - before) != 1:
            raise UsageError(
                f"{self.prefix} changes the last update of a batch, and {type(self.play).__name__} made {updates} such "
                "updates. In the earlier ones, call game.joint_update(buffers, last=False)."
            )


@dataclass(frozen=True)
class PenaliseGradient(_ChangesLastUpdate):
    """Another play, with a penalty on the input gradient of the loss in the last update of each batch (g+, gradalign).

    Args:
        play: The other play.
        penalty: The penalty.
    """

    play: Play
    penalty: AddedPenalty
    prefix: ClassVar[str] = "g+"

    def __call__(self, game: Game, x: Tensor, y: Tensor, budget: Budget) -> None:
        """Train on one batch: the other play, with the penalty."""
        before, game.penalty = game.penalty, self.penalty
        try:
            self._play_inside(game, x, y, budget)
        finally:
            game.penalty = before

    def backprops(self, budget: Budget) -> int:
        """Return those of the other play, and those of the penalty."""
        return self.play.backprops(budget) + self.penalty.backprops


@dataclass(frozen=True)
class PerturbWeights(_ChangesLastUpdate):
    """Another play, with the gradient of the last update of each batch taken at perturbed weights (awp+).

    Args:
        play: The other play.
        perturbation: How the weights are perturbed, and from which epoch on.
    """

    play: Play
    perturbation: WeightPerturbation
    prefix: ClassVar[str] = "awp+"

    def __call__(self, game: Game, x: Tensor, y: Tensor, budget: Budget) -> None:
        """Train on one batch: the other play, its last update at perturbed weights."""
        before = game.weight_perturbation
        game.weight_perturbation = self.perturbation if self.perturbation.is_active(budget.epoch) else None
        try:
            self._play_inside(game, x, y, budget)
        finally:
            game.weight_perturbation = before

    def backprops(self, budget: Budget) -> int:
        """Return those of the other play, and one more from the end of the warm-up on."""
        return self.play.backprops(budget) + self.perturbation.is_active(budget.epoch)


def find_play(play: Play, kind: type[PlayT]) -> PlayT | None:
    """Return the play of a kind, which is the given play or one inside of it, or None."""
    current: Any = play
    while current is not None:
        if isinstance(current, kind):
            return current
        current = getattr(current, "play", None)
    return None


def replace_play(play: Any, old: Play, new: Play) -> Any:
    """Return a play with `new` in place of `old`, itself or one inside of it."""
    return new if play is old else replace(play, play=replace_play(play.play, old, new))


def _compute_costates(game: Game, buffers: Buffers, layer: FirstLayer) -> list[Tensor]:
    """J0: accumulate theta's gradient, and return the loss's gradient with respect to the first layer's outputs."""
    offsets = layer.unique_offsets(buffers)
    for offset in offsets:
        offset.grad = None
    game.compute_both_gradients(buffers, layer)
    return [offset.grad for offset in offsets if offset.grad is not None]


def _first_layer_gradient(game: Game, buffers: Buffers, layer: FirstLayer, costates: list[Tensor]) -> Tensor:
    """a: the gradient of <costate, first layer(x + delta)> with respect to delta."""
    delta = buffers.delta.detach().requires_grad_()
    with game.engine.autocast():
        outputs = game.functions.first_layer_outputs(
            buffers, game.attack.visible_delta(game.threat, buffers.x, delta), layer
        )
    (grad,) = torch.autograd.grad(outputs, delta, grad_outputs=costates)
    return game.engine.unscale(grad, game.effective_batch_size(buffers))
