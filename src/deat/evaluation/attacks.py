"""FGSM, PGD-n and CW-n as the paper evaluates with them.

An attack is frozen data; model, images and threat model come when it is called. It enables gradients by itself, so
that it works under no_grad and inference_mode, and it leaves the model's mode and gradients unchanged.
"""

import re
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from deat.data.image_label_checks import check_images
from deat.errors import UsageError, unknown_name_error
from deat.tasks import CLASSIFICATION, Task
from deat.threat import ThreatModel, parse_threat
from deat.utils.torch_contexts import broadcast_mask, eval_mode
from deat.utils.user_code import accepts_argument

DROP_FOOLED_STEPS = frozenset((1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233))
"""The steps after which misclassified images leave the batch; in between they only stop moving."""
FULL_BATCH = 128
"""With fewer images left, some attacks put several queries about each image into a batch, so that each costs less."""
RESERVED_NAME = re.compile(r"(natural|fgsm|(pgd|cw|segpgd)-([1-9]\d{0,5}))(?:x([1-9]\d{0,5}))?(-last)?")
"""Names that say what an attack does: its family, steps, restarts, and whether the last iterate is scored."""
AUTOATTACK_NAMES = ("aa", "autoattack", "auto-attack", "auto_attack")
"""Names that AutoAttack goes by; results and records have the first."""
AUTOATTACK_PARTS = ("apgd-ce", "apgd-t", "fab-t", "square")
"""Parts of AutoAttack, in their order."""


AnyAttack = TypeVar("AnyAttack")


@dataclass(frozen=True)
class Attack:
    """A projected-gradient attack.

    Each restart attacks only the images that are still classified correctly. Random starts are drawn for all
    images, so that those of an image do not depend on the others. On a task whose answers are more or less wrong, such as
    segmentation, the iterate with the lowest score of each image is the result.

    Args:
        name: Name in tables. A name of deat's own, such as pgd-20, is refused for other steps, another loss or other
            restarts than it says.
        steps: Number of gradient steps.
        alpha: Step size, in units of eps.
        start: Where the perturbation starts: zero, uniform, normal, bernoulli or jitter.
        loss: "ce" (the task's loss, such as cross-entropy), "margin" (the difference of logits of Carlini and Wagner), or
            "segpgd" (segmentation only: pixels that are still right count more).
        freeze: Stop moving an image once it is misclassified, so that the worst iterate is scored, or else the last one.
            By default evaluations stop, and a call of your own runs all steps on every image, as training needs it.
        restarts: Number of runs from different starts.

    Example:
        >>> attack = deat.Attack("cw-50", steps=50, alpha=0.1, loss="margin")
        >>> x_adv = attack(model, x, y, deat.Linf(8 / 255))  # all 50 steps, on every image
    """

    name: str
    steps: int
    alpha: float = 0.25
    start: str = "uniform"
    loss: Literal["ce", "margin", "segpgd"] = "ce"
    freeze: bool | None = None
    restarts: int = 1

    def __post_init__(self) -> None:
        """Raise UsageError if the name says something else than the settings."""
        _check_name(self)

    def __call__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        threat: ThreatModel | str,
        generator: torch.Generator | None = None,
        task: Task = CLASSIFICATION,
    ) -> Tensor:
        """Attack a batch.

        Args:
            model: Network that returns logits, or what else the task reads.
            x: Images (B, ...) in [0, 1], or other inputs in the box of the threat model.
            y: Labels, with the examples first.
            threat: Threat model, or text such as "linf:8/255".
            generator: Source of random starts; by default torch's own.
            task: What outputs and labels mean.

        Returns:
            The adversarial examples, shaped like x.

        Raises:
            UsageError: The examples, the labels or the threat model are not accepted.
            DataError: A value is outside the box of the threat model, or the labels are not of the task.
        """
        self.check_task(task)
        threat = check_attack_inputs(x, threat)
        y = check_attack_labels(x, y, task)
        with torch.inference_mode(False), torch.enable_grad(), eval_mode(model):
            x, y = x.clone(), y.clone()  # an inference tensor cannot be differentiated
            x_adv = self._attack_from_start(model, x, y, threat, threat.initial_delta(x, self.start, generator), task)
            rows = torch.arange(len(x), device=x.device)
            for _ in range(self.restarts - 1):
                rows = rows[~is_beaten(model, x_adv[rows], y[rows], task)]
                if len(rows) == 0:
                    break
                start = threat.initial_delta(x, self.start, generator)[rows]
                again = self._attack_from_start(model, x[rows], y[rows], threat, start, task)
                x_adv[rows] = choose_worse(model, x_adv[rows], again, y[rows], task) if task.is_graded else again
            return x_adv

    def resume(
        self, model: nn.Module, x: Tensor, y: Tensor, x_adv: Tensor, threat: ThreatModel, task: Task = CLASSIFICATION
    ) -> Tensor:
        """Take all steps once more, from adversarial examples instead of from a start; restarts are not made.

        Args:
            model: Network that returns logits.
            x: Images (B, ...).
            y: Labels, with the examples first.
            x_adv: What an earlier call returned for them.
            threat: Threat model.
            task: What outputs and labels mean.

        Returns:
            The adversarial examples after twice the steps.
        """
        with torch.inference_mode(False), torch.enable_grad(), eval_mode(model):
            x, y = x.clone(), y.clone()
            return self._attack_from_start(model, x, y, threat, x_adv - x, task)

    def check_task(self, task: Task) -> None:
        """Raise UsageError if the task does not define the loss of this attack.

        Args:
            task: The task.

        Raises:
            UsageError: The task does not define it.
        """
        if self.loss not in task.attack_losses:
            known = ", ".join(map(repr, task.attack_losses))
            reason = (
                task.why_undefined("margin")
                if self.loss == "margin"
                else f"it belongs to segmentation, not {task.name}"
            )
            raise UsageError(
                f"the attack {self.name} maximises {self.loss!r}: {reason}. Use a loss of the task: {known}."
            )

    def _attack_from_start(
        self, model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, delta: Tensor, task: Task
    ) -> Tensor:
        """The adversarial examples from one start."""
        clean, result, rows = x, delta.clone(), torch.arange(len(x), device=x.device)
        all_y, keeps_worst = y, self.freeze is not False and task.is_graded and self.steps > 0
        lowest = x.new_full((len(x),), torch.inf)
        unfrozen = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        for step in range(1, self.steps + 1):
            before = delta
            done = (step - 1) / self.steps
            delta, fooled, outputs = self._move(model, x, y, delta, threat, unfrozen, task, done)
            if keeps_worst:
                _keep_worst(result, lowest, rows, before, task.score(outputs, y))
            if self.freeze and step in DROP_FOOLED_STEPS and step < self.steps:
                if not keeps_worst:
                    result[rows] = delta
                is_fooled = confirm_fooled(model, x + delta, y, fooled, task)
                left = (~is_fooled).nonzero().squeeze(1)
                x, y, delta, rows, unfrozen = x[left], y[left], delta[left], rows[left], (fooled & ~is_fooled)[left]
                if len(rows) == 0:
                    break
        if not keeps_worst:
            result[rows] = delta
        elif len(rows):
            with torch.no_grad():
                _keep_worst(result, lowest, rows, delta, task.score(model(x + delta), all_y[rows]))
        return (clean + result).detach()

    def step(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        delta: Tensor,
        threat: ThreatModel,
        unfrozen: Tensor,
        task: Task = CLASSIFICATION,
    ) -> tuple[Tensor, Tensor]:
        """Take one gradient step.

        Args:
            model: Network that returns logits.
            x: Images (B, ...).
            y: Labels, with the examples first.
            delta: Perturbations, shaped like x.
            threat: Threat model.
            unfrozen: Images (B,) bool that move although they are misclassified.
            task: What outputs and labels mean.

        Returns:
            The next perturbations, and which images the last ones fooled, (B,) bool. With freeze these do not move.
        """
        return self._move(model, x, y, delta, threat, unfrozen, task, 0.0)[:2]

    def _move(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        delta: Tensor,
        threat: ThreatModel,
        unfrozen: Tensor,
        task: Task,
        done: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The next perturbations, and at the last ones: which examples they fool, and the outputs."""
        delta = delta.detach().requires_grad_()
        outputs = model(x + delta)
        grad = compute_gradient(task.attack_losses[self.loss](outputs, y, done).sum(), delta)
        moved, outputs = threat.pgd_step(x, delta.detach(), grad, self.alpha * threat.eps), outputs.detach()
        fooled = task.is_beaten(outputs, y)
        if self.freeze:
            moved = torch.where(broadcast_mask(fooled & ~unfrozen, x), delta.detach(), moved)
        return moved, fooled, outputs


def _check_name(attack: Attack) -> None:
    """Refuse a name that tells readers of a table something that the attack does not do."""
    if not isinstance(attack.name, str):
        raise UsageError(f"the name of an attack must be text, not {attack.name!r}.")
    name = attack.name.strip().lower()
    if name in (*AUTOATTACK_NAMES, *AUTOATTACK_PARTS):
        raise UsageError(f"{attack.name!r} is AutoAttack or a part of it: give this attack another name.")
    if not (match := RESERVED_NAME.fullmatch(name)):
        return
    base, family, steps, restarts, last = match.groups()
    said = {
        "steps": int(steps) if steps else int(base == "fgsm"),
        "loss": {"cw": "margin", "segpgd": "segpgd"}.get(family, "ce"),
        "restarts": int(restarts or 1),
        **({"freeze": False} if last else {}),
    }
    other = [f"{key}={value!r}" for key, value in said.items() if getattr(attack, key) != value]
    if other:
        raise UsageError(f"an attack named {attack.name!r} has {', '.join(other)}: give this one another name.")


def check_attack_inputs(x: Any, threat: Any) -> ThreatModel:
    """Check the examples and the threat model that an attack is called with.

    Args:
        x: The examples.
        threat: The threat model, or its text.

    Returns:
        The threat model.

    Raises:
        UsageError: The examples are not a floating-point tensor, or the threat model is not valid.
        DataError: A value is outside the box of the threat model.
    """
    if not isinstance(threat, str | ThreatModel):
        raise UsageError(f"{threat!r} is no threat model: give deat.Linf(8 / 255), or text such as 'linf:8/255'.")
    ball: ThreatModel = parse_threat(threat)
    if not isinstance(x, Tensor):
        raise UsageError(f"the examples are a {type(x).__name__}: give a float tensor, torch.as_tensor(x).")
    if not x.is_floating_point():
        scaled = "x.float() / 255" if x.dtype == torch.uint8 else "x.float()"
        raise UsageError(f"the examples are {x.dtype}, which an attack cannot change by eps: give {scaled}.")
    if len(x):
        check_images(x, box=ball.box)
    return ball


def check_attack_labels(x: Tensor, y: Any, task: Task) -> Tensor:
    """Check the labels that an attack is called with.

    Args:
        x: The examples.
        y: Their labels.
        task: What labels mean.

    Returns:
        The labels, as the task takes them.

    Raises:
        UsageError: The labels are no tensor, or not one for each example.
        DataError: The task does not accept them.
    """
    if not isinstance(y, Tensor):
        raise UsageError(f"the labels are a {type(y).__name__}: give a tensor, torch.as_tensor(y).")
    if y.dim() == 0 or len(x) != len(y):
        raise UsageError(f"there are {len(x)} examples, and labels of shape {tuple(y.shape)}: give one for each.")
    labels: Tensor = task.prepare_labels(y) if len(x) else y
    return labels


def _keep_worst(result: Tensor, lowest: Tensor, rows: Tensor, delta: Tensor, scores: Tensor) -> None:
    """Keep the perturbations of the rows whose score is lower than before, in place; NaN counts as lowest."""
    scores = scores.to(lowest.dtype).nan_to_num(nan=-torch.inf)
    is_worse = scores < lowest[rows]
    result[rows[is_worse]] = delta.detach()[is_worse]
    lowest[rows[is_worse]] = scores[is_worse]


def choose_worse(model: nn.Module, first: Tensor, second: Tensor, y: Tensor, task: Task) -> Tensor:
    """Return for each example the one of two adversarial examples with the lower score, by the exact model."""
    scores = [task.score(exact_outputs(model, adv), y).nan_to_num(nan=-torch.inf) for adv in (first, second)]
    return torch.where(broadcast_mask(scores[1] < scores[0], first), second, first)


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

    def exact_outputs(self, x: Tensor) -> Tensor:
        """Return the outputs of the exact model."""


def exact_outputs(model: nn.Module, x: Tensor) -> Tensor:
    """Return a model's outputs without gradients, by the exact model where the attack queries a fast one."""
    if isinstance(model, HasExactModel):
        return model.exact_outputs(x)
    with torch.no_grad():
        outputs: Tensor = model(x)
    return outputs


def is_beaten(model: nn.Module, x: Tensor, y: Tensor, task: Task = CLASSIFICATION) -> Tensor:
    """Return for which examples an attack has nothing left to gain, by the exact model.

    Args:
        model: Network, or a FastModel of one.
        x: Images (B, ...).
        y: Labels, with the examples first.
        task: What outputs and labels mean.

    Returns:
        (B,) bool; for classification, which images are misclassified.
    """
    return task.is_beaten(exact_outputs(model, x), y)


def confirm_fooled(model: nn.Module, images: Tensor, y: Tensor, fooled: Tensor, task: Task = CLASSIFICATION) -> Tensor:
    """Confirm misclassified images by the exact model, where the attack queries a fast one.

    Args:
        model: Network, or a FastModel of one.
        images: Images (B, ...).
        y: Labels, with the examples first.
        fooled: Images (B,) bool that the queried model is wrong about.
        task: What outputs and labels mean.

    Returns:
        Those of them that the exact model is wrong about too, (B,) bool.
    """
    if not isinstance(model, HasExactModel):
        return fooled
    index = fooled.nonzero().squeeze(1)
    if not len(index):
        return fooled
    return fooled.index_put((index,), is_beaten(model, images[index].detach(), y[index], task))


def count_queries_at_once(model: nn.Module, num_left: int, num_given: int) -> int:
    """Return how many queries about each image an attack may put into one batch.

    Args:
        model: What is queried. One with `block_images` has been given so many images before, so that a batch may have as many.
        num_left: Images that are still attacked.
        num_given: Images that the attack was called with.

    Returns:
        At least 1. A batch never has more images than a block, whose size the user chooses by the memory.
    """
    return max(1, min(FULL_BATCH, max(num_given, getattr(model, "block_images", 0))) // max(num_left, 1))


def as_evaluated(attack: AnyAttack) -> AnyAttack:
    """Return an attack as evaluations run it: an Attack that leaves it open stops at misclassified images."""
    if not isinstance(attack, Attack) or attack.freeze is not None:
        return attack
    evaluated = copy(attack)  # not replace(): a class of the user's may be built from other arguments
    object.__setattr__(evaluated, "freeze", True)
    return evaluated


def call_attack(
    attack: Callable[..., Tensor],
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: ThreatModel,
    generator: torch.Generator | None,
    task: Task,
) -> Tensor:
    """Call any attack in every ball of a threat model; one with a parameter called `task` receives the task.

    Returns:
        The adversarial examples. Of several balls' it is the one that the model is most wrong about.
    """
    attack = as_evaluated(attack)
    options = {"task": task} if accepts_argument(attack, "task") else {}
    worst: Tensor | None = None
    for ball in threat.balls[:1] if is_natural(attack) else threat.balls:
        adv = attack(model, x, y, ball, generator, **options)
        worst = adv if worst is None else _choose_most_wrong(model, worst, adv, y, task)
    return x if worst is None else worst


def _choose_most_wrong(model: nn.Module, first: Tensor, second: Tensor, y: Tensor, task: Task) -> Tensor:
    """For each example the one of two with the lower score, or where these are equal, with the higher loss."""
    with eval_mode(model):
        outputs = [exact_outputs(model, adv) for adv in (first, second)]
    scores = [task.score(output, y).double().nan_to_num(nan=-torch.inf) for output in outputs]
    losses = [task.loss(output, y) for output in outputs]
    is_worse = (scores[1] < scores[0]) | ((scores[1] == scores[0]) & (losses[1] > losses[0]))
    return torch.where(broadcast_mask(is_worse, first), second, first)


ATTACK_FAMILIES: dict[str, Callable[[int], Attack]] = {
    "natural": lambda n: Attack("natural", steps=0, start="zero"),
    "fgsm": lambda n: Attack("fgsm", steps=1, alpha=1.0, start="zero"),
    "pgd-N": lambda n: Attack(f"pgd-{n}", steps=n),
    "cw-N": lambda n: Attack(f"cw-{n}", steps=n, loss="margin"),
    "segpgd-N": lambda n: Attack(f"segpgd-{n}", steps=n, loss="segpgd"),
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
    task: Task = CLASSIFICATION,
) -> Tensor:
    """Return how right each answer still is under an attack.

    Args:
        model: Network that returns logits.
        x: Images (B, ...).
        y: Labels, with the examples first.
        attack: The attack.
        threat: Threat model.
        generator: Source of random starts; by default torch's own.
        task: What outputs and labels mean.

    Returns:
        The task's accuracy of each example, on the device: (B,) bool for classification.
    """
    return task.accuracy(logits_under_attack(model, x, y, attack, threat, generator, task), y)


def logits_under_attack(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    attack: Attack,
    threat: ThreatModel,
    generator: torch.Generator | None = None,
    task: Task = CLASSIFICATION,
) -> Tensor:
    """Return the outputs for attacked examples. One outside the ball or the box is replaced by the clean example.

    Args:
        model: Network that returns logits.
        x: Images (B, ...).
        y: Labels, with the examples first.
        attack: The attack.
        threat: Threat model.
        generator: Source of random starts; by default torch's own.
        task: What outputs and labels mean.

    Returns:
        The network's outputs, such as logits (B, classes).
    """
    adv = attack_examples(model, x, y, attack, threat, generator, task)
    with eval_mode(model):
        return exact_outputs(model, adv)


def attack_examples(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    attack: Attack,
    threat: ThreatModel,
    generator: torch.Generator | None = None,
    task: Task = CLASSIFICATION,
) -> Tensor:
    """Return the adversarial examples; the arguments are those of `logits_under_attack`."""
    return keep_valid(x, call_attack(attack, model, x, y, threat, generator, task), threat)


def keep_valid(x: Tensor, x_adv: Tensor, threat: ThreatModel) -> Tensor:
    """Return the adversarial examples, and the clean one in place of each that is outside the ball or the box."""
    return torch.where(broadcast_mask(threat.contains(x, x_adv), x), x_adv, x)
