"""Checks by more attacks on a few images, whose results show whether attacks work on the model at all."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deat.errors import UsageError
from deat.evaluation.attacks import Attack, as_judged, correct_under_attack, parse_attack
from deat.evaluation.fast_model import exact_float32
from deat.evaluation.sanity.flag_advice import Flag, accuracy_tolerance, make_flag
from deat.tasks import CLASSIFICATION, Task
from deat.threat import Linf, ThreatModel
from deat.utils.text import format_eps

if TYPE_CHECKING:
    from deat.evaluation.results import Evaluation


BASE_CHECK_PASSES = 75
"""Passes of each image through the checks of any evaluation: the radius sweep, the grey radius and noise."""


def check_after_attacks(
    evaluation: "Evaluation",
    model: nn.Module,
    threat: ThreatModel,
    x: Tensor,
    y: Tensor,
    on_attack_done: Callable[[], None] = lambda: None,
    task: Task = CLASSIFICATION,
) -> list[Flag]:
    """Attack a few images in more ways and compare the accuracies.

    Args:
        evaluation: The attacks' results on all images.
        model: Maps images to logits.
        threat: The threat model; with radius 0 nothing is checked.
        x: Images in [0, 1], from all over the data.
        y: Their labels.
        on_attack_done: Called after each attack.
        task: What outputs and labels mean. Its accuracy of each example is compared.

    Returns:
        The flags raised.
    """
    if threat.eps == 0:
        return []
    probe = AttackProbe(model, threat, x, y, evaluation, on_attack_done, task)
    checks = (_flag_not_converged, _flag_not_monotone, _flag_robust_to_anything, _flag_noise_wins)
    with exact_float32(x.device):
        return [flag for check in checks if (flag := check(probe)) is not None]


def estimate_check_passes(attacks: Sequence[Any]) -> int:
    """Estimate how many passes `check_after_attacks` makes for each image.

    Args:
        attacks: The attacks of the evaluation. Each of deat's own is repeated from two starts, and with twice the
            steps.
    """
    steps = [claimed_steps(a) * a.restarts for a in attacks if isinstance(a, Attack) and claimed_steps(a) > 1]
    return 4 * sum(steps) + (BASE_CHECK_PASSES if steps else BASE_CHECK_PASSES + 20)


@dataclass(frozen=True)
class AttackProbe:
    """A sample of images, and the accuracies on it under attacks, each of which is computed once.

    Attributes:
        model: Maps images to logits.
        threat: The threat model.
        x: The images.
        y: Their labels.
        evaluation: The attacks' results on all images.
        on_attack_done: Called after each attack.
        task: What outputs and labels mean.
        results_cache: Which images are correct, by attack, radius and seed.
    """

    model: nn.Module
    threat: ThreatModel
    x: Tensor
    y: Tensor
    evaluation: "Evaluation"
    on_attack_done: Callable[[], None]
    task: Task = CLASSIFICATION
    results_cache: dict[tuple[Attack, float | None, int], Tensor] = field(default_factory=dict)

    def correct(self, attack: Attack, eps: float | None = None, seed: int = 0) -> Tensor:
        """Return how right the answers still are under an attack: (B,), bool for classification.

        Args:
            attack: The attack.
            eps: Another radius than the threat model's.
            seed: The seed of its start.
        """
        attack = as_judged(attack)
        key = attack, eps, seed
        if key not in self.results_cache:
            threat = self.threat if eps is None else replace(self.threat, eps=eps)
            generator = torch.Generator(self.x.device).manual_seed(seed)
            self.results_cache[key] = correct_under_attack(
                self.model, self.x, self.y, attack, threat, generator, self.task
            )
            self.on_attack_done()
        return self.results_cache[key]

    def accuracy(self, attack: Attack, eps: float | None = None, seed: int = 0) -> float:
        """Return the accuracy under an attack. The arguments are those of `correct`."""
        return fraction_true(self.correct(attack, eps, seed))

    @property
    def own_attacks(self) -> list[Attack]:
        """Those attacks of the evaluation that are deat's own and have, or claim, several steps."""
        attacks = map(self._attack_from_settings, self.evaluation.settings["attacks"].values())
        return [attack for attack in attacks if attack is not None and claimed_steps(attack) > 1]

    @property
    def longest_attack(self) -> Attack:
        """The one of these with the most steps, or PGD-20 if there is none."""
        return max(self.own_attacks, key=claimed_steps, default=Attack("pgd-20", steps=20))

    def _attack_from_settings(self, settings: dict[str, Any]) -> Attack | None:
        """The attack with these settings; None for AutoAttack and users' own attacks."""
        if "kind" in settings or "parts" in settings:
            return None
        values = {f.name: settings[f.name] for f in fields(Attack)}
        return Attack(**{**values, "alpha": settings["alpha"] / self.threat.eps})

    @property
    def chance(self) -> float:
        """The accuracy of guessing, or of one label for all images, in the sample or in all images."""
        if not self.evaluation.labels:
            return 1.0  # unknown, so that no accuracy is above it
        guessing = 1 / max(2, len(self.evaluation.classes))
        return max(guessing, _commonest_label_share(self.y.tolist()), _commonest_label_share(self.evaluation.labels))

    @property
    def tolerance(self) -> float:
        """By how much two accuracies on the sample may differ without a flag."""
        return accuracy_tolerance(len(self.y))


def claimed_steps(attack: Attack) -> int:
    """Return the steps that an attack has, or that its name says it has if they are more."""
    try:
        return max(attack.steps, parse_attack(attack.name).steps)
    except UsageError:
        return attack.steps


def fraction_true(values: Tensor) -> float:
    """Return the share of entries that are true."""
    return float(values.double().mean())


def _commonest_label_share(labels: list[int]) -> float:
    return max(Counter(labels).values()) / len(labels)


def _flag_not_converged(probe: AttackProbe) -> Flag | None:
    flags = (_flag_if_doubling_helps(probe, attack) for attack in probe.own_attacks)
    return next((flag for flag in flags if flag is not None), None)


def _flag_if_doubling_helps(probe: AttackProbe, attack: Attack) -> Flag | None:
    steps = claimed_steps(attack)
    # Twice the steps that its name says, and long enough that half of them cross the ball's radius.
    doubled = replace(attack, name=f"{attack.name} doubled", steps=2 * steps, alpha=max(attack.alpha, 1 / steps))
    # Two starts of the attack cost as much, so an image that a second start fools is no sign.
    correct_from_two_starts = torch.minimum(probe.correct(attack), probe.correct(attack, seed=1))
    accuracy, doubled_accuracy = fraction_true(correct_from_two_starts), fraction_true(probe.correct(doubled))
    if accuracy - doubled_accuracy <= probe.tolerance:
        return None
    return make_flag(
        "not_converged",
        f"on {len(probe.y)} images accuracy is {accuracy:.1%} under {attack.name} from two starts, and "
        f"{doubled_accuracy:.1%} under {2 * steps} steps",
    )


def _flag_not_monotone(probe: AttackProbe) -> Flag | None:
    eps, tolerance = probe.threat.eps, probe.tolerance
    radii = [
        r
        for r in (0.0, eps / 2, eps, 2 * eps, 4 * eps)
        if not isinstance(probe.threat, Linf) or not probe.threat.is_plain or r <= 1
    ]
    accuracies = [probe.accuracy(Attack("pgd-10", steps=10), r) for r in radii]
    if not any(accuracies[i] > min(accuracies[:i]) + tolerance for i in range(1, len(radii))):
        return None
    sweep = ", ".join(f"{a:.1%} at {format_eps(radius)}" for a, radius in zip(accuracies, radii, strict=True))
    return make_flag("not_monotone", f"accuracy rises with the radius: {sweep}")


def _flag_robust_to_anything(probe: AttackProbe) -> Flag | None:
    radius = probe.threat.grey_radius(probe.x[0].numel())
    if radius == float("inf"):  # no radius hides every example
        return None
    accuracy, chance = probe.accuracy(Attack("pgd-20", steps=20), radius), probe.chance
    if accuracy <= chance + probe.tolerance:
        return None
    return make_flag(
        "robust_to_anything",
        f"accuracy is {accuracy:.1%} at a radius of {format_eps(radius)}, where every image can become grey; chance is "
        f"{chance:.1%}",
    )


def _flag_noise_wins(probe: AttackProbe) -> Flag | None:
    noise, longest = Attack("noise", steps=0, start="bernoulli"), probe.longest_attack
    noise_accuracy = min(probe.accuracy(noise, seed=seed) for seed in range(5))
    accuracy = probe.accuracy(longest)
    if noise_accuracy + probe.tolerance >= accuracy:
        return None
    return make_flag(
        "noise_wins", f"accuracy is {noise_accuracy:.1%} under random signs, below {accuracy:.1%} under {longest.name}"
    )
