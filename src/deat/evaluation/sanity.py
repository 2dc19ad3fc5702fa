"""Whether to believe a robust accuracy: checks before and after the attacks, each with what it means and what to do.

They follow "On Evaluating Adversarial Robustness" (Carlini et al. 2019) and AutoAttack's own flags. A difference
between two accuracies counts beyond max(0.5 points, 2 images).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deat.errors import UsageError
from deat.evaluation.attacks import Attack, attack, correct, gradient
from deat.game.losses import cross_entropy
from deat.modes import evaluating
from deat.threat import Linf, ThreatModel

if TYPE_CHECKING:
    from deat.evaluation.evaluation import Evaluation

SLICE = 128
"""Images of the first block that the extra probes look at."""


@dataclass(frozen=True)
class Flag:
    """A reason not to believe the number: what was seen, what it means and what to do."""

    name: str
    seen: str
    advice: str


def before(model: nn.Module, x: Tensor, y: Tensor) -> list[Flag]:
    """Flags about the model itself."""
    x, y = x[:SLICE], y[:SLICE]
    checks = (_still_training, _probabilities, _randomised, _zero_gradients, _autograd_inside)
    with evaluating(model):
        broken = _not_finite(model, x)
        if broken:
            return [broken]  # nothing else can be said of such a model
        return [flag for check in checks if (flag := check(model, x, y)) is not None]


def compare(found: "Evaluation") -> list[Flag]:
    """Flags about the attacks' results, from the results alone."""
    checks = (_invalid, _one_sided_sample, _one_step_wins, _black_box_wins)
    return [flag for check in checks if (flag := check(found)) is not None]


def after(found: "Evaluation", model: nn.Module, threat: ThreatModel, x: Tensor, y: Tensor) -> list[Flag]:
    """Flags about the attacks' results, from a few more attacks on a slice of images."""
    if threat.eps == 0:
        return []
    probe = Probe(model, threat, x[:SLICE], y[:SLICE], found)
    return [flag for check in (_doubling, _sweep, _half, _noise) if (flag := check(probe)) is not None]


def slack(n: int) -> float:
    """How far two accuracies on n images may differ without meaning anything."""
    return max(0.005, 2 / n) + 1e-9


@dataclass(frozen=True)
class Probe:
    """A slice of images, and PGD on it at any radius and number of steps."""

    model: nn.Module
    threat: ThreatModel
    x: Tensor
    y: Tensor
    found: "Evaluation"

    def correct(self, how: Attack, eps: float | None = None, seed: int = 0) -> Tensor:
        """Which images of the slice stand under an attack, of another radius where given."""
        threat = self.threat if eps is None else replace(self.threat, eps=eps)
        generator = torch.Generator(self.x.device).manual_seed(seed)
        return correct(self.model, self.x, self.y, how, threat, generator)

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
    def slack(self) -> float:
        """The slice's own slack."""
        return slack(len(self.y))


def _not_finite(model: nn.Module, x: Tensor) -> Flag | None:
    with torch.no_grad():
        bad = int((~model(x).isfinite()).flatten(1).any(1).sum())
    if not bad:
        return None
    return Flag(
        "not_finite",
        f"the outputs for {bad} of {len(x)} images are NaN or infinite",
        "The weights are broken, or the model overflows: no accuracy means anything. Load others, or train again.",
    )


def _still_training(model: nn.Module, x: Tensor, y: Tensor) -> Flag | None:
    stuck = sorted({type(m).__name__ for m in model.modules() if m.training})
    if not stuck:
        return None
    return Flag(
        "training_mode",
        f"{', '.join(stuck)} stay in training mode after model.eval()",
        "Make model.eval() reach every layer; in training mode answers depend on the batch or on chance.",
    )


def _probabilities(model: nn.Module, x: Tensor, y: Tensor) -> Flag | None:
    with torch.no_grad():
        out = model(x).double()
    if bool((out >= 0).all()) and bool(((out.sum(1) - 1).abs() < 1e-4).all()):
        return Flag(
            "probabilities",
            "the outputs are probabilities: none is negative and each row sums to one",
            "Return logits; a softmax in front of the loss starves every gradient attack.",
        )
    return None


def _randomised(model: nn.Module, x: Tensor, y: Tensor) -> Flag | None:
    with torch.no_grad():
        runs = torch.stack([model(x).double() for _ in range(5)])
    scale = runs.abs().mean().clamp_min(1e-12)
    spread = float((runs - runs[0]).abs().max() / scale)
    if spread <= 1e-4:
        return None
    return Flag(
        "randomised",
        f"five runs on the same images differ by {spread:.2g} of their size",
        "Switch dropout and noise off, or average over them inside the model; single draws mislead every attack.",
    )


def _zero_gradients(model: nn.Module, x: Tensor, y: Tensor) -> Flag | None:
    with torch.inference_mode(False), torch.enable_grad():
        inputs, labels = x.clone().requires_grad_(), y.clone()  # an inference tensor cannot be differentiated
        grad = gradient(cross_entropy(model(inputs), labels).sum(), inputs)
    dead = int((grad.flatten(1).abs().amax(1) == 0).sum())
    if dead <= max(2, 0.05 * len(x)):
        return None
    return Flag(
        "zero_gradients",
        f"the loss has no gradient at all by {dead} of {len(x)} images",
        "Something rounds, saturates or scales the gradient away. Attack the model without it, or a smooth stand-in.",
    )


def _autograd_inside(model: nn.Module, x: Tensor, y: Tensor) -> Flag | None:
    with _watching_autograd() as calls, torch.no_grad():
        model(x[:4])
    if not calls:
        return None
    return Flag(
        "autograd_inside",
        "the model calls autograd while it classifies",
        "It adapts to each input; evaluate it with attacks that are built for such a defence.",
    )


def _invalid(found: "Evaluation") -> Flag | None:
    bad = {r.name: r.invalid for r in found.results if r.invalid}
    if not bad:
        return None
    listed = ", ".join(f"{name}: {count}" for name, count in bad.items())
    return Flag(
        "invalid_examples",
        f"examples outside the ball or the box, or not finite ({listed})",
        "They counted as no attack. Repair the attack: what it claims to break, it did not break.",
    )


def _one_sided_sample(found: "Evaluation") -> Flag | None:
    shown, classes = len(set(found.labels)), len(found.classes)
    if not found.settings.get("sample") or len(found.labels) < 10 * classes or 2 * shown > classes:
        return None
    return Flag(
        "one_sided_sample",
        f"the first {len(found.labels):,} images show {shown} of {classes} classes",
        "The set is sorted by class. Shuffle it, or judge all of it.",
    )


def _one_step_wins(found: "Evaluation") -> Flag | None:
    return _beats(
        found,
        [r.name for r in found.results if found.settings["attacks"][r.name].get("steps") == 1],
        [r.name for r in found.results if found.settings["attacks"][r.name].get("steps", 0) > 1],
        "one_step_wins",
        "Gradients mislead the longer attack. Use restarts, another loss or AutoAttack before you believe the number.",
    )


def _black_box_wins(found: "Evaluation") -> Flag | None:
    steps = {name: settings.get("steps", 2) for name, settings in found.settings["attacks"].items()}
    white = [r.name for r in found.results if r.name not in ("natural", "square") and steps[r.name] > 1]
    advice = "Gradients are masked. Find what hides them; the white-box numbers are too high."
    return _beats(found, [r.name for r in found.results if r.name == "square"], white, "black_box_wins", advice)


def _beats(found: "Evaluation", weak: list[str], strong: list[str], name: str, advice: str) -> Flag | None:
    if not weak or not strong or found.settings["cascade"]:
        return None
    share = {key: found.accuracy[key] for key in (*weak, *strong)}
    one, other = min(weak, key=share.__getitem__), min(strong, key=share.__getitem__)
    if share[one] + slack(len(found.labels)) >= share[other]:
        return None
    return Flag(name, f"{one} leaves {share[one]:.1%}, less than the {share[other]:.1%} that {other} leaves", advice)


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
    return Flag(
        "not_converged",
        f"{once.name} from two starts leaves {left:.1%} of {len(probe.y)} images, {2 * steps} steps leave {less:.1%}",
        "The attack stops too early, or its step is too small. Give it more steps until the number stays.",
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
    seen = ", ".join(f"{share:.1%} at {radius:.3g}" for share, radius in zip(shares, radii, strict=True))
    advice = "More room cannot make an attack weaker. The attack fails where it should win; do not trust it anywhere."
    return Flag("not_monotone", f"accuracy rises with the radius: {seen}", advice)


def _half(probe: Probe) -> Flag | None:
    radius = probe.threat.grey_radius(probe.x[0].numel())
    share, chance = probe.accuracy(Attack("pgd-20", steps=20), radius), 1 / max(2, len(probe.found.classes))
    if share <= chance + probe.slack:
        return None
    return Flag(
        "robust_to_anything",
        f"{share:.1%} stand at a radius of {radius:.3g}, where every image can become grey; chance is {chance:.1%}",
        "No classifier can do that. The attack is not working against this model.",
    )


def _noise(probe: Probe) -> Flag | None:
    noise = Attack("noise", steps=0, start="bernoulli")
    share, pgd = min(probe.accuracy(noise, seed=s) for s in range(5)), probe.accuracy(probe.pgd)
    if share + probe.slack >= pgd:
        return None
    return Flag(
        "noise_wins",
        f"random signs leave {share:.1%}, less than the {pgd:.1%} that {probe.pgd.name} leaves",
        "Gradients point nowhere. Find what masks them.",
    )


@contextmanager
def _watching_autograd() -> Iterator[list[str]]:
    calls: list[str] = []
    grad, backward = torch.autograd.grad, torch.autograd.backward

    def spy(real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return real(*args, **kwargs)

        return called

    try:
        torch.autograd.grad, torch.autograd.backward = spy(grad, "grad"), spy(backward, "backward")
        yield calls
    finally:
        torch.autograd.grad, torch.autograd.backward = grad, backward
