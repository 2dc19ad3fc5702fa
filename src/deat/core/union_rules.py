"""How training picks among the balls of a `Union`: one class a rule.

Each example of a batch has one ball at a time (`Buffers.ball`). A step of delta picks the ball, steps in its norm and
projects onto it, so that a perturbation which comes from another ball is projected onto the new one. Nothing here reads
the device.
"""

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Generator, Tensor

from deat.core.batch_buffers import Buffers
from deat.threat import ThreatModel, Union
from deat.utils.distributed import SINGLE_PROCESS, Distributed
from deat.utils.torch_contexts import broadcast_mask

if TYPE_CHECKING:
    from deat.core.game import Game


class UnionRule:
    """Base class of the rules. By itself it draws a ball for each example, which keeps it for the whole batch.

    Args:
        union: The balls.
        device: The device of the game.
        distributed: The processes that share the batches.

    Attributes:
        compares_losses: Whether a step compares losses, for which it runs the network on each ball's candidate.
    """

    compares_losses: ClassVar[bool] = False

    def __init__(self, union: Union, device: torch.device, distributed: Distributed = SINGLE_PROCESS) -> None:
        self.union, self.device, self.distributed = union, device, distributed

    @property
    def passes_per_step(self) -> int:
        """How many forward passes of the network one step of delta makes."""
        return len(self.union.threats) if self.compares_losses else 0

    def draw(self, count: int, generator: Generator) -> Tensor:
        """Draw the ball of each example at the start of a batch, (count,)."""
        return self.union.draw_balls(count, generator, self.device)

    def ball_of_carried(self, delta: Tensor, ball: Tensor) -> Tensor:
        """Return the balls of perturbations that are carried from the last batch, (B,).

        Args:
            delta: The perturbations.
            ball: The balls that were drawn for their examples.
        """
        return self.union.nearest(delta)

    def next_delta(self, game: "Game", buffers: Buffers) -> tuple[Tensor, Tensor]:
        """Return the next perturbations, and the number of the ball that each is in, (B,)."""
        return project_step(game, buffers, self.union.at(buffers.ball)), buffers.ball

    def observe(self, buffers: Buffers, has_own_images: bool) -> None:
        """Note the result of a batch with an adversary; called only if there are `tensors` to change.

        Args:
            buffers: The batch's buffers, after its last update.
            has_own_images: Whether this process has images of the batch.
        """

    def tensors(self) -> list[Tensor]:
        """Return the tensors that `observe` changes."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """Return what the rule has counted so far, as JSON; reads the device. It is the same in all processes."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a result of `state_dict`, in place."""


class WorstBall(UnionRule):
    """MSD: make every ball's step, and keep for each example the one with the highest loss of the attack."""

    compares_losses: ClassVar[bool] = True

    def next_delta(self, game: "Game", buffers: Buffers) -> tuple[Tensor, Tensor]:
        """Return the steps with the highest losses, and their balls."""
        chosen, ball, highest = buffers.delta, buffers.ball, torch.full_like(buffers.magnitude, -torch.inf)
        for number, threat in enumerate(self.union.threats):
            candidate = project_step(game, buffers, threat, threat.eps)
            loss = game.attack_losses(buffers, candidate).to(highest.dtype).nan_to_num(nan=torch.inf)
            is_higher = loss > highest
            chosen = torch.where(broadcast_mask(is_higher, candidate), candidate, chosen)
            ball, highest = torch.where(is_higher, number, ball), torch.where(is_higher, loss, highest)
        return chosen, ball


class SteepestBall(UnionRule):
    """Step in the ball with the largest first-order rise, eps times the dual norm of the gradient that is there."""

    def next_delta(self, game: "Game", buffers: Buffers) -> tuple[Tensor, Tensor]:
        """Return the steps in the steepest balls, and these."""
        ball = self.union.steepest(buffers.grad)
        return project_step(game, buffers, self.union.at(ball)), ball


class RandomBall(UnionRule):
    """SAT: draw one ball for all examples of a batch."""

    def draw(self, count: int, generator: Generator) -> Tensor:
        """Draw one ball for all examples."""
        return super().draw(1, generator).expand(count)

    def ball_of_carried(self, delta: Tensor, ball: Tensor) -> Tensor:
        """Return the batch's ball."""
        return ball


class ErrorBall(RandomBall):
    """E-AT: draw one ball for a batch, each with a probability in proportion to its robust error in training so far.

    The error of a ball is counted over all batches that it was drawn for, at their last update. While a ball was not
    drawn yet, all are equally likely.
    """

    def __init__(self, union: Union, device: torch.device, distributed: Distributed = SINGLE_PROCESS) -> None:
        super().__init__(union, device, distributed)
        # By ball: examples that the network was right about, and examples.
        self.counts = torch.zeros(2, len(union.threats), dtype=torch.float64, device=device)

    def draw(self, count: int, generator: Generator) -> Tensor:
        """Draw one ball for all examples, by the errors so far."""
        right, examples = self.counts
        errors = (1 - right / examples.clamp(min=1)).clamp(min=0)
        are_known = (examples.amin() > 0) & (errors.sum() > 0)
        weights = torch.where(are_known, errors, torch.ones_like(errors))
        share = torch.rand(1, generator=generator, dtype=torch.float64, device=self.device)
        # torch.multinomial would read the device.
        below = weights.cumsum(0) <= share * weights.sum()
        return below.sum().clamp(max=len(weights) - 1).expand(count)

    def observe(self, buffers: Buffers, has_own_images: bool) -> None:
        """Add a batch to the counts of its ball; of all processes, so that they draw the same balls."""
        is_drawn = torch.arange(self.counts.shape[1], device=self.device) == buffers.ball[0]
        row = torch.stack((buffers.num_correct.double(), torch.full_like(self.counts[0, 0], len(buffers))))
        row = self.distributed.all_reduce_tensor(row if has_own_images else row * 0)
        self.counts.add_(torch.where(is_drawn & buffers.update_applied, row.unsqueeze(1), 0.0))

    def tensors(self) -> list[Tensor]:
        """Return the counts."""
        return [self.counts]

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        return {"counts": self.counts.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counts."""
        self.counts.copy_(torch.tensor(state["counts"], dtype=torch.float64))


RULES: dict[str, type[UnionRule]] = {
    "worst": WorstBall,
    "random": RandomBall,
    "error": ErrorBall,
    "magnitude": SteepestBall,
}
"""The rules by their names in `deat.threat.UNION_RULES`."""


def make_union_rule(threat: ThreatModel, device: torch.device, distributed: Distributed) -> UnionRule | None:
    """Make the rule of a union; None for a threat model of one ball."""
    return RULES[threat.rule](threat, device, distributed) if isinstance(threat, Union) else None


def describe_rule(name: str) -> str:
    """Return the first sentence of a rule's docstring."""
    return (RULES[name].__doc__ or "").split("\n")[0].partition(". ")[0].rstrip(".")


def compares_losses(threat: ThreatModel) -> bool:
    """Return whether a step of delta runs the whole network to compare losses."""
    return isinstance(threat, Union) and RULES[threat.rule].compares_losses


def project_step(game: "Game", buffers: Buffers, threat: ThreatModel, radius: float = 1.0) -> Tensor:
    """Return delta after a step along its gradient in a threat model, projected as the attack does it.

    Args:
        game: The game.
        buffers: The batch's buffers.
        threat: The ball, or the balls of the examples.
        radius: The unit of the game's step size.
    """
    moved = threat.step(buffers.x, buffers.delta, buffers.grad, game.step_size * radius)
    return game.attack.project(threat, buffers.x, moved)
