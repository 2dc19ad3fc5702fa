"""A few more attacks on a slice of images, whose results show whether an attack works on the model at all."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deat.errors import UsageError
from deat.evaluation.attacks import Attack, correct_under_attack, parse_attack
from deat.evaluation.fast_model import exact_float32
from deat.evaluation.sanity.flags import Flag, accuracy_tolerance, make_flag
from deat.threat import Linf, ThreatModel
from deat.utils.text import format_eps

if TYPE_CHECKING:
    from deat.evaluation.results import Evaluation


BASE_CHECK_PASSES = 75
"""An image's passes through the checks that any evaluation gets: a sweep, the radius of 0.5 and noise."""


def check_after_attacks(
    evaluation: "Evaluation",
    model: nn.Module,
    threat: ThreatModel,
    x: Tensor,
    y: Tensor,
    on_attack_done: Callable[[], None] = lambda: None,
) -> list[Flag]:
    """Flags about the attacks' results, from a few more attacks on a few images; each of them ticks."""
    if threat.eps == 0:
        return []
    probe = AttackProbe(model, threat, x, y, evaluation, on_attack_done)
    with exact_float32(x.device):
        return [
            flag
            for check in (_flag_not_converged, _flag_not_monotone, _flag_robust_to_anything, _flag_noise_wins)
            if (flag := check(probe)) is not None
        ]


def estimate_check_passes(attacks: Sequence[Any]) -> int:
    """About how many times the checks pass an image through a robust model: an attack from two starts, and doubled."""
    own = [claimed_steps(a) * a.restarts for a in attacks if isinstance(a, Attack) and claimed_steps(a) > 1]
    return 4 * sum(own) + (BASE_CHECK_PASSES if own else BASE_CHECK_PASSES + 20)


@dataclass(frozen=True)
class AttackProbe:
    """A slice of images, and PGD on it at any radius and number of steps."""

    model: nn.Module
    threat: ThreatModel
    x: Tensor
    y: Tensor
    found: "Evaluation"
    on_attack_done: Callable[[], None]
    results_cache: dict[tuple[Attack, float | None, int], Tensor] = field(default_factory=dict)

    def correct(self, attack: Attack, eps: float | None = None, seed: int = 0) -> Tensor:
        """Which images of the slice stand under an attack, of another radius where given; asked once for all checks."""
        if (attack, eps, seed) not in self.results_cache:
            threat = self.threat if eps is None else replace(self.threat, eps=eps)
            generator = torch.Generator(self.x.device).manual_seed(seed)
            self.results_cache[attack, eps, seed] = correct_under_attack(
                self.model, self.x, self.y, attack, threat, generator
            )
            self.on_attack_done()
        return self.results_cache[attack, eps, seed]

    def accuracy(self, attack: Attack, eps: float | None = None, seed: int = 0) -> float:
        """The share of the slice that stands under an attack."""
        return fraction_true(self.correct(attack, eps, seed))

    @property
    def own_attacks(self) -> list[Attack]:
        """The evaluation's own attacks that claim several steps."""
        return [a for s in self.found.settings["attacks"].values() if claimed_steps(a := self._attack(s)) > 1]

    @property
    def pgd(self) -> Attack:
        """The one of them that claims the most steps, or PGD-20 where there is none."""
        return max(self.own_attacks, key=claimed_steps, default=Attack("pgd-20", steps=20))

    def _attack(self, settings: dict[str, Any]) -> Attack:
        """The attack of ours with these settings; one of no steps for somebody else's."""
        if "kind" in settings or "parts" in settings:
            return Attack("", steps=0)
        own = {f.name: settings[f.name] for f in fields(Attack)}
        return Attack(**{**own, "alpha": settings["alpha"] / self.threat.eps})

    @property
    def chance(self) -> float:
        """What guessing gets, or one answer for all, among these images or all that were judged."""
        guessing = 1 / max(2, len(self.found.classes))
        return max(guessing, _commonest_label_share(self.y.tolist()), _commonest_label_share(self.found.labels))

    @property
    def tolerance(self) -> float:
        """The slice's own slack."""
        return accuracy_tolerance(len(self.y))


def _commonest_label_share(labels: list[int]) -> float:
    return max(Counter(labels).values()) / len(labels)


def _flag_not_converged(probe: AttackProbe) -> Flag | None:
    return next(
        (flag for once in probe.own_attacks if (flag := _flag_if_doubling_helps(probe, once)) is not None), None
    )


def _flag_if_doubling_helps(probe: AttackProbe, attack: Attack) -> Flag | None:
    steps = claimed_steps(attack)
    # Twice the steps that its name promises, each long enough that half of them cross the ball's radius.
    twice = replace(attack, name=f"{attack.name} doubled", steps=2 * steps, alpha=max(attack.alpha, 1 / steps))
    # Against two starts of the attack as it is, which cost as much: what chance alone can do is no sign.
    standing = probe.correct(attack) & probe.correct(attack, seed=1)
    left, less = fraction_true(standing), fraction_true(probe.correct(twice))
    if left - less <= probe.tolerance:
        return None
    return make_flag(
        "not_converged",
        f"{attack.name} from two starts leaves {left:.1%} of {len(probe.y)} images, {2 * steps} steps leave {less:.1%}",
    )


def claimed_steps(attack: Attack) -> int:
    """The steps that an attack has, or that its name says it has, whichever is more."""
    try:
        return max(attack.steps, parse_attack(attack.name).steps)
    except UsageError:
        return attack.steps


def fraction_true(hits: Tensor) -> float:
    """The share of true entries."""
    return float(hits.double().mean())


def _flag_not_monotone(probe: AttackProbe) -> Flag | None:
    eps = probe.threat.eps
    radii = [r for r in (0.0, eps / 2, eps, 2 * eps, 4 * eps) if not isinstance(probe.threat, Linf) or r <= 1]
    shares = [probe.accuracy(Attack("pgd-10", steps=10), r) for r in radii]
    rises = [i for i in range(1, len(radii)) if shares[i] > min(shares[:i]) + probe.tolerance]
    if not rises:
        return None
    seen = ", ".join(f"{share:.1%} at {format_eps(radius)}" for share, radius in zip(shares, radii, strict=True))
    return make_flag("not_monotone", f"accuracy rises with the radius: {seen}")


def _flag_robust_to_anything(probe: AttackProbe) -> Flag | None:
    radius = probe.threat.grey_radius(probe.x[0].numel())
    share, chance = probe.accuracy(Attack("pgd-20", steps=20), radius), probe.chance
    if share <= chance + probe.tolerance:
        return None
    return make_flag(
        "robust_to_anything",
        f"{share:.1%} stand at a radius of {format_eps(radius)}, where every image can become grey; chance is {chance:.1%}",
    )


def _flag_noise_wins(probe: AttackProbe) -> Flag | None:
    noise = Attack("noise", steps=0, start="bernoulli")
    share, pgd = min(probe.accuracy(noise, seed=s) for s in range(5)), probe.accuracy(probe.pgd)
    if share + probe.tolerance >= pgd:
        return None
    return make_flag(
        "noise_wins",
        f"random signs leave {share:.1%}, less than the {pgd:.1%} that {probe.pgd.name} leaves",
    )
