"""Checks by more attacks on a few images, whose results show whether attacks work on the model at all."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from deat.data.image_label_checks import noun_of_shape
from deat.evaluation.attacks import (
    Attack,
    as_evaluated,
    attack_examples,
    exact_outputs,
    is_beaten,
    keep_valid,
)
from deat.evaluation.sanity.flag_advice import Flag, accuracy_tolerance, make_flag
from deat.tasks import CLASSIFICATION, Task
from deat.threat import Linf, ThreatModel
from deat.utils.float32_precision import exact_float32
from deat.utils.text import format_eps
from deat.utils.torch_contexts import eval_mode

if TYPE_CHECKING:
    from deat.evaluation.results import Evaluation


BASE_CHECK_PASSES = 66
"""Passes of each image through the checks of any evaluation: the radius sweep, the grey radius and noise."""
NATURAL = Attack("natural", steps=0, start="zero")
SWEEP_ATTACK = Attack("pgd-10", steps=10)
"""The attack of the radius sweep, and of the check for memory."""


def run_extra_attacks(subset: "AttackedSubset") -> list[Flag]:
    """Attack a few images in more ways and compare the accuracies.

    Args:
        subset: The images, and what attacks them. With radius 0 nothing is checked.

    Returns:
        The flags raised.
    """
    if subset.threat.eps == 0:
        return []
    checks = (_flag_not_converged, _flag_not_monotone, _flag_robust_to_anything, _flag_noise_wins)
    with exact_float32(subset.x.device), eval_mode(subset.exact_model):
        return [flag for check in checks if (flag := check(subset)) is not None]


def estimate_check_passes(attacks: Sequence[Any]) -> int:
    """Estimate how many passes `run_extra_attacks` makes for each image.

    Args:
        attacks: The attacks of the evaluation. Most of deat's own are repeated from another start, with twice the steps.
    """
    own = [attack for attack in attacks if isinstance(attack, Attack) and attack.steps > 1]
    passes = sum(
        attack.steps * attack.restarts * (2 if _can_be_resumed(attack) else 3) for attack in _without_shorter_runs(own)
    )
    return passes + (BASE_CHECK_PASSES if own else BASE_CHECK_PASSES + 20)


class AttackedSample(NamedTuple):
    """The adversarial examples of an attack on the sample, and how right the answers still are."""

    x_adv: Tensor
    correct: Tensor


@dataclass(frozen=True)
class AttackedSubset:
    """A sample of images, and the accuracies on it under attacks, each of which is made once.

    Attributes:
        model: What attacks query: the exact model, or a `FastModel` of it.
        exact_model: The model whose verdicts count.
        threat: The threat model.
        x: Images in [0, 1], from all over the data.
        y: Their labels.
        rows: Which of the evaluation's images they are.
        evaluation: The attacks' results on all images.
        on_attack_done: Called after each attack.
        task: What outputs and labels mean. Its accuracy of each example is compared.
        results_cache: Results by attack, radius, seed and model.
    """

    model: nn.Module
    exact_model: nn.Module
    threat: ThreatModel
    x: Tensor
    y: Tensor
    rows: Tensor
    evaluation: "Evaluation"
    on_attack_done: Callable[[], None]
    task: Task = CLASSIFICATION
    results_cache: dict[tuple[Attack, float, int, nn.Module], AttackedSample] = field(default_factory=dict)

    def correct(self, attack: Attack, eps: float | None = None, seed: int = 0) -> Tensor:
        """Return how right the answers still are under an attack: (B,), bool for classification.

        Args:
            attack: The attack.
            eps: Another radius than the threat model's.
            seed: The seed of its start.
        """
        return self._run(attack, eps, seed, self.model).correct

    def correct_under_exact_attack(self, attack: Attack) -> Tensor:
        """Return the same under an attack that queries the exact model."""
        return self._run(attack, None, 0, self.exact_model).correct

    def _run(self, attack: Attack, eps: float | None, seed: int, model: nn.Module) -> AttackedSample:
        attack = as_evaluated(attack)
        key = attack, self.threat.eps if eps is None else eps, seed, model
        if key not in self.results_cache:
            threat = replace(self.threat, eps=key[1])
            generator = torch.Generator(self.x.device).manual_seed(seed)
            x_adv = attack_examples(model, self.x, self.y, attack, threat, generator, self.task)
            self.results_cache[key] = AttackedSample(x_adv, self._read_accuracy(x_adv, self.y))
            self.on_attack_done()
        return self.results_cache[key]

    def correct_from_first_start(self, attack: Attack) -> Tensor:
        """Return the same for the start of the evaluation itself, which costs nothing where it has every verdict."""
        if self.task.is_graded or self.evaluation.settings["cascade"]:
            return self.correct(attack)
        verdicts = torch.tensor(self.evaluation.verdicts[attack.name])
        return verdicts[self.rows].to(self.y.device)

    def correct_after_resuming(self, attack: Attack, seed: int) -> Tensor:
        """Return which images are still correct after twice the attack's steps: it is run, and then continued."""
        attack = as_evaluated(attack)
        x_adv, correct = self._run(attack, None, seed, self.model)
        is_done = is_beaten(self.model, x_adv, self.y, self.task) & bool(attack.freeze)
        rows = (~is_done).nonzero().squeeze(1)
        if not len(rows):
            return correct
        x, y = self.x[rows], self.y[rows]
        resumed = attack.resume(self.model, x, y, x_adv[rows], self.threat, self.task)
        after = self._read_accuracy(keep_valid(x, resumed, self.threat), y)
        self.on_attack_done()
        return correct.index_put((rows,), torch.minimum(correct[rows], after) if attack.freeze else after)

    def _read_accuracy(self, x_adv: Tensor, y: Tensor) -> Tensor:
        with eval_mode(self.model):
            return self.task.accuracy(exact_outputs(self.model, x_adv), y)

    def accuracy(self, attack: Attack, eps: float | None = None, seed: int = 0) -> float:
        """Return the accuracy under an attack. The arguments are those of `correct`."""
        return mean_accuracy(self.correct(attack, eps, seed))

    @property
    def own_attacks(self) -> list[Attack]:
        """Those attacks of the evaluation that are deat's own and have several steps."""
        attacks = map(self._attack_from_settings, self.evaluation.settings["attacks"].values())
        return [attack for attack in attacks if attack is not None and attack.steps > 1]

    @property
    def longest_attack(self) -> Attack | None:
        """The one of these with the most steps, or None."""
        return max(self.own_attacks, key=lambda attack: attack.steps, default=None)

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


def _can_be_resumed(attack: Attack) -> bool:
    """Whether an attack with twice the steps equals the attack, continued for as many steps again."""
    return attack.restarts == 1 and attack.alpha >= 1 / attack.steps


def _without_shorter_runs(attacks: Sequence[Attack]) -> list[Attack]:
    """Leave out each attack of which there is a run with twice the steps or more, since that one shows if they matter."""

    def is_longer(run: Attack, attack: Attack) -> bool:
        """Whether a run is the same attack with at least twice the steps."""
        renamed = replace(run, name="run", steps=attack.steps, alpha=attack.alpha)
        same = math.isclose(run.alpha, attack.alpha) and renamed == replace(attack, name="run")
        return same and run.steps >= 2 * attack.steps

    return [attack for attack in attacks if not any(is_longer(run, attack) for run in attacks)]


def mean_accuracy(values: Tensor) -> float:
    """Average over examples whether they are right, or their scores where a task grades answers."""
    return float(values.double().mean())


def _commonest_label_share(labels: list[int]) -> float:
    return max(Counter(labels).values()) / len(labels)


def _flag_not_converged(subset: AttackedSubset) -> Flag | None:
    flags = (_flag_if_doubling_helps(subset, attack) for attack in _without_shorter_runs(subset.own_attacks))
    return next((flag for flag in flags if flag is not None), None)


def _flag_if_doubling_helps(subset: AttackedSubset, attack: Attack) -> Flag | None:
    steps = attack.steps
    # Two starts of the attack cost as much, so an image that a second start fools is no sign.
    correct_from_two_starts = torch.minimum(subset.correct_from_first_start(attack), subset.correct(attack, seed=1))
    if _can_be_resumed(attack):
        doubled_correct = subset.correct_after_resuming(attack, seed=1)
    else:  # twice the steps, and long enough that half of them cross the ball's radius
        doubled = replace(attack, name=f"{attack.name} doubled", steps=2 * steps, alpha=max(attack.alpha, 1 / steps))
        doubled_correct = subset.correct(doubled)
    accuracy, doubled_accuracy = mean_accuracy(correct_from_two_starts), mean_accuracy(doubled_correct)
    if accuracy - doubled_accuracy <= subset.tolerance:
        return None
    return make_flag(
        "not_converged",
        f"on {len(subset.y)} {noun_of_shape(subset.x.shape[1:])} accuracy is {accuracy:.1%} under {attack.name} from two "
        f"starts, and {doubled_accuracy:.1%} under {2 * steps} steps",
    )


def _flag_not_monotone(subset: AttackedSubset) -> Flag | None:
    eps, tolerance = subset.threat.eps, subset.tolerance
    radii = [
        r
        for r in (0.0, eps / 2, eps, 2 * eps, 4 * eps)
        if not isinstance(subset.threat, Linf) or not subset.threat.is_plain or r <= 1
    ]
    accuracies = [
        mean_accuracy(subset.correct_under_exact_attack(SWEEP_ATTACK))
        if r == eps  # which `check_statefulness` reads too
        else subset.accuracy(SWEEP_ATTACK if r else NATURAL, r)
        for r in radii
    ]
    if not any(accuracies[i] > min(accuracies[:i]) + tolerance for i in range(1, len(radii))):
        return None
    sweep = ", ".join(f"{a:.1%} at {format_eps(radius)}" for a, radius in zip(accuracies, radii, strict=True))
    return make_flag("not_monotone", f"accuracy rises with the radius: {sweep}")


def _flag_robust_to_anything(subset: AttackedSubset) -> Flag | None:
    radius = subset.threat.grey_radius(subset.x[0].numel())
    if radius == float("inf"):  # no radius hides every example
        return None
    accuracy, chance = subset.accuracy(Attack("pgd-20", steps=20), radius), subset.chance
    if accuracy <= chance + subset.tolerance:
        return None
    return make_flag(
        "robust_to_anything",
        f"accuracy is {accuracy:.1%} at a radius of {format_eps(radius)}, where all {noun_of_shape(subset.x.shape[1:])} can "
        f"become equal; chance is {chance:.1%}",
    )


def _flag_noise_wins(subset: AttackedSubset) -> Flag | None:
    noise = Attack("noise", steps=0, start="bernoulli")
    noise_accuracy = min(subset.accuracy(noise, seed=seed) for seed in range(5))
    longest = subset.longest_attack or Attack("pgd-20", steps=20)
    correct = subset.correct_from_first_start(longest) if subset.longest_attack else subset.correct(longest)
    accuracy = mean_accuracy(correct)
    if noise_accuracy + subset.tolerance >= accuracy:
        return None
    return make_flag(
        "noise_wins", f"accuracy is {noise_accuracy:.1%} under random signs, below {accuracy:.1%} under {longest.name}"
    )
