"""AutoAttack (Croce and Hein 2020) through the reference implementation, `pyautoattack`: whole, or one part of it.

Its own state file cannot be read back, so blocks and their resumption are the evaluator's. Settings are the
`standard` version's. It needs no more targets than there are wrong classes; below four classes the targeted DLR
loss is undefined, so targets are attacked by cross-entropy instead, and the result is not called standard.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deat.errors import UsageError
from deat.evaluation.attacks import Attack, is_still_correct
from deat.evaluation.fast_model import FastModel, full_precision
from deat.threat import ThreatModel
from deat.utils.torch_utils import broadcast_mask, eval_mode, frozen_parameters

AUTOATTACK_PARTS = ("apgd-ce", "apgd-t", "fab-t", "square")
REFINE_STEPS = 10
PYAUTOATTACK_NORMS = {"linf": "Linf", "l2": "L2", "l1": "L1"}


@dataclass(frozen=True)
class AutoAttack:
    """The ensemble, or some of its parts, as an attack on one block; inside it only survivors go on."""

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
        """The adversarial images; the generator gives its seed."""
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

    @property
    def stages(self) -> "tuple[AutoAttack, ...]":
        """Its parts, each an attack of its own on those that the parts before it left."""
        return tuple(AutoAttack(part, (part,)) for part in self.parts)

    def describe(self, threat: ThreatModel, num_classes: int) -> dict[str, Any]:
        """The settings that a record keeps."""
        wrong = num_classes - 1
        return {
            "parts": list(self.parts),
            "targets": {"apgd-t": min(5 if threat.name == "l1" else 9, wrong), "fab-t": min(9, wrong)},
            "targeted_loss": "dlr" if num_classes > 3 else "ce",
            "standard": self.parts == AUTOATTACK_PARTS and num_classes > 3,
        }


def _run_reference_part(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, part: str, seed: int) -> Tensor:
    adversary = build_adversary(model, x, threat, part, seed)
    found: Tensor = adversary.run_standard_evaluation(x, y, batch_size=len(x))[0].detach()
    # In L1 its rounding leaves the ball by about a millionth.
    return torch.where(broadcast_mask(threat.contains(x, found), x), found, x + threat.project(x, found - x))


def _run_parts(
    model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, parts: tuple[str, ...], seed: int
) -> Tensor:
    """The reference's cascade; on a quick twin, an image leaves it only once the exact model is fooled."""
    found, rows = x.clone(), torch.arange(len(x), device=x.device)
    for part in parts:
        tried = _run_reference_part(model, x[rows], y[rows], threat, part, seed)
        if isinstance(model, FastModel):
            tried = _refine_near_boundary(model, x[rows], y[rows], tried, threat)
        stands = is_still_correct(model, tried, y[rows])
        found[rows[~stands]] = tried[~stands]
        rows = rows[stands]
        if len(rows) == 0:
            break
    return found


def _refine_near_boundary(fast_model: FastModel, x: Tensor, y: Tensor, x_adv: Tensor, threat: ThreatModel) -> Tensor:
    """What fools the twin but not the exact model stands on the border: a few exact steps push it over."""
    with torch.no_grad():
        claims = (fast_model(x_adv).argmax(1) != y) & fast_model.surely_correct(x_adv, y)
    rows = claims.nonzero().squeeze(1)
    if len(rows) == 0:
        return x_adv
    how, clean, delta = Attack("polish", REFINE_STEPS, alpha=0.1, loss="margin"), x[rows], (x_adv - x)[rows]
    with full_precision():
        for _ in range(REFINE_STEPS):
            delta, _ = how.step(fast_model.exact_model, clean, y[rows], delta, threat, torch.zeros_like(claims[rows]))
    return x_adv.index_put((rows,), clean + delta)


def build_adversary(model: nn.Module, x: Tensor, threat: ThreatModel, part: str, seed: int) -> Any:
    """The reference implementation's object, set up as its standard version on this number of classes."""
    try:
        from pyautoattack import AutoAttack as Reference
    except ImportError:
        raise UsageError("AutoAttack needs the package pyautoattack: pip install pyautoattack.") from None
    adversary = Reference(model, eps=threat.eps, norm=PYAUTOATTACK_NORMS[threat.name], seed=seed, device=x.device)
    with torch.no_grad():
        wrong = model(x[:1]).shape[1] - 1
    targeted = adversary.apgd_targeted
    targeted.n_target_classes = min(targeted.n_target_classes, wrong)
    adversary.fab.n_target_classes = min(adversary.fab.n_target_classes, wrong)
    if wrong < 3:
        targeted.dlr_loss_targeted = targeted.ce_loss_targeted
    adversary.attacks_to_run = [part]
    return adversary


@contextmanager
def _silence_reference() -> Iterator[None]:
    """Without the reference's own remarks, whose checks the evaluator makes itself; they end any tracing."""
    logger, trace = logging.getLogger("auto-attack"), sys.gettrace()
    before = logger.level
    try:
        logger.setLevel(logging.CRITICAL)
        yield
    finally:
        logger.setLevel(before)
        sys.settrace(trace)
