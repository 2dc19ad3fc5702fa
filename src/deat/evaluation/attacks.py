"""FGSM, PGD-n and CW-n as the paper evaluates with them.

An attack is frozen data; model, images and threat model come when it is called. It enables gradients by
itself, so it works under no_grad and inference_mode, and it leaves the model as it found it.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from deat.core.losses import cross_entropy, margin_loss
from deat.errors import unknown_name_error
from deat.threat import ThreatModel
from deat.utils.torch_utils import broadcast_mask, eval_mode

ATTACK_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"ce": cross_entropy, "margin": margin_loss}
DROP_FOOLED_STEPS = frozenset((1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233))
"""The steps after which fooled images leave the batch; in between they only stay where they are."""


@dataclass(frozen=True)
class Attack:
    """A projected-gradient attack: `steps` of alpha (in units of eps) on a loss, from a start.

    freeze leaves an image where it is once it is misclassified, so that what is scored is the worst
    iterate; without it the last one is. A restart attacks only whom the others left, by the exact model's word where
    the attack asks a quick twin; its starts are drawn for all images, so nobody's depends on who fell before.
    """

    name: str
    steps: int
    alpha: float = 0.25
    start: str = "uniform"
    loss: Literal["ce", "margin"] = "ce"
    freeze: bool = True
    restarts: int = 1

    def __call__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        threat: ThreatModel,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """The adversarial images."""
        with torch.inference_mode(False), torch.enable_grad(), eval_mode(model):
            x, y = x.clone(), y.clone()  # an inference tensor cannot be differentiated
            found = self._attack_from_start(model, x, y, threat, threat.initial_delta(x, self.start, generator))
            rows = torch.arange(len(x), device=x.device)
            for _ in range(self.restarts - 1):
                rows = rows[is_still_correct(model, found[rows], y[rows])]
                if len(rows) == 0:
                    break
                start = threat.initial_delta(x, self.start, generator)[rows]
                found[rows] = self._attack_from_start(model, x[rows], y[rows], threat, start)
            return found

    def _attack_from_start(self, model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, delta: Tensor) -> Tensor:
        """The adversarial images from one start."""
        clean, found, rows = x, delta.clone(), torch.arange(len(x), device=x.device)
        pushed = torch.zeros_like(y, dtype=torch.bool)
        for step in range(1, self.steps + 1):
            delta, fooled = self.step(model, x, y, delta, threat, pushed)
            if self.freeze and step in DROP_FOOLED_STEPS and step < self.steps:
                found[rows] = delta
                lost = confirm_fooled(model, x + delta, y, fooled)
                held = (~lost).nonzero().squeeze(1)
                x, y, delta, rows, pushed = x[held], y[held], delta[held], rows[held], (fooled & ~lost)[held]
                if len(rows) == 0:
                    break
        found[rows] = delta
        return (clean + found).detach()

    def step(
        self, model: nn.Module, x: Tensor, y: Tensor, delta: Tensor, threat: ThreatModel, unfrozen: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The next delta, and whom the last one fooled; those stay where they are, unless they are pushed on."""
        delta = delta.detach().requires_grad_()
        logits = model(x + delta)
        grad = compute_gradient(ATTACK_LOSSES[self.loss](logits, y).sum(), delta)
        moved = threat.pgd_step(x, delta.detach(), grad, self.alpha * threat.eps)
        fooled = ~is_correct(logits.detach(), y)
        if not self.freeze:
            return moved, fooled
        return torch.where(broadcast_mask(fooled & ~unfrozen, x), delta.detach(), moved), fooled


def is_natural(attack: object) -> bool:
    """Whether an attack is none: no step from the image itself. Its name says nothing, for anybody's may be any."""
    return type(attack) is Attack and attack.steps == 0 and attack.start == "zero"


def confirm_fooled(model: nn.Module, images: Tensor, y: Tensor, fooled: Tensor) -> Tensor:
    """Which of those claimed to be fooled are: where the attack asks a quick twin, the exact model is asked as well."""
    if not hasattr(model, "exact_correct"):
        return fooled
    index = fooled.nonzero().squeeze(1)
    return (
        fooled.index_put((index,), ~is_still_correct(model, images[index].detach(), y[index])) if len(index) else fooled
    )


def is_still_correct(model: nn.Module, images: Tensor, y: Tensor) -> Tensor:
    """Who is classified correctly: by the exact model, where the attack asks a quick twin."""
    exact_correct = getattr(model, "exact_correct", None)
    if exact_correct is not None:
        sure: Tensor = exact_correct(images, y)
        return sure
    with torch.no_grad():
        return is_correct(model(images), y)


def is_correct(logits: Tensor, y: Tensor) -> Tensor:
    """Who is answered with its label, (B,) bool; a row with a NaN is no answer, for which argmax would name a class."""
    return (logits.argmax(1) == y) & ~logits.isnan().any(1)


ATTACK_FAMILIES: dict[str, Callable[[int], Attack]] = {
    "natural": lambda n: Attack("natural", steps=0, start="zero"),
    "fgsm": lambda n: Attack("fgsm", steps=1, alpha=1.0, start="zero"),
    "pgd-N": lambda n: Attack(f"pgd-{n}", steps=n),
    "cw-N": lambda n: Attack(f"cw-{n}", steps=n, loss="margin"),
}
"""Attacks by name; N is the number of steps."""
ATTACK_NAME_HINT = "N may be any number of steps from 1 to 999,999; pgd-20x5 restarts, pgd-20-last is plain."


def parse_attack(name: str | Attack) -> Attack:
    """The attack of that name: pgd-20, cw-100, pgd-50x10 (ten restarts), pgd-10-last (scores the last iterate)."""
    if isinstance(name, Attack):
        return name
    text = name.strip().lower()
    plain, restarts, last = re.fullmatch(r"(.*?)(?:x(\d{1,6}))?(-last)?", text, re.DOTALL).groups()  # type: ignore[union-attr]
    for pattern, build in ATTACK_FAMILIES.items():
        found = re.fullmatch(pattern.replace("N", r"([1-9]\d{0,5})"), plain)
        if found and (found.groups() or plain == text) and restarts != "0":
            how = build(int(found[1]) if found.groups() else 0)
            return replace(how, name=text, restarts=int(restarts or 1), freeze=not last)
    raise unknown_name_error("attack", name, [p.replace("N", "20") for p in ATTACK_FAMILIES], ATTACK_NAME_HINT)


def compute_gradient(loss: Tensor, inputs: Tensor, grad_output: Tensor | None = None) -> Tensor:
    """The gradient of a loss, or of any answer along a slope; zero where the model lets none through."""
    if not loss.requires_grad:
        return torch.zeros_like(inputs)
    (grad,) = torch.autograd.grad(loss, inputs, grad_output, allow_unused=True, materialize_grads=True)
    return grad


def correct_under_attack(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    attack: Attack,
    threat: ThreatModel,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Which images are still classified correctly under an attack, (B,) bool on the device."""
    return is_correct(logits_under_attack(model, x, y, attack, threat, generator), y)


def logits_under_attack(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    attack: Attack,
    threat: ThreatModel,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The logits of the attacked images; an example outside ball or box counts as no attack."""
    adv = attack(model, x, y, threat, generator)
    adv = torch.where(broadcast_mask(threat.contains(x, adv), x), adv, x)
    with torch.no_grad(), eval_mode(model):
        logits: Tensor = model(adv)
    return logits
