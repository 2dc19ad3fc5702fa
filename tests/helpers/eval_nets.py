"""Digits networks, honest ones and ones that deserve a flag, for the tests of evaluation."""

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import deat

from .nets import seeded

EPS = 0.15
THREAT = deat.Linf(EPS)


def _convolutions() -> nn.Module:
    return deat.build_model("small", in_channels=1, image_size=8)


def _layers() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


def _flat() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


@cache
def _trained(method: str, build: Callable[[], nn.Module] = _layers) -> nn.Module:
    net = seeded(build)
    options = {"batch_size": 64, "lr": 0.1, "precision": "fp32", "device": "cpu", "workers": 0}
    deat.fit(net, deat.load_data("digits").train, method=method, threat=THREAT, epochs=12, **options)
    return net.eval()


def robust() -> nn.Module:
    """A digits network trained against THREAT."""
    return deepcopy(_trained("m+deat"))


def undefended() -> nn.Module:
    """A digits network trained on clean images only."""
    return deepcopy(_trained("natural"))


def convolutional() -> nn.Module:
    """A digits network of convolutions trained on clean images only, for where convolutions matter."""
    return deepcopy(_trained("natural", _convolutions))


def tiny() -> nn.Module:
    """A robust digits network of two layers, for attacks that take thousands of passes."""
    return deepcopy(_trained("u-fgsm", _flat))


def digits(n: int = 400, first: int = 0) -> tuple[Tensor, Tensor]:
    """Test images in [0, 1] and their labels."""
    test = deat.load_data("digits").test
    return test.images[first : first + n] / 255, test.labels[first : first + n]


class Around(nn.Module):
    """A network with a function before it and one behind it."""

    def __init__(self, net: nn.Module, before: Callable[[Tensor], Tensor], behind: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.before, self.behind = net, before, behind

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.net(self.before(x)))


def same(values: Tensor) -> Tensor:
    return values


def quantised(net: nn.Module, levels: int = 8) -> nn.Module:
    """Pixels are rounded to a few levels, which has no gradient."""
    return Around(net, lambda x: (x * (levels - 1)).round() / (levels - 1), same)


def scaled(net: nn.Module, factor: float = 1e4) -> nn.Module:
    """Logits so large that softmax saturates."""
    return Around(net, same, lambda logits: factor * logits)


def saturated(net: nn.Module) -> nn.Module:
    """Logits squashed by a sigmoid that is flat nearly everywhere; every image keeps its class."""

    def squash(logits: Tensor) -> Tensor:
        return 5 * torch.sigmoid(1e3 * (logits - logits.topk(2, 1).values.mean(1, True)))

    return Around(net, same, squash)


def softmax(net: nn.Module) -> nn.Module:
    return Around(net, same, lambda logits: logits.softmax(1))


def dropping(net: nn.Module) -> nn.Module:
    """Dropout that no mode switches off."""
    return Around(net, lambda x: F.dropout(x, 0.1, training=True), same)


class Stuck(nn.Sequential):
    """A network whose batch norm never leaves training mode."""

    def train(self, mode: bool = True) -> "Stuck":
        return super().train(True)


class Purifying(nn.Module):
    """A network that follows a gradient of its own before it answers, found by a function that it was given."""

    def __init__(self, net: nn.Module, slope: Callable[..., Any] = torch.autograd.grad) -> None:
        super().__init__()
        self.net, self.slope = net, slope

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            own = x.detach().clone().requires_grad_()
            (grad,) = self.slope(self.net(own).logsumexp(1).sum(), own)
        return self.net(x + 1e-3 * grad)


class _Mask(torch.autograd.Function):
    """The identity, with a made-up gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fake: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.fake = fake
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.fake(ctx.saved_tensors[0], grad), None


def masked(net: nn.Module, fake: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    """A network whose gradient at x is fake(x, true gradient)."""
    return Around(net, lambda x: _Mask.apply(x, fake), same)


def nowhere(x: Tensor, grad: Tensor) -> Tensor:
    """One and the same gradient for every image, which tells nothing."""
    return torch.randn(x.shape[1:], generator=torch.Generator().manual_seed(1)).expand_as(x)


def backwards(x: Tensor, grad: Tensor) -> Tensor:
    """The gradient turned round."""
    return -grad


def true_at_data_only(x: Tensor, grad: Tensor) -> Tensor:
    """The gradient at images as they are stored, in 255 levels; nothing of use elsewhere."""
    stored = ((255 * x).round() / 255 - x).abs().flatten(1).amax(1) < 1e-6
    return torch.where(stored.view(-1, 1, 1, 1), grad, nowhere(x, grad))


class Remembering(nn.Module):
    """A network that looks the answer up once an image is far from one it remembers."""

    def __init__(self, net: nn.Module, x: Tensor, y: Tensor, far: float) -> None:
        super().__init__()
        self.net, self.far = net, far
        self.register_buffer("x", x)
        self.register_buffer("y", y)

    def forward(self, x: Tensor) -> Tensor:
        distance = torch.cdist(x.flatten(1), self.x.flatten(1), p=float("inf"))
        nearest, index = distance.detach().min(1)
        known = 100 * F.one_hot(self.y[index], 10).to(x.dtype)
        return torch.where((nearest > self.far)[:, None], known, self.net(x))
