"""A training method as data: who plays what, and how much."""

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from deat.core.inner_attack import Ascent
from deat.core.moves import Probe
from deat.core.objectives import CrossEntropy, Loss
from deat.core.plays import Play
from deat.errors import UsageError
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

    def __post_init__(self) -> None:
        """Refuse parts that are of another kind, which a training would miss only once it has begun."""
        lacking = [name for name in ("__call__", "crafts", "records", "backprops") if not hasattr(self.play, name)]
        if lacking or isinstance(self.play, type):
            raise UsageError(
                f"the play of method {self.name!r} is {_named(self.play)}; give an object, as deat.Craft() or "
                "deat.Replay() is, or one of a class of your own derived from those, with its __call__ and backprops."
            )
        for part, kind in (("schedule", Schedule), ("ascent", Ascent), ("probe", Probe)):
            if not isinstance(held := getattr(self, part), kind):
                raise UsageError(f"the {part} of method {self.name!r} is {_named(held)}; make it a {kind.__name__}.")

    def bind(self, threat: ThreatModel, epochs: int) -> Schedule:
        """The schedule in absolute numbers, for one threat model and number of epochs."""
        return self.schedule.bind(threat.eps, epochs)

    def describe(self) -> dict[str, Any]:
        """The whole declaration as JSON, for run records and for comparing two runs."""
        return dict(_json(self))


def _named(part: object) -> str:
    """An object by its kind, a class or a function by its name too."""
    name = getattr(part, "__qualname__", None)
    return f"the {type(part).__name__.replace('type', 'class')} {name}" if name else repr(part)


def _json(value: Any) -> Any:
    if isinstance(value, str | int | float | bool | None):
        return value
    if is_dataclass(value):
        parts = {f.name: _json(getattr(value, f.name)) for f in fields(value)}
        return {"kind": type(value).__name__, **parts}
    return getattr(value, "__qualname__", type(value).__qualname__)  # a loss or play of somebody's own
