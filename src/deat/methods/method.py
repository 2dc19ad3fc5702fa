"""A training method as data: how a batch is played, and how many steps each epoch takes."""

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from torch import Tensor

from deat.attack_schedules import Schedule
from deat.core.batch_buffers import Budget
from deat.core.game import Game
from deat.core.inner_attack import InnerAttack
from deat.core.magnitude_probe import MagnitudeProbe
from deat.core.measurements import Measurement
from deat.core.move_order import Play
from deat.core.training_losses import CrossEntropy, TrainingLoss
from deat.errors import UsageError
from deat.tasks import Task
from deat.threat import ThreatModel
from deat.utils.notebook_html import render_html

RECORDED_NAMES = {
    "InnerAttack": "Ascent",
    "MagnitudeProbe": "Probe",
    "LinearRamp": "Linear",
    "StopWhenFooled": "Friendly",
    "StopWhenConverged": "Converged",
    "attack": "ascent",
    "random_start_at_k0": "noisy",
    "carries_outside_box": "carries_unclipped",
    "stop_threshold": "level",
    "stop_threshold_until": "level_until",
}
"""What run records and checkpoints call some classes and fields, so that a run can be resumed by a later version."""


@dataclass(frozen=True)
class Method:
    """A training method as frozen data.

    Args:
        name: Name in records and tables.
        play: How one batch is played: Craft, Replay, Relay, or a class of your own.
        schedule: How many steps k of which size each epoch takes. Its lengths are in units of eps (alpha_eps).
        attack: The adversary: its loss, start, batch-norm mode and stop rule.
        objective: The training loss.
        probe: Which gradient is the magnitude l_X.
        summary: One line for listings and records. A method without one gets the first sentence of the docstring of the
            function that builds it, or of the file that defines it.
        measurements: Further numbers of each epoch, for a schedule that reads them.

    Raises:
        UsageError: If a part is of another kind, or the schedule's lengths are absolute.

    Example:
        >>> deat.Method("bold", deat.Craft(), deat.attack_schedules.Fixed(k=3, alpha_eps=0.5))
    """

    name: str
    play: Play
    schedule: Schedule
    attack: InnerAttack = field(default_factory=InnerAttack)
    objective: TrainingLoss = field(default_factory=CrossEntropy)
    probe: MagnitudeProbe = field(default_factory=MagnitudeProbe)
    summary: str = field(default="", compare=False)
    measurements: tuple[Measurement, ...] = ()

    def __post_init__(self) -> None:
        missing = [
            name for name in ("__call__", "crafts_first", "can_record", "backprops") if not hasattr(self.play, name)
        ]
        if missing or isinstance(self.play, type):
            lacks = f", which has no {' and no '.join(missing)}" if missing else ""
            raise UsageError(
                f"the play of method {self.name!r} is {_describe_part(self.play)}{lacks}. Give an object, such as "
                "deat.Craft() or deat.Replay(), or one of a class derived from those, with its own __call__ and backprops."
            )
        for part, kind in (("schedule", Schedule), ("attack", InnerAttack), ("probe", MagnitudeProbe)):
            if not isinstance(value := getattr(self, part), kind):
                raise UsageError(
                    f"the {part} of method {self.name!r} is {_describe_part(value)}. Make it a {kind.__name__}."
                )
        if self.schedule.is_absolute:
            raise UsageError(
                f"the schedule of method {self.name!r} is {self.schedule!r}, whose lengths are absolute. Give them in "
                "units of eps: alpha_eps in place of alpha, stretch_eps in place of stretch."
            )

    def play_batch(self, game: Game, x: Tensor, y: Tensor, budget: Budget) -> None:
        """Train on one batch, and check the cost that the play declares.

        Args:
            game: The game whose moves the play calls.
            x: The images.
            y: The labels.
            budget: The number and the size of the attack's steps.

        Raises:
            UsageError: If the play made another number of backprops than it declares.
        """
        before = game.cost.backprops
        self.play(game, x, y, budget)
        made, declared = game.cost.backprops - before, self.play.backprops(budget)
        if made != declared and not self.attack.compact:  # which saves the steps that no example takes
            raise UsageError(
                f"the play of method {self.name!r} made {made} backprops in a batch with k = {budget.k}, and its backprops() "
                f"declares {declared}. Correct {type(self.play).__name__}.backprops: costs are estimated from it."
            )

    def bind(self, threat: ThreatModel, epochs: int) -> Schedule:
        """Return the schedule in absolute numbers, for one threat model and number of epochs.

        Args:
            threat: Threat model, whose eps is the unit of the declared lengths.
            epochs: Number of epochs of the training.

        Returns:
            A schedule with alpha and stretch in place of alpha_eps and stretch_eps.

        Example:
            >>> deat.get_method("pgd-7").bind(deat.Linf(8 / 255), epochs=30).alpha * 255
            2.0
        """
        return self.schedule.bind(threat.eps, epochs)

    def _repr_html_(self) -> str:
        parts = ("play", "schedule", "attack", "objective", "probe")
        return render_html(
            self.name, [self.summary], header=("part", ""), rows=[(p, repr(getattr(self, p))) for p in parts]
        )

    def describe(self) -> dict[str, Any]:
        """Return the whole declaration as JSON, for run records and to compare two runs.

        Returns:
            A dictionary with the names that records use; the schedule's alpha and stretch are in units of eps.
        """
        return dict(_to_json(self))


def check_method_on_task(method: Method, task: Task) -> None:
    """Check that a task defines all that a method needs of it, before any work.

    Args:
        method: The method.
        task: The task.

    Raises:
        UsageError: A loss of the method needs a function that the task does not define; the message says why.
    """
    for part in (method.objective, method.attack):
        for name in getattr(part, "requires", ()):
            if not task.defines(name):
                raise UsageError(f"{method.name} cannot be used here: {task.why_undefined(name)}.")


def check_method_on_threat(method: Method, threat: ThreatModel) -> None:
    """Check that a method's play and attack are defined for a threat model, before any work.

    Args:
        method: The method.
        threat: The threat model.

    Raises:
        UsageError: A step of the play is not defined there; the message says why. A play has a method `check_threat`
            where it depends on the threat model.
    """
    method.attack.check_threat(threat)
    if callable(check := getattr(method.play, "check_threat", None)):
        check(threat)


def _describe_part(part: object) -> str:
    name = getattr(part, "__qualname__", None)
    return f"the {type(part).__name__.replace('type', 'class')} {name}" if name else repr(part)


def _to_json(value: Any) -> Any:
    if isinstance(value, str | int | float | bool | list | None):
        return value
    if is_dataclass(value):
        parts = {f.name: getattr(value, f.name) for f in fields(value)}
        if isinstance(value, Schedule):
            parts = _record_lengths(value, parts)
        if isinstance(value, InnerAttack):
            if not value.clamps_images:
                del parts["carries_outside_box"]  # without effect, and older records do not have it
            if not value.leaves_ball:
                del parts["leaves_ball"]  # for the same reason
            if value.start_radius == 1:
                del parts["start_radius"]
            if value.remember is None:
                del parts["remember"]
        if isinstance(value, Method):
            names = [measurement.name for measurement in parts.pop("measurements")]
            parts |= {"measurements": names} if names else {}  # as above
        kind = type(value).__name__
        recorded = {RECORDED_NAMES.get(name, name): _to_json(part) for name, part in parts.items()}
        return {"kind": RECORDED_NAMES.get(kind, kind), **recorded}
    return getattr(value, "__qualname__", type(value).__qualname__)  # a play or a loss that is no dataclass


def _record_lengths(schedule: Schedule, parts: dict[str, Any]) -> dict[str, Any]:
    """A declared schedule's fields, with lengths in units of eps under the names without _eps."""
    lengths = {name: parts.pop(f"{name}_eps") for name in schedule.LENGTHS}
    return parts | {name: 0.0 if length is None else length for name, length in lengths.items()}
