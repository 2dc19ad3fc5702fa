"""A few more attacks on a slice of images, whose results show whether an attack works on the model at all."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deat.errors import UsageError
from deat.evaluation.attacks import Attack, attack, correct
from deat.evaluation.fast_model import exactly
from deat.evaluation.sanity.flags import Flag, raised, slack
from deat.threat import Linf, ThreatModel
from deat.utils.numbers import level

if TYPE_CHECKING:
    from deat.evaluation.results import Evaluation


OTHERS = 75
"""An image's passes through the checks that any evaluation gets: a sweep, the radius of 0.5 and noise."""


def after(
    found: "Evaluation",
    model: nn.Module,
    threat: ThreatModel,
    x: Tensor,
    y: Tensor,
    tick: Callable[[], None] = lambda: None,
) -> list[Flag]:
    """Flags about the attacks' results, from a few more attacks on a few images; each of them ticks."""
    if threat.eps == 0:
        return []
    probe = Probe(model, threat, x, y, found, tick)
    with exactly(x.device):
        return [flag for check in (_doubling, _sweep, _half, _noise) if (flag := check(probe)) is not None]


def passes_after(attacks: Sequence[Any]) -> int:
    """About how many times the checks pass an image through a robust model: an attack from two starts, and doubled."""
    own = [claimed_steps(a) * a.restarts for a in attacks if isinstance(a, Attack) and claimed_steps(a) > 1]
    return 4 * sum(own) + (OTHERS if own else OTHERS + 20)


@dataclass(frozen=True)
class Probe:
    """A slice of images, and PGD on it at any radius and number of steps."""

    model: nn.Module
    threat: ThreatModel
    x: Tensor
    y: Tensor
    found: "Evaluation"
    tick: Callable[[], None]
    known: dict[tuple[Attack, float | None, int], Tensor] = field(default_factory=dict)

    def correct(self, how: Attack, eps: float | None = None, seed: int = 0) -> Tensor:
        """Which images of the slice stand under an attack, of another radius where given; asked once for all checks."""
        if (how, eps, seed) not in self.known:
            threat = self.threat if eps is None else replace(self.threat, eps=eps)
            generator = torch.Generator(self.x.device).manual_seed(seed)
            self.known[how, eps, seed] = correct(self.model, self.x, self.y, how, threat, generator)
            self.tick()
        return self.known[how, eps, seed]

    def accuracy(self, how: Attack, eps: float | None = None, seed: int = 0) -> float:
        """The share of the slice that stands under an attack."""
        return share_of(self.correct(how, eps, seed))

    @property
    def own(self) -> list[Attack]:
        """The evaluation's own attacks that claim several steps."""
        return [a for s in self.found.settings["attacks"].values() if claimed_steps(a := self._attack(s)) > 1]

    @property
    def pgd(self) -> Attack:
        """The one of them that claims the most steps, or PGD-20 where there is none."""
        return max(self.own, key=claimed_steps, default=Attack("pgd-20", steps=20))

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
        return max(guessing, _commonest(self.y.tolist()), _commonest(self.found.labels))

    @property
    def slack(self) -> float:
        """The slice's own slack."""
        return slack(len(self.y))


def _commonest(labels: list[int]) -> float:
    return max(Counter(labels).values()) / len(labels)


def _doubling(probe: Probe) -> Flag | None:
    return next((flag for once in probe.own if (flag := _doubled(probe, once)) is not None), None)


def _doubled(probe: Probe, once: Attack) -> Flag | None:
    steps = claimed_steps(once)
    # Twice the steps that its name promises, each long enough that half of them cross the ball's radius.
    twice = replace(once, name=f"{once.name} doubled", steps=2 * steps, alpha=max(once.alpha, 1 / steps))
    # Against two starts of the attack as it is, which cost as much: what chance alone can do is no sign.
    standing = probe.correct(once) & probe.correct(once, seed=1)
    left, less = share_of(standing), share_of(probe.correct(twice))
    if left - less <= probe.slack:
        return None
    return raised(
        "not_converged",
        f"{once.name} from two starts leaves {left:.1%} of {len(probe.y)} images, {2 * steps} steps leave {less:.1%}",
    )


def claimed_steps(how: Attack) -> int:
    """The steps that an attack has, or that its name says it has, whichever is more."""
    try:
        return max(how.steps, attack(how.name).steps)
    except UsageError:
        return how.steps


def share_of(hits: Tensor) -> float:
    """The share of true entries."""
    return float(hits.double().mean())


def _sweep(probe: Probe) -> Flag | None:
    eps = probe.threat.eps
    radii = [r for r in (0.0, eps / 2, eps, 2 * eps, 4 * eps) if not isinstance(probe.threat, Linf) or r <= 1]
    shares = [probe.accuracy(Attack("pgd-10", steps=10), r) for r in radii]
    rises = [i for i in range(1, len(radii)) if shares[i] > min(shares[:i]) + probe.slack]
    if not rises:
        return None
    seen = ", ".join(f"{share:.1%} at {level(radius)}" for share, radius in zip(shares, radii, strict=True))
    return raised("not_monotone", f"accuracy rises with the radius: {seen}")


def _half(probe: Probe) -> Flag | None:
    radius = probe.threat.grey_radius(probe.x[0].numel())
    share, chance = probe.accuracy(Attack("pgd-20", steps=20), radius), probe.chance
    if share <= chance + probe.slack:
        return None
    return raised(
        "robust_to_anything",
        f"{share:.1%} stand at a radius of {level(radius)}, where every image can become grey; chance is {chance:.1%}",
    )


def _noise(probe: Probe) -> Flag | None:
    noise = Attack("noise", steps=0, start="bernoulli")
    share, pgd = min(probe.accuracy(noise, seed=s) for s in range(5)), probe.accuracy(probe.pgd)
    if share + probe.slack >= pgd:
        return None
    return raised(
        "noise_wins",
        f"random signs leave {share:.1%}, less than the {pgd:.1%} that {probe.pgd.name} leaves",
    )
