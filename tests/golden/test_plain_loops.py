"""Whole trainings equal plain loops in float64, written from the papers and the released code and not from deat's."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import deat
from deat.recipes import get_recipe
from deat.utils.seeding import derive_seed
from helpers.games import trainer_of
from helpers.nets import conv_net, images, learnable

EPS, EPOCHS, LR, MEAN, STD = 0.1, 6, 0.1, 0.4, 0.25


@dataclass
class Steps:
    """How many steps an epoch takes, of which size, and how l_X or the accuracy moves that."""

    k: int
    alpha: float
    grow: Callable[["Steps", int, float, float], None] = lambda *_: None
    span: float = 0.0
    threshold: float | None = None

    def size(self) -> float:
        return max(self.span / self.k, self.alpha) * EPS if self.k else self.alpha * EPS


def m_plus(cap: int, alpha: float, *, span: float = 0.0, ramp: bool = False) -> Steps:
    """M+: one step after the first epoch, a threshold after the second, a step more whenever l_X passes it."""

    def grow(s: Steps, t: int, magnitude: float, accuracy: float) -> None:
        if t == 0:
            s.k = 1
        elif t == 1:
            s.threshold = 1.01 * magnitude
        elif (magnitude > s.threshold and s.k < cap) or (ramp and round(s.k * alpha, 9) < 1):
            s.k, s.threshold = s.k + 1, 1.01 * magnitude

    return Steps(0, alpha, grow, span)


def every_epoch(s: Steps, t: int, magnitude: float, accuracy: float) -> None:
    s.k += 1


def above_40(s: Steps, t: int, magnitude: float, accuracy: float) -> None:
    s.k += accuracy > 0.4


def amata(reaches: bool) -> Steps:
    def grow(s: Steps, t: int, magnitude: float, accuracy: float) -> None:
        s.k = 2 + 4 * (t + 1) // (EPOCHS - 1 if reaches else EPOCHS)

    return Steps(2, 0.0, grow, 2.5)


@dataclass
class Loop:
    """One method as a plain loop: `family` says when weights move, `stop` when single examples do not."""

    family: str
    steps: Steps
    start: str = "uniform"
    loss: str = "ce"
    inner: str = "ce"
    stop: str = ""
    penalty: str = ""
    awp: float = 0.0
    noise: float = 1.0
    bound: float = 1.0
    resets: int = 0
    released: bool = False
    net: nn.Module = field(default_factory=lambda: conv_net(batch_norm=True).double())
    seen: list[tuple[float, ...]] = field(default_factory=list)
    memory: dict[bytes, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def ask(self, x: Tensor) -> Tensor:
        return self.net((x - MEAN_) / STD_)

    def train(self, epochs: list[list[tuple[Tensor, Tensor]]]) -> None:
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=LR, momentum=0.9, weight_decay=5e-4)
        for t, batches in enumerate(epochs):
            k, size, threshold = self.steps.k, self.steps.size(), self.steps.threshold
            found = [self.play(x.double(), y, t, i, k, size) for i, (x, y) in enumerate(batches)]
            loss, hits, moved = (sum(row[i] for row in found) for i in (0, 1, 3))
            last = self.released and self.loss in ("trades", "mart")
            magnitude = found[-1][2] if last else sum(row[2] for row in found)
            self.seen.append((k, size, loss / 24, hits / 24, magnitude, threshold or 0.0, moved))
            self.steps.grow(self.steps, t, magnitude, hits / 24)

    def play(self, x: Tensor, y: Tensor, t: int, i: int, k: int, size: float) -> tuple[float, int, float, int]:
        draw = torch.Generator().manual_seed(derive_seed(0, "start", t, i))
        delta = self.begin(x, draw) if k or self.released else torch.zeros_like(x)
        if self.resets and t % self.resets:
            remembered = [self.memory[image.numpy().tobytes()] for image in x]
            starts, self.momentum = (torch.stack([row[i] for row in remembered]) for i in (0, 1))
            delta = clipped(x, EPS * starts)
        else:
            self.momentum = torch.zeros_like(x)
        self.begun = delta
        if self.penalty == "alignment":
            drawn = torch.rand(len(x), x[0].numel(), generator=draw, dtype=x.dtype)
            self.noise_of_batch = clipped(x, EPS * (2 * drawn.view_as(x) - 1))
        delta, magnitude, moved = self.craft(x, y, delta, t, k, size) if self.family == "craft" else (delta, 0.0, 0)
        for last in self.passes(k):
            variable = delta.clone().requires_grad_()
            layer = self.net[0]((x + variable - MEAN_) / STD_)
            loss, logits = self.judge(x, variable, y, layer)
            options = {"retain_graph": True, "create_graph": self.penalty == "curvature", "allow_unused": True}
            slope, costate = torch.autograd.grad(loss, [variable, layer], **options)
            if last and self.penalty:
                loss = loss + self.added(x, variable, y, logits, slope)
            slope = slope.detach()
            if last and self.awp:
                self.backward_at_the_worst_weights(x, variable, y, loss)
            else:
                loss.backward(inputs=list(self.net.parameters()))
            if self.family != "relay" or last:
                self.optimizer.step()
                self.optimizer.zero_grad()
            if not (self.released and self.family == "craft"):
                magnitude = self.measure(slope * len(y))
            if not last:
                delta = self.between(x, delta, slope, costate, size)
        return loss.item() * len(y), int((logits.argmax(1) == y).sum()), magnitude, moved

    def backward_at_the_worst_weights(self, x: Tensor, variable: Tensor, y: Tensor, loss: Tensor) -> None:
        """AWP: one ascent step on the weights, relative to each layer's norm, and the gradient there."""
        grads = torch.autograd.grad(loss, list(self.net.parameters()))
        before = {name: value.clone() for name, value in self.net.state_dict().items()}
        with torch.no_grad():
            for p, grad in zip(self.net.parameters(), grads, strict=True):
                if p.dim() > 1:
                    p += self.awp * p.norm() * grad / grad.norm()
        layer = self.net[0]((x + variable - MEAN_) / STD_)
        worse, _ = self.judge(x, variable, y, layer)
        worse.backward(inputs=list(self.net.parameters()))
        self.net.load_state_dict(before)

    def added(self, x: Tensor, variable: Tensor, y: Tensor, logits: Tensor, slope: Tensor) -> Tensor:
        if self.penalty == "alignment":
            return 0.2 * self.misalignment(x, y)
        return 0.1 * self.roughness(x, variable, y, logits, slope)

    def misalignment(self, x: Tensor, y: Tensor) -> Tensor:
        """GradAlign: the gradients at x, a constant, and at a point of the ball, which is drawn after the start."""
        slopes = []
        for point in (torch.zeros_like(x), self.noise_of_batch):
            point = point.requires_grad_()
            loss = F.cross_entropy(self.ask(x + point), y, reduction="sum")
            slopes += torch.autograd.grad(loss, point, create_graph=True)
        first, second = slopes[0].detach().flatten(1), slopes[1].flatten(1)
        return (1 - (first * second).sum(1) / (first.norm(dim=1) * second.norm(dim=1))).mean()

    def roughness(self, x: Tensor, variable: Tensor, y: Tensor, logits: Tensor, slope: Tensor) -> Tensor:
        """What g+ penalises: the loss's change along the sign of its slope (Finlay and Oberman), or the slope's (CURE)."""
        h = 0.25 if self.penalty == "gradient" else 1.0
        moved = (variable + h * EPS * slope.sign()).detach().requires_grad_()
        if self.penalty == "gradient":
            change = F.cross_entropy(self.ask(x + moved), y, reduction="none")
            change = (change - F.cross_entropy(logits, y, reduction="none")) / h
            return change.square().mean()
        layer = self.net[0]((x + moved - MEAN_) / STD_)
        loss, _ = self.judge(x, moved, y, layer)
        (other,) = torch.autograd.grad(loss, moved, create_graph=True)
        change = (other - slope).flatten(1).norm(dim=1) * len(y) / h
        length = (moved - variable).detach().flatten(1).norm(dim=1) / h
        return (change * length).square().mean()

    def passes(self, k: int) -> Iterator[bool]:
        yield from [True] if self.family == "craft" else [*[False] * k, True]

    def between(self, x: Tensor, delta: Tensor, slope: Tensor, costate: Tensor | None, size: float) -> Tensor:
        """What becomes of delta between two passes: one step, or YOPO's two through the first layer alone."""
        if self.family == "replay":
            return clipped(x, delta + size * slope.sign())
        for _ in range(2):
            variable = delta.clone().requires_grad_()
            layer = self.net[0]((x + variable - MEAN_) / STD_)
            (slope,) = torch.autograd.grad((layer * costate).sum(), variable)
            delta = clipped(x, delta + size * slope.sign())
        return delta

    def begin(self, x: Tensor, draw: torch.Generator) -> Tensor:
        shape = len(x), x[0].numel()
        if self.start == "zero":
            return torch.zeros_like(x)
        if self.start == "jitter":
            return clipped(x, 0.001 * torch.randn(shape, generator=draw, dtype=x.dtype).view_as(x))
        if self.start == "bernoulli":
            return clipped(x, EPS * (0.5 - torch.rand(shape, generator=draw, dtype=x.dtype).view_as(x)).sign())
        return self.clipped(x, self.noise * EPS * (2 * torch.rand(shape, generator=draw, dtype=x.dtype).view_as(x) - 1))

    def clipped(self, x: Tensor, delta: Tensor) -> Tensor:
        return (x + delta.clamp(-self.bound * EPS, self.bound * EPS)).clamp(0, 1) - x

    def craft(self, x: Tensor, y: Tensor, delta: Tensor, t: int, k: int, size: float) -> tuple[Tensor, float, int]:
        self.net.train(self.stop != "fat")
        magnitude, moved, begun = 0.0, 0, delta.clone()
        active, left = [True] * len(y), [3] * len(y)
        with torch.no_grad():
            reference = self.ask(x).softmax(1) if self.inner == "kl" and k else None
        for _ in range(k):
            variable = delta.clone().requires_grad_()
            logits = self.ask(x + variable)
            total = kl_sum(reference, logits) if reference is not None else F.cross_entropy(logits, y, reduction="sum")
            (slope,) = torch.autograd.grad(total, variable)
            if self.resets:
                self.remember(x, slope)
            for j, wrong in enumerate((logits.argmax(1) != y).tolist()):
                if self.stop == "fat" and active[j] and wrong:
                    active[j], left[j] = left[j] > 0, left[j] - 1
                fosc = EPS * slope[j].abs().sum() - ((delta[j] - begun[j]) * slope[j]).sum()
                if self.stop == "dat" and fosc <= 0.5 * max(0.0, 1 - t / (5 / 6 * EPOCHS)):
                    active[j] = False
            stepped = self.clipped(x, delta + size * slope.sign())
            delta = torch.where(torch.tensor(active).view(-1, 1, 1, 1), stepped, delta)
            moved += sum(active) if self.stop else 0
            magnitude = self.measure(slope)
        self.net.train()
        return delta, magnitude, moved

    def remember(self, x: Tensor, slope: Tensor) -> None:
        """PGI: each image's momentum, and the start that follows from it, in the precision that they are stored in."""
        for i, image in enumerate(x):
            m = slope[i] / slope[i].abs().mean() + 0.3 * self.momentum[i]
            following = (self.begun[i] + EPS * m.sign()).clamp(-EPS, EPS) / EPS
            self.memory[image.numpy().tobytes()] = following.half().double(), m.half().double()

    def measure(self, slope: Tensor) -> float:
        return float((slope * (STD_ if self.released else 1)).abs().sum())

    def judge(self, x: Tensor, delta: Tensor, y: Tensor, layer: Tensor) -> tuple[Tensor, Tensor]:
        if self.loss == "ce":
            logits = self.net[1:](layer)
            return F.cross_entropy(logits, y), logits
        if self.loss == "pgi":
            before, adv = self.ask(x + self.begun), self.ask(x + delta)
            return F.cross_entropy(adv, y) + 10 * F.mse_loss(adv, before), adv
        clean, adv = self.ask(x), self.ask(x + delta)
        if self.loss == "trades":
            return F.cross_entropy(clean, y) + 6 * kl_sum(clean.softmax(1), adv) / len(y), adv
        p, q, rows = clean.softmax(1), adv.softmax(1), torch.arange(len(y))
        best = q.argsort(1)
        wrong = torch.where(best[:, -1] == y, best[:, -2], best[:, -1])
        boosted = F.cross_entropy(adv, y) + F.nll_loss(torch.log(1.0001 - q + 1e-12), wrong)
        divergence = F.kl_div(torch.log(q + 1e-12), p, reduction="none").sum(1)
        return boosted + 6 * (divergence * (1.0000001 - p[rows, y])).mean(), adv


MEAN_, STD_ = torch.tensor(MEAN), torch.tensor(STD)  # float32, as the model holds them


def kl_sum(p: Tensor, logits: Tensor) -> Tensor:
    return F.kl_div(logits.log_softmax(1), p, reduction="sum")


def clipped(x: Tensor, delta: Tensor) -> Tensor:
    return (x + delta.clamp(-EPS, EPS)).clamp(0, 1) - x


def loops(rules: str) -> dict[str, dict[str, Any]]:
    released = rules == "released"

    def guided(cap: int, alpha: float) -> Steps:
        if rules == "literal":
            return m_plus(99, alpha)
        return m_plus(cap, alpha, ramp=True) if released else m_plus(cap, alpha, span=1.0)

    trades = {"loss": "trades", "inner": "kl", "start": "jitter"}
    mart = {"loss": "mart", "start": "jitter"}
    noisy = {"noise": 2.0, "bound": 99.0}
    pgi = {"start": "bernoulli", "loss": "pgi", "resets": 4}
    return {
        "fgsm": {"family": "craft", "steps": Steps(1, 1.25)},
        "n-fgsm": {"family": "craft", "steps": Steps(1, 1.0), **noisy},
        "g+n-fgsm": {"family": "craft", "steps": Steps(1, 1.0), "penalty": "gradient", **noisy},
        "fgsm-pgi": {"family": "craft", "steps": Steps(1, 1.0), **pgi},
        "g+fgsm-pgi": {"family": "craft", "steps": Steps(1, 1.0), "penalty": "gradient", **pgi},
        "awp+fgsm-pgi": {"family": "craft", "steps": Steps(1, 1.0), "awp": 0.005, **pgi},
        "gradalign": {"family": "craft", "steps": Steps(1, 1.25), "penalty": "alignment"},
        "m+gradalign": {"family": "craft", "steps": guided(1, 1.25), "penalty": "alignment"},
        "pgd-7": {"family": "craft", "steps": Steps(7, 0.25)},
        "m+pgd-2": {"family": "craft", "steps": guided(2, 0.25)},
        "m+pgd": {"family": "craft", "steps": guided(7, 0.25)},
        "free-4": {"family": "replay", "steps": Steps(3, 1.0), "start": "zero"},
        "deat-1": {"family": "replay", "steps": Steps(0, 1.25, every_epoch)},
        "deat-40%": {"family": "replay", "steps": Steps(0, 1.25, above_40)},
        "m+deat": {"family": "replay", "steps": m_plus(7, 1.25)},
        "trades": {"family": "craft", "steps": Steps(10, 0.25), **trades},
        "m+trades": {"family": "craft", "steps": guided(10, 0.25), **trades},
        "f+trades": {"family": "craft", "steps": Steps(10, 0.25), "stop": "fat", **trades},
        "mart": {"family": "craft", "steps": Steps(10, 0.25), **mart},
        "m+mart": {"family": "craft", "steps": guided(10, 0.25), **mart},
        "f+mart": {"family": "craft", "steps": Steps(10, 0.25), "stop": "fat", **mart},
        "fat-5": {"family": "craft", "steps": Steps(5, 0.25), "stop": "fat"},
        "dat": {"family": "craft", "steps": Steps(10, 0.25), "stop": "dat"},
        "amata-2-6": {"family": "craft", "steps": amata(not released), "start": "zero"},
        "yopo-4-2": {"family": "relay", "steps": Steps(3, 0.25)},
        "g+free-1": {"family": "replay", "steps": Steps(0, 1.0), "start": "zero", "penalty": "gradient"},
        "g+fgsm": {"family": "craft", "steps": Steps(1, 1.25), "penalty": "gradient"},
        "m+g+deat": {"family": "replay", "steps": m_plus(7, 1.25), "penalty": "gradient"},
        "g+trades": {"family": "craft", "steps": Steps(10, 0.25), "penalty": "gradient", **trades},
        "g+yopo-4-2": {"family": "relay", "steps": Steps(3, 0.25), "penalty": "gradient"},
        "awp+pgd-2": {"family": "craft", "steps": Steps(2, 0.25), "awp": 0.005},
        "m+awp+deat": {"family": "replay", "steps": m_plus(7, 1.25), "awp": 0.005},
        "awp+trades": {"family": "craft", "steps": Steps(10, 0.25), "awp": 0.005, **trades},
        "awp+mart": {"family": "craft", "steps": Steps(10, 0.25), "awp": 0.005, **mart},
        "g+pgd-2 curvature": {"family": "craft", "steps": Steps(2, 0.25), "penalty": "curvature"},
        "g+deat-1 curvature": {"family": "replay", "steps": Steps(0, 1.25, every_epoch), "penalty": "curvature"},
    }


CAPPED = {"deat-1": 4, "deat-40%": 3, "g+deat-1 curvature": 4}
"""Where the released code stops raising k."""


@pytest.mark.parametrize("rules", ["default", "literal", "released"])
@pytest.mark.parametrize("name", loops("default"))
def test_training_equals_a_plain_loop_in_weights_losses_magnitudes_thresholds_and_k(name: str, rules: str) -> None:
    released = rules == "released"
    options = {"epochs": EPOCHS, "lr": LR, "threat": deat.Linf(EPS), "normalize": ((MEAN,), (STD,))}
    method, _, form = name.partition(" ")
    method = deat.configure_method(deat.get_method(method, rules=rules), g_form=form or None)
    loop = Loop(**loops(rules)[name], released=released)
    if loop.resets:
        rule = replace(method.attack.remember, reset_every=loop.resets)
        method = replace(method, attack=replace(method.attack, remember=rule))
    trainer = trainer_of(method, conv_net(batch_norm=True).double(), data=learnable(), **options)
    if released and name in CAPPED:
        real, cap = loop.steps.grow, CAPPED[name]
        loop.steps.grow = lambda s, *seen: real(s, *seen) if s.k < cap else None
    epochs = [list(trainer.train.epoch(t)) for t in range(EPOCHS)]
    history = trainer.fit().history
    loop.train(epochs)
    moved = [now.active - before for now, before in zip(history, [0, *(e.active for e in history)], strict=False)]
    found = [
        (e.k, e.alpha, e.loss, e.train_accuracy, e.magnitude, e.threshold or 0.0, m)
        for e, m in zip(history, moved, strict=True)
    ]
    assert [row[0] for row in found] == [row[0] for row in loop.seen]
    rows = [torch.tensor(seen, dtype=torch.float64) for seen in (found, loop.seen)]
    torch.testing.assert_close(*rows, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(trainer.model.net.state_dict(), loop.net.state_dict(), rtol=1e-8, atol=1e-9)


def imagenet_loop(
    net: nn.Module, epochs: list[list[tuple[Tensor, Tensor]]], *, eps: float, alpha: float, gamma: float | None, r: int
) -> list[tuple[float, ...]]:
    """The authors' ImageNet script: one noise tensor for all batches, stepped after every pass, clamped to eps alone.

    With gamma, r replays become 2 after the first epoch and M+ adds more, up to 4; without, r stays.
    """
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9, weight_decay=5e-4)
    noise, threshold, seen = torch.zeros_like(epochs[0][0][0]).double(), 0.0, []
    for t, batches in enumerate(epochs):
        loss_sum, hits, magnitude = 0.0, 0, 0.0
        for x, y in batches:
            for _ in range(r):
                variable = noise[: len(x)].clone().requires_grad_()
                logits = net(((x.double() + variable).clamp(0, 1) - MEAN_) / STD_)
                loss = F.cross_entropy(logits, y)
                optimizer.zero_grad()
                loss.backward()
                noise[: len(x)] = (noise[: len(x)] + alpha * variable.grad.sign()).clamp(-eps, eps)
                optimizer.step()
            loss_sum, hits = loss_sum + loss.item() * len(y), hits + int((logits.argmax(1) == y).sum())
            magnitude += float((variable.grad * len(y)).abs().sum())
        seen.append((r - 1, loss_sum / 24, hits / 24, magnitude, threshold))
        if gamma and t == 0:
            r += 1
        elif gamma and t == 1:
            threshold = gamma * magnitude
        elif gamma and magnitude > threshold and r < 4:
            r, threshold = r + 1, gamma * magnitude
    return seen


@pytest.mark.parametrize(("label", "gamma", "r"), [("free-4", None, 4), ("m+deat gamma 1.01", 0.05, 1)])
def test_the_imagenet_recipe_carries_its_noise_as_the_authors_script_does(
    label: str, gamma: float | None, r: int
) -> None:
    (row,) = [row for row in get_recipe("imagenet").make_rows(data="folder:photos") if row.label == label]
    threat = deat.Linf(row.request.eps)
    method = deat.configure_method(
        deat.get_method(row.request.method, rules=row.request.rules), threat, **row.request.method_options
    )
    method = deat.configure_method(method, gamma=gamma)  # a small one, so that k grows in six epochs
    options = {"epochs": EPOCHS, "lr": LR, "threat": threat, "normalize": ((MEAN,), (STD,))}
    trainer = trainer_of(method, conv_net(batch_norm=True).double(), data=images(24), **options)
    epochs = [list(trainer.train.epoch(t)) for t in range(EPOCHS)]
    history = trainer.fit().history
    net = conv_net(batch_norm=True).double()
    seen = imagenet_loop(net, epochs, eps=threat.eps, alpha=row.request.alpha, gamma=gamma, r=r)
    found = [(e.k, e.loss, e.train_accuracy, e.magnitude, e.threshold or 0.0) for e in history]
    assert {k for k, *_ in found} == ({3} if gamma is None else {0, 1, 2, 3})
    torch.testing.assert_close(
        *(torch.tensor(rows, dtype=torch.float64) for rows in (found, seen)), rtol=1e-8, atol=1e-9
    )
    torch.testing.assert_close(trainer.model.net.state_dict(), net.state_dict(), rtol=1e-8, atol=1e-9)
