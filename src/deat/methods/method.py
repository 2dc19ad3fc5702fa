"""A training method as data: who plays what, and how much."""

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from deat.core.inner_attack import InnerAttack
from deat.core.moves import MagnitudeProbe
from deat.core.objectives import CrossEntropy, TrainingLoss
from deat.core.plays import Play
from deat.errors import UsageError
from deat.schedules import Schedule
from deat.threat import ThreatModel

RECORDED_NAMES = {"InnerAttack": "Ascent", "MagnitudeProbe": "Probe", "attack": "ascent"}
"""What run records and checkpoints call some classes and fields, so that a run can be resumed by a later version."""


@dataclass(frozen=True)
class Method:
    """A frozen declaration: the play, the adversary's ascent, the learner's objective, the schedule of k.

    Lengths in the schedule are in units of eps; bind() makes them absolute. probe says which gradient is
    the magnitude l_X.
    """

    name: str
    play: Play
    schedule: Schedule
    attack: InnerAttack = field(default_factory=InnerAttack)
    objective: TrainingLoss = field(default_factory=CrossEntropy)
    probe: MagnitudeProbe = field(default_factory=MagnitudeProbe)
    summary: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        """Refuse parts that are of another kind, which a training would miss only once it has begun."""
        lacking = [
            name for name in ("__call__", "crafts_first", "can_record", "backprops") if not hasattr(self.play, name)
        ]
        if lacking or isinstance(self.play, type):
            raise UsageError(
                f"the play of method {self.name!r} is {_describe_part(self.play)}; give an object, as deat.Craft() or "
                "deat.Replay() is, or one of a class of your own derived from those, with its __call__ and backprops."
            )
        for part, kind in (("schedule", Schedule), ("attack", InnerAttack), ("probe", MagnitudeProbe)):
            if not isinstance(held := getattr(self, part), kind):
                raise UsageError(
                    f"the {part} of method {self.name!r} is {_describe_part(held)}; make it a {kind.__name__}."
                )

    def bind(self, threat: ThreatModel, epochs: int) -> Schedule:
        """The schedule in absolute numbers, for one threat model and number of epochs."""
        return self.schedule.bind(threat.eps, epochs)

    def describe(self) -> dict[str, Any]:
        """The whole declaration as JSON, for run records and for comparing two runs."""
        return dict(_to_json(self))


def _describe_part(part: object) -> str:
    """An object by its kind, a class or a function by its name too."""
    name = getattr(part, "__qualname__", None)
    return f"the {type(part).__name__.replace('type', 'class')} {name}" if name else repr(part)


def _to_json(value: Any) -> Any:
    if isinstance(value, str | int | float | bool | None):
        return value
    if is_dataclass(value):
        parts = {RECORDED_NAMES.get(f.name, f.name): _to_json(getattr(value, f.name)) for f in fields(value)}
        kind = type(value).__name__
        return {"kind": RECORDED_NAMES.get(kind, kind), **parts}
    return getattr(value, "__qualname__", type(value).__qualname__)  # a loss or play of somebody's own
