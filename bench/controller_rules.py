"""Rules that choose k by what training measures, which bench/controller_results.py compares with plain ramps.

Their signals come from the last update of each batch and cost no pass. The gap is one minus what delta reaches of the
largest first-order rise of the loss in the ball, along its last gradient: 0 where the adversary has converged.
"""

from dataclasses import dataclass, replace
from typing import Self

import deat
from deat.core.measurements import LARGEST_RISE, REACHED_RISE
from deat.schedules import Schedule, ScheduleState


@dataclass(frozen=True, kw_only=True, repr=False)
class GapRule(Schedule):
    """Base class: k grows by one above a gap, and falls by one below another.

    Args:
        max_steps: The largest k.
        raise_above: The gap above which k grows.
        lower_below: The gap below which k falls, at least to 1.
    """

    max_steps: int = 7
    raise_above: float
    lower_below: float

    def init(self) -> ScheduleState:
        """Return k = 0."""
        return {"k": 0}

    def k_at(self, state: ScheduleState, epoch: int) -> int:
        """Return the k of the state."""
        return int(state["k"])

    def follow_gap(self, k: int, record: deat.EpochRecord) -> int:
        """Return the next k by the gap of an epoch."""
        largest = record.measured["largest_rise"]
        gap = 1 - record.measured["reached_rise"] / largest if largest > 0 else 0.0
        return min(max(k + (gap > self.raise_above) - (gap < self.lower_below), 1), self.max_steps)

    def bounding_record(self, epoch: int, epochs: int, grows: bool) -> deat.EpochRecord:
        """Make a record whose gap is 1 or 0; see `Schedule.bounding_record`."""
        measured = {"reached_rise": float(not grows), "largest_rise": 1.0}
        return replace(super().bounding_record(epoch, epochs, grows), loss=float(not grows), measured=measured)


@dataclass(frozen=True, kw_only=True, repr=False)
class LateGap(GapRule):
    """k is low while the network learns, and follows the gap in the second half of training.

    In the first half k is 0, and 1 from the epoch on in which the largest first-order rise of the loss exceeds the loss,
    as it does in a network that was trained naturally. The second half begins with half of the largest k, rounded down.

    Args:
        epochs: The number of epochs of the training.
    """

    epochs: int = 0

    def bind(self, eps: float, epochs: int) -> Self:
        """Multiply all lengths by eps and set the number of epochs; see `Schedule.bind`."""
        return replace(super().bind(eps, epochs), epochs=epochs)

    def observe(self, state: ScheduleState, record: deat.EpochRecord) -> ScheduleState:
        """Return the next epoch's k; see `Schedule.observe`."""
        state, k, half = super().observe(state, record), int(state["k"]), self.epochs // 2
        if record.epoch + 1 < half:
            return {**state, "k": 1 if k or record.measured["largest_rise"] > record.loss else 0}
        if record.epoch + 1 == half:
            return {**state, "k": max(1, self.max_steps // 2)}
        return {**state, "k": self.follow_gap(k, record)}


@dataclass(frozen=True, kw_only=True, repr=False)
class Gap(GapRule):
    """k follows the gap from the second epoch on."""

    def observe(self, state: ScheduleState, record: deat.EpochRecord) -> ScheduleState:
        """Return the next epoch's k; see `Schedule.observe`."""
        return {**super().observe(state, record), "k": self.follow_gap(int(state["k"]), record)}


@dataclass(frozen=True, kw_only=True, repr=False)
class LeastMagnitude(Schedule):
    """M+ with another threshold: k grows when l_X exceeds gamma times its least value at this k.

    Args:
        gamma: The factor of the threshold.
        max_steps: The largest k.
    """

    gamma: float = 1.01
    max_steps: int = 7

    def init(self) -> ScheduleState:
        """Return k = 0 and no least value."""
        return {"k": 0, "least": None}

    def k_at(self, state: ScheduleState, epoch: int) -> int:
        """Return the k of the state."""
        return int(state["k"])

    def observe(self, state: ScheduleState, record: deat.EpochRecord) -> ScheduleState:
        """Return the next epoch's k; see `Schedule.observe`."""
        state = super().observe(state, record)
        if record.epoch == 0:
            return {**state, "k": 1}
        if state["least"] is not None and record.magnitude > self.gamma * state["least"]:
            return {"k": min(int(state["k"]) + 1, self.max_steps), "least": None}
        return {**state, "least": min(record.magnitude, state["least"] or record.magnitude)}


ALPHA_EPS = 1.25
RULES: dict[str, Schedule] = {
    "late gap": LateGap(raise_above=0.04, lower_below=0.01, alpha_eps=ALPHA_EPS),
    "gap": Gap(raise_above=0.15, lower_below=0.04, alpha_eps=ALPHA_EPS),
    "least l_X": LeastMagnitude(alpha_eps=ALPHA_EPS),
}
"""The rules by name."""


def get_method(name: str) -> deat.Method:
    """Return the replaying method with a rule, or the method of any other name."""
    if name not in RULES:
        return deat.get_method(name)
    method = replace(deat.get_method("deat-3"), name=name, schedule=RULES[name])
    return replace(method, measurements=(REACHED_RISE, LARGEST_RISE))
