"""Attackers of one's own: ones that cheat, fail or keep count."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import deat
from deat.evaluation.attacks import parse_attack


class Interrupted(RuntimeError):
    """The evaluation was cut short."""


@dataclass
class Own:
    """An attack made of a function of (model, x, y, threat), which remembers what it was shown."""

    name: str
    act: Callable[[nn.Module, Tensor, Tensor, deat.ThreatModel], Tensor] = lambda model, x, y, threat: x
    seen: list[Tensor] = field(default_factory=list)

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, threat: deat.ThreatModel, generator: Any = None
    ) -> Tensor:
        self.seen.append(x.clone())
        return self.act(model, x, y, threat)

    @property
    def images(self) -> int:
        """How many images it was shown."""
        return sum(map(len, self.seen))


class Fragile:
    """One of our attacks, by name, which counts its calls and is interrupted after some."""

    def __init__(self, inner: str, calls_left: int = 10**9) -> None:
        self.name, self.inner = inner, parse_attack(inner)
        self.calls_left, self.calls = calls_left, 0

    def __call__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        threat: deat.ThreatModel,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        if self.calls == self.calls_left:
            raise Interrupted(self.name)
        self.calls += 1
        return self.inner(model, x, y, threat, generator)
