"""A training method as data: who plays what, and how much."""

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from deat.game.ascent import Ascent
from deat.game.moves import Probe
from deat.game.objectives import CrossEntropy, Loss
from deat.game.plays import Play
from deat.schedules import Schedule
from deat.threat import ThreatModel


@dataclass(frozen=True)
class Method:
    """A frozen declaration: the play, the adversary's ascent, the learner's objective, the schedule of k.

    Lengths in the schedule are in units of eps; bind() makes them absolute. probe says which gradient is
    the magnitude l_X.
    """

    name: str
    play: Play
    schedule: Schedule
    ascent: Ascent = field(default_factory=Ascent)
    objective: Loss = field(default_factory=CrossEntropy)
    probe: Probe = field(default_factory=Probe)
    summary: str = field(default="", compare=False)

    def bind(self, threat: ThreatModel, epochs: int) -> Schedule:
        """The schedule in absolute numbers, for one threat model and number of epochs."""
        return self.schedule.bind(threat.eps, epochs)

    def describe(self) -> dict[str, Any]:
        """The whole declaration as JSON, for run records and for comparing two runs."""
        return dict(_json(self))


def _json(value: Any) -> Any:
    if isinstance(value, str | int | float | bool | None):
        return value
    if is_dataclass(value):
        parts = {f.name: _json(getattr(value, f.name)) for f in fields(value)}
        return {"kind": type(value).__name__, **parts}
    return getattr(value, "__qualname__", type(value).__qualname__)  # a loss or play of somebody's own
