"""deat.attack: an attack by name, for training loops and evaluations of one's own, with its inputs checked."""

from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from deat.errors import UsageError
from deat.evaluation.attack_registry import get_attack
from deat.evaluation.attack_verifier import AttackLike
from deat.evaluation.attacks import Attack, call_attack, check_attack_inputs, check_attack_labels, is_natural
from deat.models.interface_checks import check_model, describe_output, logits_hint
from deat.radius_checks import check_radius
from deat.tasks import CLASSIFICATION, Task, get_task
from deat.threat import ThreatModel, parse_threat
from deat.utils.numbers import parse_number
from deat.utils.torch_contexts import eval_mode


@dataclass(frozen=True)
class BoundAttack:
    """An attack with its threat model and task. `deat.attack` makes it.

    Attributes:
        attack: The attack.
        threat: The threat model.
        task: What outputs and labels mean.
    """

    attack: AttackLike
    threat: ThreatModel
    task: Task = CLASSIFICATION
    _num_outputs: "WeakKeyDictionary[nn.Module, int]" = field(
        default_factory=WeakKeyDictionary, init=False, repr=False, compare=False
    )

    @property
    def name(self) -> str:
        """The attack's name."""
        return self.attack.name

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Attack a batch.

        The model is queried in eval mode, and is in its own mode again after the call. Its weights and their gradients
        are left as they are. The call works inside `torch.no_grad()` and `inference_mode()`.

        Args:
            model: A network that maps the inputs to logits, or to what else the task reads.
            x: Images (B, ...) in [0, 1], or other inputs in the box of the threat model.
            y: Labels, with the examples first: class numbers (B,) for classification.
            generator: Source of random starts; by default torch's own.

        Returns:
            The adversarial examples, inside the ball and the box, without a graph.

        Raises:
            UsageError: The model, the inputs or their devices are not accepted; the message says how to change them.
            DataError: A value is outside the box, or a label is not accepted.
        """
        y = self._check(model, x, y)
        if len(x) == 0 or is_natural(self.attack):
            return x.detach().clone()
        adv = call_attack(self.attack, model, x, y, self.threat, generator, self.task).detach()
        if not isinstance(self.attack, Attack) and (adv.shape != x.shape or not self.threat.contains(x, adv).all()):
            raise UsageError(
                f"the attack {self.name} returned examples of another shape, or outside the ball or the box of "
                f"{self.threat}: repair it, for example by threat.project."
            )
        return adv

    def _check(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Check what the attack is called with.

        Returns:
            The labels, as the task takes them.
        """
        check_model(model)
        weight = next((p for p in model.parameters() if p.is_floating_point()), None)
        _check_devices(weight, x, y)
        check_attack_inputs(x, self.threat)
        labels = check_attack_labels(x, y, self.task)
        if weight is not None and weight.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
            name = str(weight.dtype).removeprefix("torch.")
            raise UsageError(f"the examples are {x.dtype} and the weights {weight.dtype}: give x.to(torch.{name}).")
        check_radius(self.threat, x.shape[1:])
        if callable(check := getattr(self.attack, "check_threat", None)):
            for ball in self.threat.balls:
                check(ball, x.shape[1:])
        if len(x) == 0:
            return labels
        if model not in self._num_outputs:
            self._num_outputs[model] = self._count_outputs(model, x, labels)
        self.task.check_labels(labels, self._num_outputs[model])
        return labels

    def _count_outputs(self, model: nn.Module, x: Tensor, y: Tensor) -> int:
        """Call the model on one example, once, so that a wrong output is named before an attack fails on it."""
        with torch.no_grad(), eval_mode(model):
            outputs: Any = model(x[:1].clone())
        label_shape, needed = tuple(y.shape[1:]), self.task.count_outputs(y)
        has_classes = not y.is_floating_point()
        # Class numbers that are too large are named by the check of the labels.
        accepted = (needed, 2, 1) if has_classes else (needed,)
        if not isinstance(outputs, Tensor) or not any(
            self.task.accepts_outputs(outputs, 1, number, label_shape) for number in accepted
        ):
            hint = logits_hint(outputs, lambda part: self.task.accepts_outputs(part, 1, needed, label_shape))
            raise UsageError(
                f"the model answers one example with {describe_output(outputs)}; let it return "
                f"{self.task.describe_expected_outputs(1, needed, label_shape)}.{hint}"
            )
        return max(2, outputs.shape[1] if outputs.dim() > 1 else 1) if has_classes else needed


def attack(
    name: str | AttackLike,
    threat: str | ThreatModel | None = None,
    *,
    eps: float | str | None = None,
    norm: str = "linf",
    task: str | Task = CLASSIFICATION,
    stop_early: bool = False,
) -> BoundAttack:
    """Return an attack by its name, to call as `attack(model, x, y)` in a loop of your own.

    By default it runs all its steps on every image, as training needs it. With `stop_early` it leaves an image alone
    once it is misclassified, as an evaluation does, where only that counts. In training this would be a mistake: most
    images would stay almost clean.

    Args:
        name: A name that `deat list attacks` shows, such as "pgd-7", "fgsm", "cw-20" or "aa", or an attack such as
            `deat.Attack("mine", steps=10, alpha=0.2)`.
        threat: A threat model, such as deat.Linf(0.002, box=(-1, 1)), or the text "l2:0.5"; or give `eps`.
        eps: The radius, as a number or as text: 8 / 255 or "8/255".
        norm: The norm of `eps`: "linf", "l2" or "l1".
        task: What outputs and labels mean: "classification", "multilabel", "segmentation", "regression", or a task.
        stop_early: Stop moving an image once it is misclassified. AutoAttack and its parts always do, so they need
            `stop_early=True`.

    Returns:
        The attack.

    Raises:
        UsageError: No attack has this name, the radius is missing or not accepted, or the task does not define what the
            attack maximises.

    Example:
        >>> attack = deat.attack("pgd-7", eps=8 / 255)
        >>> for x, y in loader:
        ...     loss = cross_entropy(model(attack(model, x, y)), y)
    """
    if not isinstance(stop_early, bool):
        raise UsageError(f"stop_early must be True or False, not {stop_early!r}.")
    chosen = _with_stop(get_attack(name), stop_early)
    task = get_task(task)
    if callable(check := getattr(chosen, "check_task", None)):
        check(task)
    return BoundAttack(chosen, _get_threat(eps, norm, threat), task)


def _with_stop(chosen: Any, stop_early: bool) -> AttackLike:
    """The attack, with its steps on every image or not."""
    if not callable(chosen) or not isinstance(getattr(chosen, "name", None), str):
        raise UsageError(f"{chosen!r} is no attack. Give a name, such as pgd-7, or a callable that has a name.")
    if isinstance(chosen, Attack):
        if stop_early and not chosen.freeze and chosen.name.endswith("-last"):
            raise UsageError(f"{chosen.name} scores the last step of every image: leave stop_early out, or -last.")
        return replace(chosen, freeze=stop_early)
    if hasattr(chosen, "parts") and not stop_early:
        raise UsageError(
            f"{chosen.name} is for evaluation: it stops at images that are misclassified. Add stop_early=True, or train "
            "with an attack such as pgd-7."
        )
    attack_like: AttackLike = chosen
    return attack_like


def _get_threat(eps: Any, norm: str, threat: Any) -> ThreatModel:
    if (eps is None) == (threat is None):
        raise UsageError(
            "give the radius, such as eps=8/255 (with norm='l2' for another norm), or a threat model, such as "
            "threat=deat.L2(0.5)" + (", and not both." if eps is not None else ".")
        )
    if threat is not None and not isinstance(threat, str | ThreatModel):
        raise UsageError(f"threat must be a threat model or text such as 'l2:0.5', not {threat!r}. A radius is eps=.")
    if isinstance(eps, ThreatModel):
        raise UsageError(f"eps must be a number, not {eps!r}: give it as threat=.")
    return parse_threat(f"{norm}:{parse_number(eps)!r}" if threat is None else threat)


def _check_devices(weight: Tensor | None, x: Any, y: Any) -> None:
    tensors = [
        (what, value, name)
        for what, value, name in (("examples", x, "x"), ("labels", y, "y"))
        if isinstance(value, Tensor)  # values that are not tensors are refused next
    ]
    for what, tensor, name in tensors:
        device = tensors[0][1].device if weight is None else weight.device
        if tensor.device != device:
            raise UsageError(
                f"the {what} are on {tensor.device}, and the model on {device}: give {name}.to('{device}')."
            )
