"""AutoAttack (Croce and Hein 2020): all of it, or one part, with the settings of its `standard` version.

Every part attacks the images that the parts before it left. With the same seed it starts where the reference
implementation (`pyautoattack`) starts and gives its verdicts, but for rounding. Targeted parts have no more targets
than there are wrong classes. With fewer than four classes the targeted DLR loss is undefined, so that cross-entropy is
used and the result is not called standard.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from deat.errors import UsageError
from deat.evaluation.attacks import AUTOATTACK_PARTS, Attack, is_beaten
from deat.evaluation.auto_pgd import AutoPGD
from deat.evaluation.fast_adaptive_boundary import FastAdaptiveBoundary
from deat.evaluation.fast_model import FastModel
from deat.evaluation.square_attack import Square
from deat.tasks import CLASSIFICATION, Classification, Task
from deat.threat import L1, L2, Linf, ThreatModel
from deat.utils.float32_precision import full_precision
from deat.utils.torch_contexts import broadcast_mask, eval_mode, frozen_parameters

REFINE_STEPS = 10


class AttackPart(Protocol):
    """A part of AutoAttack."""

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, generator: torch.Generator
    ) -> Tensor:
        """Return examples for images that are classified correctly; `generator` is a generator on the CPU."""


def standard_part(name: str, threat: ThreatModel) -> AttackPart:
    """Return a part as the standard version has it in a norm.

    Args:
        name: One of `AUTOATTACK_PARTS`.
        threat: The ball.
    """
    is_l1 = threat.name == "l1"
    parts: dict[str, AttackPart] = {
        "apgd-ce": AutoPGD(restarts=5 if is_l1 else 1),
        "apgd-t": AutoPGD(targets=5 if is_l1 else 9),
        "fab-t": FastAdaptiveBoundary(),
        "square": Square(),
    }
    return parts[name]


@dataclass(frozen=True)
class AutoAttack:
    """AutoAttack, or some of its parts. Each part attacks only the images that the parts before it did not fool.

    Attributes:
        name: The attack's name.
        parts: The parts to run, in order.

    Example:
        >>> AutoAttack()  # the standard version
        >>> AutoAttack("square", ("square",))  # one part
    """

    name: str = "aa"
    parts: tuple[str, ...] = AUTOATTACK_PARTS

    def __call__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        threat: ThreatModel,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return adversarial images.

        Args:
            model: Maps images to logits.
            x: Images in [0, 1].
            y: Their labels.
            threat: The threat model.
            generator: Its initial seed is that of every part; 0 without one.
        """
        seed = 0 if generator is None else generator.initial_seed()
        with torch.inference_mode(False), torch.enable_grad(), eval_mode(model), frozen_parameters(model):
            return _run_parts(model, x.clone(), y.clone(), threat, self.parts, seed)

    def check_task(self, task: Task) -> None:
        """Raise UsageError for a task without one class each."""
        if not isinstance(task, Classification):
            raise UsageError(
                f"AutoAttack ({self.name}) is for classification, not for the task {task.name}. Use pgd-N or cw-N, such as "
                "pgd-100x5, five starts of 100 steps."
            )

    def check_threat(self, threat: ThreatModel, shape: Sequence[int]) -> None:
        """Raise UsageError for anything but deat's balls around images in [0, 1], for which the attacks are defined."""
        if type(threat) not in (Linf, L2, L1):
            raise UsageError(
                f"AutoAttack ({self.name}) is for the balls linf, l2 and l1, not for a threat model of your own, {threat!r}. "
                "Use pgd-N or cw-N, such as pgd-100x5, five starts of 100 steps."
            )
        if not threat.is_plain or len(shape) != 3:
            raise UsageError(
                f"AutoAttack ({self.name}) is for images in [0, 1], not for examples of shape {tuple(shape)} under {threat!r}. "
                "Use pgd-N or cw-N, such as pgd-100x5, five starts of 100 steps."
            )

    @property
    def stages(self) -> "tuple[AutoAttack, ...]":
        """One attack for each part."""
        return tuple(AutoAttack(part, (part,)) for part in self.parts)

    def describe(self, threat: ThreatModel, num_classes: int) -> dict[str, Any]:
        """Return the settings for evaluation.json.

        Args:
            threat: The threat model.
            num_classes: The number of the model's logits.
        """
        wrong_classes = num_classes - 1
        return {
            "implementation": "deat",
            "parts": list(self.parts),
            "targets": {
                "apgd-t": min(5 if threat.name == "l1" else 9, wrong_classes),
                "fab-t": min(9, wrong_classes),
            },
            "targeted_loss": "dlr" if num_classes > 3 else "ce",
            "standard": self.parts == AUTOATTACK_PARTS and num_classes > 3,
        }


def _run_parts(
    model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, parts: tuple[str, ...], seed: int
) -> Tensor:
    """Run the parts on the images that are still correct, by the exact model if attacks use a fast one."""
    result, rows = x.clone(), (~is_beaten(model, x, y)).nonzero().squeeze(1)
    for part in parts:
        if len(rows) == 0:
            break
        adv = _run_part(model, x[rows], y[rows], threat, part, seed)
        if isinstance(model, FastModel):
            adv = _refine_near_boundary(model, x[rows], y[rows], adv, threat)
        correct = ~is_beaten(model, adv, y[rows])
        result[rows[~correct]] = adv[~correct]
        rows = rows[correct]
    return result


def _run_part(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, part: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    adv = standard_part(part, threat)(model, x, y, threat, generator).detach()
    # Rounding may leave the ball by about a millionth.
    return torch.where(broadcast_mask(threat.contains(x, adv), x), adv, x + threat.project(x, adv - x))


def _refine_near_boundary(fast_model: FastModel, x: Tensor, y: Tensor, x_adv: Tensor, threat: ThreatModel) -> Tensor:
    """Take a few exact steps with the images that fool only the fast model, since they are close to the boundary."""
    with torch.no_grad():
        fools_fast_only = ~CLASSIFICATION.is_right(fast_model(x_adv), y) & ~is_beaten(fast_model, x_adv, y)
    rows = fools_fast_only.nonzero().squeeze(1)
    if len(rows) == 0:
        return x_adv
    attack = Attack("polish", REFINE_STEPS, alpha=0.1, loss="margin", freeze=True)
    clean, delta, unfrozen = x[rows], (x_adv - x)[rows], torch.zeros_like(fools_fast_only[rows])
    with full_precision():
        for _ in range(REFINE_STEPS):
            delta, _ = attack.step(fast_model.exact_model, clean, y[rows], delta, threat, unfrozen)
    return x_adv.index_put((rows,), clean + delta)
