"""Other ways to choose k, which bench/controller_results.py compares with auto, plain ramps and FREE.

All of them replay a batch k + 1 times, as auto does, with the same attack.
"""

from dataclasses import dataclass, replace

import deat
from deat.attack_schedules import AdversaryGap, Schedule, ScheduleState


@dataclass(frozen=True, kw_only=True, repr=False)
class EarlyGap(AdversaryGap):
    """k follows the gap as in auto, but from the second epoch on."""

    def observe(self, state: ScheduleState, record: deat.EpochRecord) -> ScheduleState:
        """Return the next epoch's k; see `Schedule.observe`."""
        return super().observe(state, replace(record, epoch=self.epochs))


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


@dataclass(frozen=True, kw_only=True, repr=False)
class Sequence(Schedule):
    """k as it is given for each epoch.

    Args:
        ks: The numbers of steps.
    """

    ks: tuple[int, ...]

    def k_at(self, state: ScheduleState, epoch: int) -> int:
        """Return the k of the epoch."""
        return self.ks[epoch]


SEQUENCE = "k "
"""How the name of a sequence begins; its numbers follow."""


def name_sequence(ks: tuple[int, ...]) -> str:
    """Return the name of a method with these k."""
    return SEQUENCE + " ".join(map(str, ks))


def get_method(name: str) -> deat.Method:
    """Return the replaying method with a rule or a sequence, or the method of any other name."""
    auto = deat.get_method("auto")
    alpha_eps = auto.schedule.alpha_eps
    if name == "gap":
        rule: Schedule = EarlyGap(max_steps=7, tolerance=0.15, alpha_eps=alpha_eps)
    elif name == "least l_X":
        rule = LeastMagnitude(alpha_eps=alpha_eps)
    elif name.startswith(SEQUENCE):
        rule = Sequence(ks=tuple(map(int, name.removeprefix(SEQUENCE).split())), alpha_eps=alpha_eps)
    else:
        return deat.get_method(name)
    return replace(auto, name=name, schedule=rule)
