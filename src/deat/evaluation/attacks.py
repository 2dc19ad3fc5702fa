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

from deat.core.losses import cross_entropy, margin
from deat.errors import unknown
from deat.threat import ThreatModel
from deat.utils.torch_utils import evaluating, spread

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"ce": cross_entropy, "margin": margin}
DROPS = frozenset((1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233))
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
        with torch.inference_mode(False), torch.enable_grad(), evaluating(model):
            x, y = x.clone(), y.clone()  # an inference tensor cannot be differentiated
            found = self._once(model, x, y, threat, threat.start(x, self.start, generator))
            rows = torch.arange(len(x), device=x.device)
            for _ in range(self.restarts - 1):
                rows = rows[still_correct(model, found[rows], y[rows])]
                if len(rows) == 0:
                    break
                start = threat.start(x, self.start, generator)[rows]
                found[rows] = self._once(model, x[rows], y[rows], threat, start)
            return found

    def _once(self, model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, delta: Tensor) -> Tensor:
        """The adversarial images from one start."""
        clean, found, rows = x, delta.clone(), torch.arange(len(x), device=x.device)
        pushed = torch.zeros_like(y, dtype=torch.bool)
        for step in range(1, self.steps + 1):
            delta, fooled = self.step(model, x, y, delta, threat, pushed)
            if self.freeze and step in DROPS and step < self.steps:
                found[rows] = delta
                lost = confirmed(model, x + delta, y, fooled)
                held = (~lost).nonzero().squeeze(1)
                x, y, delta, rows, pushed = x[held], y[held], delta[held], rows[held], (fooled & ~lost)[held]
                if len(rows) == 0:
                    break
        found[rows] = delta
        return (clean + found).detach()

    def step(
        self, model: nn.Module, x: Tensor, y: Tensor, delta: Tensor, threat: ThreatModel, pushed: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The next delta, and whom the last one fooled; those stay where they are, unless they are pushed on."""
        delta = delta.detach().requires_grad_()
        logits = model(x + delta)
        grad = gradient(LOSSES[self.loss](logits, y).sum(), delta)
        moved = threat.move(x, delta.detach(), grad, self.alpha * threat.eps)
        fooled = ~is_right(logits.detach(), y)
        if not self.freeze:
            return moved, fooled
        return torch.where(spread(fooled & ~pushed, x), delta.detach(), moved), fooled


def is_natural(how: object) -> bool:
    """Whether an attack is none: no step from the image itself. Its name says nothing, for anybody's may be any."""
    return type(how) is Attack and how.steps == 0 and how.start == "zero"


def confirmed(model: nn.Module, images: Tensor, y: Tensor, fooled: Tensor) -> Tensor:
    """Which of those claimed to be fooled are: where the attack asks a quick twin, the exact model is asked as well."""
    if not hasattr(model, "surely_correct"):
        return fooled
    index = fooled.nonzero().squeeze(1)
    return fooled.index_put((index,), ~still_correct(model, images[index].detach(), y[index])) if len(index) else fooled


def still_correct(model: nn.Module, images: Tensor, y: Tensor) -> Tensor:
    """Who is classified correctly: by the exact model, where the attack asks a quick twin."""
    surely_correct = getattr(model, "surely_correct", None)
    if surely_correct is not None:
        sure: Tensor = surely_correct(images, y)
        return sure
    with torch.no_grad():
        return is_right(model(images), y)


def is_right(logits: Tensor, y: Tensor) -> Tensor:
    """Who is answered with its label, (B,) bool; a row with a NaN is no answer, for which argmax would name a class."""
    return (logits.argmax(1) == y) & ~logits.isnan().any(1)


FAMILIES: dict[str, Callable[[int], Attack]] = {
    "natural": lambda n: Attack("natural", steps=0, start="zero"),
    "fgsm": lambda n: Attack("fgsm", steps=1, alpha=1.0, start="zero"),
    "pgd-N": lambda n: Attack(f"pgd-{n}", steps=n),
    "cw-N": lambda n: Attack(f"cw-{n}", steps=n, loss="margin"),
}
"""Attacks by name; N is the number of steps."""
HINT = "N may be any number of steps from 1 to 999,999; pgd-20x5 restarts, pgd-20-last is plain."


def attack(name: str | Attack) -> Attack:
    """The attack of that name: pgd-20, cw-100, pgd-50x10 (ten restarts), pgd-10-last (scores the last iterate)."""
    if isinstance(name, Attack):
        return name
    text = name.strip().lower()
    plain, restarts, last = re.fullmatch(r"(.*?)(?:x(\d{1,6}))?(-last)?", text, re.DOTALL).groups()  # type: ignore[union-attr]
    for pattern, build in FAMILIES.items():
        found = re.fullmatch(pattern.replace("N", r"([1-9]\d{0,5})"), plain)
        if found and (found.groups() or plain == text) and restarts != "0":
            how = build(int(found[1]) if found.groups() else 0)
            return replace(how, name=text, restarts=int(restarts or 1), freeze=not last)
    raise unknown("attack", name, [p.replace("N", "20") for p in FAMILIES], HINT)


def gradient(loss: Tensor, inputs: Tensor, slope: Tensor | None = None) -> Tensor:
    """The gradient of a loss, or of any answer along a slope; zero where the model lets none through."""
    if not loss.requires_grad:
        return torch.zeros_like(inputs)
    (grad,) = torch.autograd.grad(loss, inputs, slope, allow_unused=True, materialize_grads=True)
    return grad


def correct(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    how: Attack,
    threat: ThreatModel,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Which images are still classified correctly under an attack, (B,) bool on the device."""
    return is_right(attacked(model, x, y, how, threat, generator), y)


def attacked(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    how: Attack,
    threat: ThreatModel,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The logits of the attacked images; an example outside ball or box counts as no attack."""
    adv = how(model, x, y, threat, generator)
    adv = torch.where(spread(threat.contains(x, adv), x), adv, x)
    with torch.no_grad(), evaluating(model):
        logits: Tensor = model(adv)
    return logits
