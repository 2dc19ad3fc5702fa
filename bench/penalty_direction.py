"""g+ along its own gradient, and along the gradient that the last pass of the batch left.

    python bench/penalty_direction.py

Trains on digits with three seeds each, and prints a table in Markdown: natural accuracy and PGD-20 on all test images. Both
directions are trained with the same passes, so that only the direction differs; the backprops are those of g+ as it is.
"""

import argparse
from dataclasses import dataclass, replace
from statistics import fmean

import torch

import deat
from deat.core.game import Game
from deat.core.gradient_penalty import GradientPenalty
from deat.core.move_order import PenaliseGradient, find_play
from deat.core.training_losses import PenalisedOutput
from deat.utils.text import format_markdown_table

SEEDS, EPOCHS = (0, 1, 2), 30
WEIGHTS = (0.1, 1.0)
"""The default, and one at which the penalty is a large part of the loss."""
BASES = ("deat-3", "fgsm")
DIRECTIONS = ("none", "own", "left")


@dataclass(frozen=True)
class LeftPenalty(GradientPenalty):
    """The finite difference along the gradient in the batch's buffers, which the last pass has left there."""

    game: Game | None = None

    def add_to(self, loss_function, net, x, delta, y, task, threat, noise=None) -> PenalisedOutput:  # type: ignore[no-untyped-def]
        """Compute the training loss with the penalty; see `AddedPenalty.add_to`."""
        assert self.game is not None
        output = loss_function(net, x, delta, y)
        (own,) = torch.autograd.grad(output.loss, delta, retain_graph=True)  # not needed for the direction
        left = self.game._buffers_by_shape[x.shape].grad
        moved = threat.step(x, delta.detach(), left, self.step * threat.eps).detach()
        squared = ((task.loss(net(x + moved), y) - task.loss(output.logits_adv, y)) / self.step).square()
        return PenalisedOutput(output.loss + self.weight * squared.mean(), output.logits_adv, own)


@dataclass(frozen=True)
class PenaliseAlongLeft(PenaliseGradient):
    """g+ with a `LeftPenalty`."""

    def __call__(self, game: Game, x: torch.Tensor, y: torch.Tensor, budget: deat.Budget) -> None:
        """Train on one batch."""
        assert isinstance(self.penalty, GradientPenalty)
        penalty = LeftPenalty("gradient", self.penalty.weight, self.penalty.step, game)
        PenaliseGradient(self.play, penalty)(game, x, y, budget)


def make_method(base: str, direction: str, weight: float) -> deat.Method:
    """Return the base alone, or g+base with the penalty along one of the gradients."""
    if direction == "none":
        return deat.get_method(base)
    method = deat.configure_method(deat.get_method(f"g+{base}"), g_weight=weight)
    play = find_play(method.play, PenaliseGradient)
    assert play is not None
    return method if direction == "own" else replace(method, play=PenaliseAlongLeft(play.play, play.penalty))


def train_and_evaluate(base: str, direction: str, weight: float, seed: int) -> tuple[float, float, int]:
    """Return natural accuracy and that under PGD-20 of the last epoch, in percent, and the backprops."""
    digits = deat.load_data("digits")
    torch.manual_seed(seed)
    net = deat.build_model("small", in_channels=1, image_size=8)
    method = make_method(base, direction, weight)
    result = deat.fit(
        net, digits, method=method, epochs=EPOCHS, seed=seed, device="cpu", progress=False, val_attack="none"
    )
    evaluation = deat.evaluate(net, digits, attacks="natural,pgd-20", sanity=False)
    natural, robust = (100 * evaluation.accuracy[name] for name in ("natural", "pgd-20"))
    return natural, robust, result.history[-1].backprops


def main() -> None:
    """Train everything, and print the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = []
    for base in BASES:
        for weight in (None, *WEIGHTS):
            for direction in DIRECTIONS[:1] if weight is None else DIRECTIONS[1:]:
                runs = [train_and_evaluate(base, direction, weight or 0.0, seed) for seed in SEEDS]
                natural, robust = (" ".join(f"{run[part]:.2f}" for run in runs) for part in (0, 1))
                means = (f"{fmean(run[part] for run in runs):.2f}" for part in (0, 1))
                rows.append([base, direction, str(weight or ""), natural, robust, *means, f"{runs[0][2]:,}"])
                print(*rows[-1], flush=True)
    header = ("method", "direction", "weight", "natural, seeds", "PGD-20, seeds", "natural", "PGD-20", "backprops")
    print(format_markdown_table(header, rows))


if __name__ == "__main__":
    main()
