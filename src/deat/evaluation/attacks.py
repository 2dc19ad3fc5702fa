"""FGSM, PGD-n and CW-n as the paper evaluates with them.

An attack is frozen data; model, images and threat model come when it is called. It enables gradients by itself, so
that it works under no_grad and inference_mode, and it leaves the model's mode and gradients unchanged.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from deat.core.loss_terms import cross_entropy, margin_loss
from deat.errors import unknown_name_error
from deat.threat import ThreatModel
from deat.utils.torch_utils import broadcast_mask, eval_mode

ATTACK_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"ce": cross_entropy, "margin": margin_loss}
DROP_FOOLED_STEPS = frozenset((1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233))
"""The steps after which misclassified images leave the batch; in between they only stop moving."""


@dataclass(frozen=True)
class Attack:
    """A projected-gradient attack.

    Each restart attacks only the images that are still classified correctly. Random starts are drawn for all
    images, so that those of an image do not depend on the others.

    Args:
        name: Name in tables.
        steps: Number of gradient steps.
        alpha: Step size, in units of eps.
        start: Where the perturbation starts: zero, uniform, normal, bernoulli or jitter.
        loss: "ce" (cross-entropy) or "margin" (the difference of logits of Carlini and Wagner).
        freeze: Stop moving an image once it is misclassified, so that the worst iterate is scored. Without it the last
            iterate is.
        restarts: Number of runs from different starts.

    Example:
        >>> attack = deat.Attack("cw-50", steps=50, alpha=0.1, loss="margin")
        >>> x_adv = attack(model, x, y, deat.Linf(8 / 255))
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
        """Attack a batch.

        Args:
            model: Network that returns logits.
            x: Images (B, ...) in [0, 1].
            y: Labels (B,).
            threat: Threat model.
            generator: Source of random starts; by default torch's own.

        Returns:
            The adversarial examples, shaped like x.
        """
        with torch.inference_mode(False), torch.enable_grad(), eval_mode(model):
            x, y = x.clone(), y.clone()  # an inference tensor cannot be differentiated
            x_adv = self._attack_from_start(model, x, y, threat, threat.initial_delta(x, self.start, generator))
            rows = torch.arange(len(x), device=x.device)
            for _ in range(self.restarts - 1):
                rows = rows[is_still_correct(model, x_adv[rows], y[rows])]
                if len(rows) == 0:
                    break
                start = threat.initial_delta(x, self.start, generator)[rows]
                x_adv[rows] = self._attack_from_start(model, x[rows], y[rows], threat, start)
            return x_adv

    def _attack_from_start(self, model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, delta: Tensor) -> Tensor:
        """The adversarial examples from one start."""
        clean, result, rows = x, delta.clone(), torch.arange(len(x), device=x.device)
        unfrozen = torch.zeros_like(y, dtype=torch.bool)
        for step in range(1, self.steps + 1):
            delta, fooled = self.step(model, x, y, delta, threat, unfrozen)
            if self.freeze and step in DROP_FOOLED_STEPS and step < self.steps:
                result[rows] = delta
                is_fooled = confirm_fooled(model, x + delta, y, fooled)
                left = (~is_fooled).nonzero().squeeze(1)
                x, y, delta, rows, unfrozen = x[left], y[left], delta[left], rows[left], (fooled & ~is_fooled)[left]
                if len(rows) == 0:
                    break
        result[rows] = delta
        return (clean + result).detach()

    def step(
        self, model: nn.Module, x: Tensor, y: Tensor, delta: Tensor, threat: ThreatModel, unfrozen: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Take one gradient step.

        Args:
            model: Network that returns logits.
            x: Images (B, ...).
            y: Labels (B,).
            delta: Perturbations, shaped like x.
            threat: Threat model.
            unfrozen: Images (B,) bool that move although they are misclassified.

        Returns:
            The next perturbations, and which images the last ones fooled, (B,) bool. With freeze these do not move.
        """
        delta = delta.detach().requires_grad_()
        logits = model(x + delta)
        grad = compute_gradient(ATTACK_LOSSES[self.loss](logits, y).sum(), delta)
        moved = threat.pgd_step(x, delta.detach(), grad, self.alpha * threat.eps)
        fooled = ~is_correct(logits.detach(), y)
        if not self.freeze:
            return moved, fooled
        return torch.where(broadcast_mask(fooled & ~unfrozen, x), delta.detach(), moved), fooled


def is_natural(attack: object) -> bool:
    """Return whether an attack leaves images unchanged. Its name does not matter, since any attack may have any name.

    Args:
        attack: Any attack.

    Returns:
        True for an Attack of no steps from the image itself.
    """
    return type(attack) is Attack and attack.steps == 0 and attack.start == "zero"


@runtime_checkable
class HasExactModel(Protocol):
    """A fast model whose claims an exact model confirms or rejects, such as `fast_model.FastModel`."""

    def exact_correct(self, x: Tensor, y: Tensor) -> Tensor:
        """Return which images the exact model classifies correctly, (B,) bool."""


def confirm_fooled(model: nn.Module, images: Tensor, y: Tensor, fooled: Tensor) -> Tensor:
    """Confirm misclassified images by the exact model, where the attack queries a fast one.

    Args:
        model: Network, or a FastModel of one.
        images: Images (B, ...).
        y: Labels (B,).
        fooled: Images (B,) bool that the queried model misclassifies.

    Returns:
        Those of them that the exact model misclassifies too, (B,) bool.
    """
    if not isinstance(model, HasExactModel):
        return fooled
    index = fooled.nonzero().squeeze(1)
    return (
        fooled.index_put((index,), ~is_still_correct(model, images[index].detach(), y[index])) if len(index) else fooled
    )


def is_still_correct(model: nn.Module, images: Tensor, y: Tensor) -> Tensor:
    """Return which images are classified correctly, by the exact model where the attack queries a fast one.

    Args:
        model: Network, or a FastModel of one.
        images: Images (B, ...).
        y: Labels (B,).

    Returns:
        (B,) bool.
    """
    if isinstance(model, HasExactModel):
        return model.exact_correct(images, y)
    with torch.no_grad():
        return is_correct(model(images), y)


def is_correct(logits: Tensor, y: Tensor) -> Tensor:
    """Return which rows of logits have their largest value at the label. A row with a NaN is never correct.

    Args:
        logits: Logits (B, classes).
        y: Labels (B,).

    Returns:
        (B,) bool.
    """
    return (logits.argmax(1) == y) & ~logits.isnan().any(1)


ATTACK_FAMILIES: dict[str, Callable[[int], Attack]] = {
    "natural": lambda n: Attack("natural", steps=0, start="zero"),
    "fgsm": lambda n: Attack("fgsm", steps=1, alpha=1.0, start="zero"),
    "pgd-N": lambda n: Attack(f"pgd-{n}", steps=n),
    "cw-N": lambda n: Attack(f"cw-{n}", steps=n, loss="margin"),
}
"""Attacks by name; N is the number of steps."""
ATTACK_NAME_HINT = (
    "N may be any number of steps from 1 to 999,999; pgd-20x5 has five restarts, pgd-20-last scores the last iterate."
)


def parse_attack(name: str | Attack) -> Attack:
    """Return the gradient attack of a name.

    Args:
        name: Such as pgd-20, cw-100, pgd-50x10 (ten restarts) or pgd-10-last (scores the last iterate), or an Attack,
            which is returned as it is.

    Returns:
        The attack.

    Raises:
        UsageError: If no attack has this name.
    """
    if isinstance(name, Attack):
        return name
    text = name.strip().lower()
    base, restarts, last = re.fullmatch(r"(.*?)(?:x(\d{1,6}))?(-last)?", text, re.DOTALL).groups()  # type: ignore[union-attr]
    for pattern, build in ATTACK_FAMILIES.items():
        match = re.fullmatch(pattern.replace("N", r"([1-9]\d{0,5})"), base)
        if match and (match.groups() or base == text) and restarts != "0":
            attack = build(int(match[1]) if match.groups() else 0)
            return replace(attack, name=text, restarts=int(restarts or 1), freeze=not last)
    raise unknown_name_error("attack", name, [p.replace("N", "20") for p in ATTACK_FAMILIES], ATTACK_NAME_HINT)


def compute_gradient(loss: Tensor, inputs: Tensor, grad_output: Tensor | None = None) -> Tensor:
    """Compute a gradient, which is zero where the model lets none through.

    Args:
        loss: A scalar, or any output together with grad_output.
        inputs: Tensor to differentiate by.
        grad_output: Gradient with respect to the output.

    Returns:
        The gradient, shaped like inputs.
    """
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
    """Return which images are still classified correctly under an attack.

    Args:
        model: Network that returns logits.
        x: Images (B, ...).
        y: Labels (B,).
        attack: The attack.
        threat: Threat model.
        generator: Source of random starts; by default torch's own.

    Returns:
        (B,) bool, on the device.
    """
    return is_correct(logits_under_attack(model, x, y, attack, threat, generator), y)


def logits_under_attack(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    attack: Attack,
    threat: ThreatModel,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return the logits of attacked images. An example outside the ball or the box is replaced by the clean image.

    Args:
        model: Network that returns logits.
        x: Images (B, ...).
        y: Labels (B,).
        attack: The attack.
        threat: Threat model.
        generator: Source of random starts; by default torch's own.

    Returns:
        Logits (B, classes).
    """
    adv = attack(model, x, y, threat, generator)
    adv = torch.where(broadcast_mask(threat.contains(x, adv), x), adv, x)
    with torch.no_grad(), eval_mode(model):
        logits: Tensor = model(adv)
    return logits
