"""The judge distrusts everyone: every adversarial example is verified and classified again, apart from its attack."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from deat.modes import evaluating
from deat.seeding import derive
from deat.threat import ThreatModel


class Attacker(Protocol):
    """Anything that is called with (model, x, y, threat, generator) and answers with images."""

    @property
    def name(self) -> str:
        """What it is called in a table."""

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, generator: torch.Generator | None = None
    ) -> Tensor:
        """The adversarial images."""


@dataclass(frozen=True)
class Ruling:
    """What an attack left of one block: which images are still correct, and what it took to find out."""

    correct: list[bool]
    invalid: int
    seconds: float
    forwards: int
    backwards: int


class Judge:
    """Rules on blocks of images. A ruling depends on model, seed, attack and block alone."""

    def __init__(self, model: nn.Module, threat: ThreatModel, seed: int) -> None:
        self.model, self.threat, self.seed = Counted(model), threat, seed

    def rule(self, attacker: Attacker, x: Tensor, y: Tensor, block: int, alive: list[bool] | None = None) -> Ruling:
        """The ruling on a block; images that are wrong to begin with, or not alive, are not attacked."""
        started, counted = perf_counter(), (self.model.forwards, self.model.backwards)
        with full_precision(), torch.autocast(x.device.type, enabled=False), evaluating(self.model):
            stands = self._classify(x, y)
            if alive is not None:
                stands &= torch.tensor(alive, device=x.device)
            invalid = self._attack(attacker, x, y, block, stands)
        forwards, backwards = self.model.forwards - counted[0], self.model.backwards - counted[1]
        return Ruling(stands.tolist(), invalid, perf_counter() - started, forwards, backwards)

    def _attack(self, attacker: Attacker, x: Tensor, y: Tensor, block: int, stands: Tensor) -> int:
        """Strike out of `stands` whom the attack fools; how many of its examples were not allowed."""
        index = stands.nonzero().squeeze(1)
        if attacker.name == "natural" or len(index) == 0:
            return 0
        generator = torch.Generator(x.device).manual_seed(block_seed(self.seed, attacker.name, block))
        found = attacker(self.model, x[index], y[index], self.threat, generator).detach()
        self.model.eval()  # whatever mode the attack left it in
        if found.shape != x[index].shape or found.dtype != x.dtype:
            return len(index)
        valid = self.threat.contains(x[index], found)
        found = torch.where(valid.view(-1, *[1] * (x.dim() - 1)), found, x[index])
        stands[index] = self._classify(found, y[index])
        return int((~valid).sum())

    def _classify(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            hit: Tensor = self.model(x).argmax(1) == y
        return hit


class Counted(nn.Module):
    """A model that counts the images which pass through it, forward and backward."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.forwards = self.backwards = 0
        self.training = net.training  # not train(), which would reach into the net

    def forward(self, x: Tensor) -> Tensor:
        """The model's logits."""
        self.forwards += len(x)
        logits: Tensor = self.net(x)
        if logits.requires_grad:
            logits.register_hook(self._passed_back)  # type: ignore[no-untyped-call]
        return logits

    def _passed_back(self, grad: Tensor) -> None:
        self.backwards += len(grad)


def block_seed(seed: int, attack: str, block: int) -> int:
    """The seed of an attack on a block: below 2**31, which every implementation accepts."""
    return derive(seed, f"attack {attack}", block) % 2**31


@contextmanager
def full_precision() -> Iterator[None]:
    """float32 without TF32, whatever was set before, by torch's older interface or its newer one."""
    backends: Any = torch.backends
    try:
        matmul, conv = torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32
    except RuntimeError:  # the newer one was used, and torch refuses to mix them
        with _ieee(backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul):
            yield
        return
    try:
        torch.set_float32_matmul_precision("highest")
        backends.cudnn.allow_tf32 = False
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        backends.cudnn.allow_tf32 = conv


@contextmanager
def _ieee(*units: Any) -> Iterator[None]:
    before = [unit.fp32_precision for unit in units]
    try:
        for unit in units:
            unit.fp32_precision = "ieee"
        yield
    finally:
        for unit, precision in zip(units, before, strict=True):
            unit.fp32_precision = precision
