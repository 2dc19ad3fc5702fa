"""AutoAttack (Croce and Hein 2020) by its reference implementation `pyautoattack`: all of it, or one part.

Settings are those of the `standard` version. The evaluation splits the data into blocks and resumes, because the
reference's own state file cannot be read back. Targeted parts have no more targets than there are wrong classes. With
fewer than four classes the targeted DLR loss is undefined, so that cross-entropy is used and the result is not called
standard.
"""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deat.errors import UsageError
from deat.evaluation.attacks import Attack, is_beaten
from deat.evaluation.fast_model import FastModel, full_precision
from deat.tasks import CLASSIFICATION, Classification, Task
from deat.tasks.classification import as_class_logits
from deat.threat import ThreatModel
from deat.utils.torch_utils import broadcast_mask, eval_mode, frozen_parameters

AUTOATTACK_PARTS = ("apgd-ce", "apgd-t", "fab-t", "square")
REFINE_STEPS = 10
PYAUTOATTACK_NORMS = {"linf": "Linf", "l2": "L2", "l1": "L1"}


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
            generator: Its initial seed is the reference's seed; 0 without one.

        Raises:
            UsageError: `pyautoattack` is not installed.
        """
        seed = 0 if generator is None else generator.initial_seed()
        devices = [x.device] if x.device.type == "cuda" else []
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.random.fork_rng(devices),
            eval_mode(model),
            frozen_parameters(model),  # FAB would leave gradients in the weights
            _silence_reference(),
        ):
            return _run_parts(model, x.clone(), y.clone(), threat, self.parts, seed)

    def check_task(self, task: Task) -> None:
        """Raise UsageError for a task without one class each."""
        if not isinstance(task, Classification):
            raise UsageError(
                f"AutoAttack ({self.name}) is for classification, not for the task {task.name}. Use pgd-N or cw-N, such as "
                "pgd-100x5, five starts of 100 steps."
            )

    def check_threat(self, threat: ThreatModel, shape: Sequence[int]) -> None:
        """Raise UsageError for anything but images in [0, 1], which the reference assumes."""
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
    result, rows = x.clone(), torch.arange(len(x), device=x.device)
    for part in parts:
        adv = _run_reference_part(model, x[rows], y[rows], threat, part, seed)
        if isinstance(model, FastModel):
            adv = _refine_near_boundary(model, x[rows], y[rows], adv, threat)
        correct = ~is_beaten(model, adv, y[rows])
        result[rows[~correct]] = adv[~correct]
        rows = rows[correct]
        if len(rows) == 0:
            break
    return result


def _run_reference_part(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, part: str, seed: int) -> Tensor:
    adversary = build_adversary(model, x, threat, part, seed)
    adv: Tensor = adversary.run_standard_evaluation(x, y, batch_size=len(x))[0].detach()
    # In L1 the reference's rounding leaves the ball by about a millionth.
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


def build_adversary(model: nn.Module, x: Tensor, threat: ThreatModel, part: str, seed: int) -> Any:
    """Build the reference implementation's object for one part.

    Args:
        model: Maps images to logits.
        x: The images to attack.
        threat: The threat model.
        part: One of `AUTOATTACK_PARTS`.
        seed: The seed of its random draws.

    Returns:
        A `pyautoattack.AutoAttack` of the standard version, adapted to the number of classes.

    Raises:
        UsageError: `pyautoattack` is not installed.
    """
    try:
        from pyautoattack import AutoAttack as Reference
    except ImportError:
        raise UsageError("AutoAttack needs the package pyautoattack: pip install pyautoattack.") from None
    with torch.no_grad():
        logits = model(x[:1])
    class_logits = as_class_logits(logits)
    model = model if class_logits is logits else _ClassLogits(model)
    adversary = Reference(model, eps=threat.eps, norm=PYAUTOATTACK_NORMS[threat.name], seed=seed, device=x.device)
    wrong_classes = class_logits.shape[1] - 1
    targeted = adversary.apgd_targeted
    targeted.n_target_classes = min(targeted.n_target_classes, wrong_classes)
    adversary.fab.n_target_classes = min(adversary.fab.n_target_classes, wrong_classes)
    if wrong_classes < 3:
        targeted.dlr_loss_targeted = targeted.ce_loss_targeted
    adversary.attacks_to_run = [part]
    return adversary


class _ClassLogits(nn.Module):
    """A model with a logit for each class, also where it returns a single logit for two classes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = model.training  # train() would change the model's modes

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, classes)."""
        return as_class_logits(self.model(x))


@contextmanager
def _silence_reference() -> Iterator[None]:
    """Suppress the reference's log, whose checks the evaluation makes itself, and restore tracing, which it ends."""
    logger, trace = logging.getLogger("auto-attack"), sys.gettrace()
    before = logger.level
    try:
        logger.setLevel(logging.CRITICAL)
        yield
    finally:
        logger.setLevel(before)
        sys.settrace(trace)
