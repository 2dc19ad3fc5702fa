"""FAB-T (Croce and Hein 2020): looks for the nearest example that is misclassified, as AutoAttack's standard version runs it.

Every step goes to the hyperplane on which a linear model has equal logits for the label and the target, towards the
image itself. An image leaves the batch as soon as such an example is within the radius. Small batches have several targets
of each image.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deat.evaluation.attacks import compute_gradient, confirm_fooled, count_queries_at_once, exact_outputs
from deat.evaluation.nearest_hyperplane import step_to_hyperplane
from deat.tasks import CLASSIFICATION
from deat.tasks.classification import as_class_logits
from deat.threat import ThreatModel
from deat.utils.torch_contexts import broadcast_mask

OVERSHOOT = 1.05
MAX_PULL = 0.1
"""The largest weight of the clean image in a step; the rest is the weight of the current example."""
BACKWARD_STEP = 0.9
"""An example that fools the model is moved back to this share of its distance."""
MOVED_SHARE = 0.4
"""With a smaller share of examples moved back, the gradients of the others come from the pass that classified them."""


@dataclass(frozen=True)
class FastAdaptiveBoundary:
    """FAB-T.

    Attributes:
        steps: The number of gradient steps for each target.
        targets: The number of wrong classes to aim at, the likeliest first.
    """

    steps: int = 100
    targets: int = 9

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, generator: torch.Generator
    ) -> Tensor:
        """Attack images that are classified correctly.

        Args:
            model: Network that returns logits.
            x: Images in [0, 1].
            y: Their labels.
            threat: The ball. The attack does not depend on its radius, which says when an image is done.
            generator: Not used: the first start is the image itself.

        Returns:
            For each image an example in the ball that the queried model misclassifies, or the image itself.
        """
        result, rows = x.clone(), torch.arange(len(x), device=x.device)
        ranked = as_class_logits(exact_outputs(model, x)).argsort(1)
        targets = ranked[:, :-1].flip(1)[:, : self.targets]
        while targets.shape[1] and len(rows):
            count = min(count_queries_at_once(model, len(rows), len(x)), targets.shape[1])
            each = rows.repeat(count)
            walk = _Walk(model, x[each], y[each], targets[rows, :count].T.flatten(), threat, result[each])
            walk.run(self.steps)
            found, is_fooled = (v.view(count, len(rows), *v.shape[1:]) for v in (walk.result, walk.is_fooled))
            result[rows] = _choose_run(result[rows], found, is_fooled)
            rows, targets = rows[~is_fooled.any(0)], targets[:, count:]
        return result


def _choose_run(before: Tensor, found: Tensor, is_fooled: Tensor) -> Tensor:
    """For each image the example of the first run (R, B, ...) that fooled it, or else of the last one that found another."""
    is_new = (found != before).flatten(2).any(2)
    last_new = len(found) - 1 - is_new.flip(0).int().argmax(0)
    run = torch.where(is_fooled.any(0), is_fooled.int().argmax(0), last_new)
    return found[run, torch.arange(len(before), device=run.device)]


class _Walk:
    """The way of some images to the boundary of one class each."""

    def __init__(
        self, model: nn.Module, x: Tensor, y: Tensor, target: Tensor, threat: ThreatModel, result: Tensor
    ) -> None:
        self.model, self.threat = model, threat
        self.x, self.y, self.target, self.rows = x, y, target, torch.arange(len(x), device=x.device)
        self.result, self.is_fooled = result, torch.zeros_like(y, dtype=torch.bool)

    def run(self, steps: int) -> None:
        """Walk until every image is done or the steps are used up."""
        x_adv, expects_to_keep = self.x, True
        gap, normal, _ = self._linearise(x_adv, self.y, self.target)
        for step in range(steps):
            x_adv = self._step(x_adv, gap, normal)
            is_last = step == steps - 1
            with_graph = expects_to_keep and not is_last
            logits, inputs = self._classify(x_adv, with_graph)
            fools = ~CLASSIFICATION.is_right(logits.detach(), self.y)
            left = self._note(x_adv, fools)
            if is_last or not left.any():
                return
            moved = torch.where(broadcast_mask(fools, x_adv), self.x + (x_adv - self.x) * BACKWARD_STEP, x_adv)
            expects_to_keep = bool((fools & left).sum() < MOVED_SHARE * len(fools))
            keeps_pass = with_graph and expects_to_keep
            if keeps_pass:
                gap, normal = self._differentiate(logits, inputs, self.y, self.target)
            x_adv, fools = moved[left], fools[left]
            if not left.all():
                self.x, self.y, self.target, self.rows = (
                    values[left] for values in (self.x, self.y, self.target, self.rows)
                )
            if not keeps_pass:
                gap, normal, _ = self._linearise(x_adv, self.y, self.target)
                continue
            gap, normal = gap[left], normal[left]
            if fools.any():
                gap[fools], normal[fools], _ = self._linearise(x_adv[fools], self.y[fools], self.target[fools])

    def _step(self, x_adv: Tensor, gap: Tensor, normal: Tensor) -> Tensor:
        """Go to the hyperplane from the example and from the image, and take a point between the two."""
        n = len(x_adv)
        offset = (normal * x_adv.flatten(1)).sum(1) - gap
        points = torch.cat((x_adv.flatten(1), self.x.flatten(1)))
        steps = step_to_hyperplane(points, normal.repeat(2, 1), offset.repeat(2), self.threat.name)
        lengths = self.threat.norm(steps).clamp(min=1e-8)
        pull = broadcast_mask((lengths[:n] / (lengths[:n] + lengths[n:])).clamp(max=MAX_PULL), x_adv)
        from_example, from_image = (OVERSHOOT * part.view_as(x_adv) for part in (steps[:n], steps[n:]))
        return ((x_adv + from_example) * (1 - pull) + (self.x + from_image) * pull).clamp_(0, 1)

    def _note(self, x_adv: Tensor, fools: Tensor) -> Tensor:
        """Note the examples within the radius; return which images are left."""
        is_near = fools & (self.threat.norm(x_adv - self.x) <= self.threat.eps)
        if not is_near.any():
            return torch.ones_like(fools)
        self.result[self.rows[is_near]] = x_adv[is_near]
        is_out = confirm_fooled(self.model, x_adv, self.y, is_near)
        self.is_fooled[self.rows[is_out]] = True
        return ~is_out

    def _classify(self, x_adv: Tensor, with_graph: bool) -> tuple[Tensor, Tensor]:
        """The logits, and the examples with respect to which they can be differentiated."""
        inputs = x_adv.detach().requires_grad_(with_graph)
        with torch.set_grad_enabled(with_graph):
            return as_class_logits(self.model(inputs)), inputs

    def _linearise(self, x_adv: Tensor, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """How far the target's logit is above the label's, the gradient of that, and the logits."""
        logits, inputs = self._classify(x_adv, with_graph=True)
        return *self._differentiate(logits, inputs, y, target), logits.detach()

    @staticmethod
    def _differentiate(logits: Tensor, inputs: Tensor, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.arange(len(y), device=y.device)
        with torch.enable_grad():
            gap = logits[rows, target] - logits[rows, y]
            normal = compute_gradient(gap.sum(), inputs)
        return gap.detach(), normal.flatten(1)
