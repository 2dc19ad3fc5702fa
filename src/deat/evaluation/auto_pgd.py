"""APGD (Croce and Hein 2020): projected gradient ascent whose step size halves where the loss stops rising.

As AutoAttack's standard version runs it: on cross-entropy, or on the targeted DLR loss with one run for each of the
likeliest wrong classes. In L1 its steps are sparse, and the radius starts at three times eps (Croce and Hein 2021). An
image leaves the batch as soon as the exact model is wrong about it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deat.evaluation.attacks import compute_gradient, confirm_fooled, exact_outputs
from deat.tasks import CLASSIFICATION
from deat.tasks.classification import as_class_logits
from deat.threat import ThreatModel
from deat.utils.torch_contexts import broadcast_mask

FIRST_CHECK, CHECK_DECREASE, MIN_CHECK = 22, 3, 6
"""The steps until the step size is first checked, by how many fewer each time, and the least."""
ENOUGH_RISES = 0.75
"""The step size halves where the loss rose in at most this share of the steps since the last check."""
NEW_STEP_SHARE = 0.75
"""The share of the new step; the rest is the step before."""
L1_RADII, L1_STEP_SHARES = (3.0, 2.0, 1.0), (0.3, 0.3)
"""In L1: the radii in units of eps, and the share of the steps for each but the last."""
L1_DENSITY_DIVISOR, L1_SPARSER = 1.5, 0.95
"""In L1: how many fewer pixels a step changes than the best example, and by how many fewer it must restart."""
L1_STEP_DIVISOR, L1_MIN_STEP = 1.5, 0.1
ImageLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Logits (B, classes), labels and targets to the loss of each image, (B,)."""


@dataclass(frozen=True)
class AutoPGD:
    """APGD on cross-entropy, or on a targeted loss.

    Attributes:
        steps: The number of gradient steps of a run.
        restarts: The number of runs from different starts, for cross-entropy.
        targets: The number of wrong classes to aim at, one run each, the likeliest first; 0 for cross-entropy.
    """

    steps: int = 100
    restarts: int = 1
    targets: int = 0

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, generator: torch.Generator
    ) -> Tensor:
        """Attack images that are classified correctly.

        Args:
            model: Network that returns logits.
            x: Images in [0, 1].
            y: Their labels.
            threat: The ball.
            generator: Source of random starts, on the CPU.

        Returns:
            For each image an example that the queried model misclassifies, or the image itself.
        """
        result, rows = x.clone(), torch.arange(len(x), device=x.device)
        ranked = as_class_logits(exact_outputs(model, x)).argsort(1)
        loss = _choose_loss(self.targets > 0, ranked.shape[1])
        for run in range(min(self.targets, ranked.shape[1] - 1) or self.restarts):
            target = ranked[rows, -2 - run] if self.targets else y[rows]
            images = _Batch(x[rows], y[rows], target, result[rows])
            result[rows], is_fooled = self._run(_Query(model, loss), images, threat, generator)
            rows = rows[~is_fooled]
            if len(rows) == 0:
                break
        return result

    def _run(
        self, query: "_Query", images: "_Batch", threat: ThreatModel, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """The examples of one run, and which of them fool the exact model."""
        x = images.x
        if threat.name != "l1":
            return _Climb(query, images, threat, self.steps).run(_draw_start(x, threat, generator))
        start = x + _draw_normal(x, generator)
        lengths = [ceil(share * self.steps) for share in L1_STEP_SHARES]
        for radius, steps in zip(L1_RADII, (*lengths, self.steps - sum(lengths)), strict=True):
            _draw_normal(x, generator)  # the reference draws a start for each radius and does not use it
            ball = replace(threat, eps=radius * threat.eps)
            climb = _SparseClimb(query, images, ball, steps, stops=radius == L1_RADII[-1])
            result = climb.run((x + ball.project(x, start - x)).clamp(0, 1))
            start = climb.state.x_best
        return result


def _draw_normal(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(x.shape, generator=generator).to(x.device)


def _draw_start(x: Tensor, threat: ThreatModel, generator: torch.Generator) -> Tensor:
    """A start on the surface of the ball, clipped to the box."""
    is_linf = threat.name == "linf"
    direction = (
        (2 * torch.rand(x.shape, generator=generator) - 1).to(x.device) if is_linf else _draw_normal(x, generator)
    )
    size = direction.abs().flatten(1).amax(1) if is_linf else _length(direction)
    return (x + threat.eps * (direction / (broadcast_mask(size, x) + 1e-12))).clamp(0, 1)


def _length(values: Tensor) -> Tensor:
    """The Euclidean length of each image."""
    return values.square().flatten(1).sum(1).sqrt()


def _choose_loss(is_targeted: bool, num_classes: int) -> ImageLoss:
    """The loss to maximise; with fewer than four classes the targeted DLR loss is not defined."""
    if not is_targeted:
        return lambda logits, y, target: F.cross_entropy(logits, y, reduction="none")
    return _targeted_dlr_loss if num_classes > 3 else _targeted_cross_entropy


def _targeted_cross_entropy(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    return -F.cross_entropy(logits, target, reduction="none")


def _targeted_dlr_loss(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """Target minus label, divided by a difference of logits, so that scaling them changes nothing."""
    ordered, rows = logits.sort(1).values, torch.arange(len(y), device=y.device)
    scale = ordered[:, -1] - 0.5 * (ordered[:, -3] + ordered[:, -4]) + 1e-12
    return -(logits[rows, y] - logits[rows, target]) / scale


class _Query(NamedTuple):
    """What an attack asks of a model."""

    model: nn.Module
    loss: ImageLoss

    def __call__(self, x: Tensor, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The losses, their gradients, and which images are misclassified."""
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            logits = as_class_logits(self.model(x))
            losses = self.loss(logits, y, target)
            grad = compute_gradient(losses.sum(), x)
        return losses.detach(), grad, ~CLASSIFICATION.is_right(logits.detach(), y)


class _Batch(NamedTuple):
    """What a run attacks, and the examples that earlier runs found."""

    x: Tensor
    y: Tensor
    target: Tensor
    result: Tensor


class _State(NamedTuple):
    """The images that are still in the batch, and where their ascent is, all batch first."""

    x: Tensor
    y: Tensor
    target: Tensor
    rows: Tensor
    x_adv: Tensor
    x_before: Tensor
    grad: Tensor
    loss: Tensor
    x_best: Tensor
    grad_best: Tensor
    loss_best: Tensor
    loss_best_at_check: Tensor
    num_rises: Tensor
    was_halved: Tensor
    step_size: Tensor
    num_changed: Tensor


class _Climb:
    """One ascent in Linf or L2: steps with momentum, whose size halves where the loss oscillates."""

    def __init__(
        self,
        query: _Query,
        images: _Batch,
        threat: ThreatModel,
        num_steps: int,
        stops: bool = True,
    ) -> None:
        self.query, self.images, self.threat = query, images, threat
        self.num_steps, self.stops = num_steps, stops
        self.result, self.is_fooled = images.result.clone(), torch.zeros_like(images.y, dtype=torch.bool)
        self.next_check, self.first_step_size = FIRST_CHECK, 2 * threat.eps
        self.since_check = 0
        self._bounds: tuple[Tensor, Tensor] | None = None

    def run(self, start: Tensor) -> tuple[Tensor, Tensor]:
        """Climb from a start.

        Returns:
            The last example of each image that the queried model misclassified, and which fool the exact model.
        """
        x, y, target, _ = self.images
        loss, grad, fooled = self.query(start, y, target)
        zeros = torch.zeros_like(loss)
        self.state = _State(
            *(x, y, target, torch.arange(len(start), device=start.device), start, start, grad),
            # The loss before the first step is zero, so that a positive one counts as a rise, as in the reference.
            *(zeros, start.clone(), grad.clone(), loss, loss),
            *(zeros, zeros + 1, zeros + self.first_step_size, self._count_changed(start, x)),
        )
        if self._remove_fooled(start, fooled):
            return self.result, self.is_fooled
        for step in range(self.num_steps):
            moved = self._move(NEW_STEP_SHARE if step else 1.0)
            fooled = self._ask(moved)
            self.since_check += 1
            if self.since_check == self.next_check:
                self._check_step_size()
                self.since_check = 0
            if self._remove_fooled(moved, fooled):
                break
        return self.result, self.is_fooled

    def _ask(self, moved: Tensor) -> Tensor:
        """Ask the model about the next examples, and keep the best ones."""
        s = self.state
        loss, grad, fooled = self.query(moved, s.y, s.target)
        is_best = loss > s.loss_best
        mask = broadcast_mask(is_best, moved)
        self.state = s._replace(
            x_before=s.x_adv,
            x_adv=moved,
            grad=grad,
            loss=loss,
            num_rises=s.num_rises + (loss > s.loss),
            x_best=torch.where(mask, moved, s.x_best, out=s.x_best),
            grad_best=torch.where(mask, grad, s.grad_best, out=s.grad_best),
            loss_best=torch.where(is_best, loss, s.loss_best),
        )
        return fooled

    def _remove_fooled(self, x_adv: Tensor, fooled: Tensor) -> bool:
        """Remove the images that fool the exact model, too; return whether none is left."""
        if not self.stops or not fooled.any():
            return False
        s = self.state
        self.result[s.rows[fooled]] = x_adv[fooled]
        is_out = confirm_fooled(self.query.model, x_adv, s.y, fooled)
        self.is_fooled[s.rows[is_out]] = True
        if is_out.any():
            self.state = _State(*(values[~is_out] for values in s))
        return len(self.state.y) == 0

    def _move(self, new_share: float) -> Tensor:
        """The next examples."""
        s = self.state
        direction = s.grad.sign() if self.threat.name == "linf" else _unit(s.grad)
        moved = self._into_ball(direction.mul_(broadcast_mask(s.step_size, s.x)).add_(s.x_adv))
        moved.sub_(s.x_adv).mul_(new_share).add_(s.x_adv)
        return self._into_ball(moved.add_(s.x_adv - s.x_before, alpha=1 - new_share))

    def _into_ball(self, x_adv: Tensor) -> Tensor:
        """The nearest example in ball and box in Linf; in L2 the one on the way to the image, clipped. In place."""
        x, eps = self.state.x, self.threat.eps
        if self.threat.name == "linf":
            if self._bounds is None or len(self._bounds[0]) != len(x):  # images have left
                self._bounds = (x - eps).clamp_(min=0), (x + eps).clamp_(max=1)
            return x_adv.clamp_(*self._bounds)
        delta = x_adv.sub_(x)
        length = broadcast_mask(_length(delta).clamp(max=eps), delta)
        return _unit(delta).mul_(length).add_(x).clamp_(0, 1)

    def _check_step_size(self) -> None:
        """Halve the step size where the loss rose too seldom, or where the best did not change at an unchanged size."""
        s = self.state
        halves = s.num_rises <= ENOUGH_RISES * self.next_check
        halves |= (s.was_halved == 0) & (s.loss_best_at_check >= s.loss_best)
        self._go_back(
            halves,
            step_size=torch.where(halves, s.step_size / 2, s.step_size),
            was_halved=halves.to(s.was_halved.dtype),
            loss_best_at_check=s.loss_best,
            num_rises=torch.zeros_like(s.num_rises),
        )
        self.next_check = max(self.next_check - CHECK_DECREASE, MIN_CHECK)

    def _go_back(self, where: Tensor, **changes: Tensor) -> None:
        """Return some images to their best examples."""
        s, mask = self.state, broadcast_mask(where, self.state.x)
        x_adv, grad = torch.where(mask, s.x_best, s.x_adv), torch.where(mask, s.grad_best, s.grad)
        self.state = s._replace(x_adv=x_adv, grad=grad, **changes)

    @staticmethod
    def _count_changed(x_adv: Tensor, x: Tensor) -> Tensor:
        """How many pixels of each image differ."""
        return (x_adv != x).flatten(1).sum(1).float()


def _unit(values: Tensor) -> Tensor:
    return values / (broadcast_mask(_length(values), values) + 1e-12)


class _SparseClimb(_Climb):
    """One ascent in L1: equal steps of the steepest pixels, fewer of them as the best example has fewer changes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.next_check, self.first_step_size = max(int(0.04 * self.num_steps), 1), self.threat.eps

    def _move(self, new_share: float) -> Tensor:
        s = self.state
        size, n = s.grad.abs().flatten(1), s.x[0].numel()
        density = s.num_changed / n / L1_DENSITY_DIVISOR
        index = ((1 - density) * n).clamp(0, n - 1).long()
        least = size.sort(1).values.gather(1, index[:, None])
        signs = torch.where(size >= least, s.grad.flatten(1), 0.0).sign()
        step = s.step_size[:, None] * signs / (signs.abs().sum(1, keepdim=True) + 1e-10)
        return s.x + self.threat.project(s.x, s.x_adv + step.view_as(s.x) - s.x)

    def _check_step_size(self) -> None:
        """Restart the step size where the best example has become sparser; shorten it elsewhere."""
        s, eps = self.state, self.threat.eps
        num_changed = self._count_changed(s.x_best, s.x)
        is_sparser = num_changed / s.num_changed < L1_SPARSER
        step_size = torch.where(is_sparser, eps, s.step_size / L1_STEP_DIVISOR).clamp(L1_MIN_STEP * eps, eps)
        self._go_back(is_sparser, step_size=step_size, num_changed=num_changed)
