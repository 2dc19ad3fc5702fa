"""Schedules: how many attack steps k each epoch takes, and of which size alpha; M+ is `GradientMagnitude`.

A schedule is a frozen rule. Its state is a JSON value that the caller stores: ``init() -> state``,
``budget(state, epoch) -> Budget``, ``observe(state, record) -> state``. A schedule for a loop of your own takes
absolute lengths (``alpha``, ``stretch``). A method's declaration gives them in units of eps (``alpha_eps``,
``stretch_eps``), and :meth:`Schedule.bind` makes them absolute.
"""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

from deat.core.batch_buffers import Budget
from deat.core.epoch_sums import EpochRecord
from deat.core.measurements import LARGEST_RISE, REACHED_RISE
from deat.errors import NumericalError, UsageError
from deat.utils.numbers import check_int, check_number, convert_number_fields

__all__ = [
    "AccuracyAbove",
    "AdversaryGap",
    "Budget",
    "EpochRecord",
    "EveryEpochs",
    "Fixed",
    "GradientMagnitude",
    "LinearRamp",
    "Schedule",
    "ScheduleState",
]

HOPELESS_SHARE = 2 / 3
"""If l_X is below this share of the threshold of M+ in the fourth epoch, k is unlikely to grow. In runs that stayed at 1
after fine-tuning or with few images the share was 0.42 to 0.51; in runs whose k grew later it was at least 0.97."""
ScheduleState = dict[str, Any]
"""What a schedule remembers between epochs: a JSON object."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Schedule(ABC):
    """Base class of all schedules. Subclasses choose k; the base class itself has no state.

    The step size for k iterations is max(stretch / k, alpha). Lengths have one unit: a method's declaration gives
    those in units of eps, a schedule for a loop of your own gives absolute ones.

    Args:
        alpha: Step size, absolute.
        alpha_eps: Step size, in units of eps.
        stop_threshold: Threshold of the stop rule: FAT's tau or DAT's c_t.
        stretch: Length that k steps must be able to cover, absolute.
        stretch_eps: Length that k steps must be able to cover, in units of eps.

    Raises:
        UsageError: If a schedule with an adversary has no step size, or lengths of both units.
    """

    alpha: float | None = None
    alpha_eps: float | None = None
    stop_threshold: float = 0.0
    stretch: float | None = None
    stretch_eps: float | None = None

    LENGTHS: ClassVar[tuple[str, ...]] = ("alpha", "stretch")
    """The fields that are lengths; each has a second field, its name with _eps, in units of eps."""

    def __post_init__(self) -> None:
        convert_number_fields(self)
        check_number("stop_threshold", self.stop_threshold, lambda v: v >= 0, ">= 0")
        for name in self._given_lengths("", "_eps"):
            check_number(name, getattr(self, name), lambda v: v >= 0, ">= 0")
        absolute, in_eps = self._given_lengths(""), self._given_lengths("_eps")
        if absolute and in_eps:
            raise UsageError(
                f"{type(self).__name__} has {absolute[0]}, which is absolute, and {in_eps[0]}, in units of eps. Give "
                "alpha_eps and stretch_eps in a method's declaration, alpha and stretch in a loop of your own."
            )
        if self.has_adversary and not {"alpha", "alpha_eps", "stretch", "stretch_eps"} & {*absolute, *in_eps}:
            raise UsageError(
                f"{type(self).__name__} has no step size. Give alpha_eps, such as alpha_eps=0.25, in a method's "
                "declaration (in units of eps), or alpha, such as alpha=2/255, in a loop of your own (absolute)."
            )
        for name in self.LENGTHS if absolute else ():
            object.__setattr__(self, name, getattr(self, name) or 0.0)

    def __repr__(self) -> str:
        unset = {name + unit for name in self.LENGTHS for unit in ("", "_eps") if getattr(self, name + unit) is None}
        shown = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.name not in unset)
        return f"{type(self).__name__}({shown})"

    @property
    def is_absolute(self) -> bool:
        """Whether lengths are absolute, as after bind()."""
        return bool(self._given_lengths(""))

    @property
    def has_adversary(self) -> bool:
        """Whether any epoch can have an adversary."""
        return True

    def init(self) -> ScheduleState:
        """Return the state before the first epoch."""
        return {}

    def budget(self, state: ScheduleState, epoch: int) -> Budget:
        """Return the budget of an epoch.

        Args:
            state: The state before the epoch.
            epoch: Its number, from 0.

        Returns:
            The number of steps, the step size and the threshold of the stop rule.
        """
        k = self.k_at(state, epoch)
        return Budget(k, self.step_size(k), self.stop_threshold_at(epoch), epoch)

    def observe(self, state: ScheduleState, record: EpochRecord) -> ScheduleState:
        """Return the state after an epoch.

        Args:
            state: The state before the epoch.
            record: What was measured in the epoch.

        Returns:
            The new state.

        Raises:
            NumericalError: If the gradient magnitude is not finite.
        """
        _check_finite_magnitude(record)
        return dict(state)

    @abstractmethod
    def k_at(self, state: ScheduleState, epoch: int) -> int:
        """Return the number of steps in an epoch.

        Args:
            state: The state after the epochs before.
            epoch: The epoch, from 0.
        """

    def stop_threshold_at(self, epoch: int) -> float:
        """Return the threshold of the stop rule in an epoch.

        Args:
            epoch: The epoch, from 0.
        """
        return self.stop_threshold

    def step_size(self, k: int) -> float:
        """Return the step size for k steps: max(stretch / k, alpha).

        Args:
            k: The number of steps.
        """
        alpha, stretch = self._absolute("alpha"), self._absolute("stretch")
        return max(stretch / k, alpha) if k else alpha

    def explain_no_growth(self, state: ScheduleState, records: Sequence[EpochRecord]) -> str | None:
        """Explain why k never grew.

        Args:
            state: The state after training.
            records: The records of all epochs.

        Returns:
            A message for the user, or None if k grew or does not depend on records.
        """
        return None

    def is_stuck(self, state: ScheduleState, records: Sequence[EpochRecord]) -> bool:
        """Return whether k has not grown so far and is unlikely to, so that the user is warned early.

        Args:
            state: The state after these epochs.
            records: The records of all epochs so far.
        """
        return False

    def bind(self, eps: float, epochs: int) -> Self:
        """Return this schedule with absolute lengths, which a method declares in units of eps.

        Args:
            eps: The radius of the threat model.
            epochs: The number of epochs of the training.

        Raises:
            UsageError: If the lengths are absolute already.
        """
        if self.is_absolute:
            raise UsageError(f"{self!r} has absolute lengths already: bind() is for lengths in units of eps.")
        lengths: dict[str, Any] = {name: (getattr(self, f"{name}_eps") or 0.0) * eps for name in self.LENGTHS}
        lengths |= {f"{name}_eps": None for name in self.LENGTHS}
        return replace(self, **lengths)

    def _given_lengths(self, *units: str) -> list[str]:
        """List the fields of lengths that are set, with "" for absolute ones and "_eps" for those in units of eps."""
        return [name + unit for name in self.LENGTHS for unit in units if getattr(self, name + unit) is not None]

    def _absolute(self, length: str) -> float:
        """Return an absolute length, 0 if it is not set."""
        if self._given_lengths("_eps"):
            raise UsageError(
                f"the lengths of {self!r} are in units of eps: make them absolute by method.bind(threat, epochs)."
            )
        value: float | None = getattr(self, length)
        return value or 0.0

    def to_mplus(self, gamma: float, stretch_eps: float, ramp_eps: float) -> "GradientMagnitude":
        """Return the M+ form of this schedule, which lets l_X choose k, up to the largest k of this schedule.

        Args:
            gamma: How far l_X must exceed its value at the last growth.
            stretch_eps: See `Schedule`.
            ramp_eps: See `GradientMagnitude`.

        Raises:
            UsageError: If this schedule has no M+ form.
        """
        raise UsageError(
            f"m+ cannot be applied to a method whose schedule is {self!r}, which already changes k. Put m+ before a "
            "method with a fixed number of steps, such as m+deat, m+pgd-7 or m+free-8."
        )

    def to_auto(self, stretch_eps: float) -> "AdversaryGap":
        """Return the auto+ form of this schedule, which lets the adversary's gap choose k, up to the largest k of this one.

        Args:
            stretch_eps: See `Schedule`.

        Raises:
            UsageError: If this schedule has no auto+ form.
        """
        raise UsageError(
            f"auto+ cannot be applied to a method whose schedule is {self!r}, which already changes k. Put auto+ before a "
            "method with a fixed number of steps, such as auto+deat, auto+pgd-7 or auto+free-8."
        )

    def bounding_record(self, epoch: int, epochs: int, grows: bool) -> EpochRecord:
        """Make a record that makes k grow if it can, or keeps it: the two bounds between which a run's cost is estimated.

        A schedule that reads `record.measured` makes one with the values that it reads.

        Args:
            epoch: The epoch, from 0.
            epochs: The number of epochs of the training.
            grows: Whether k grows.

        Returns:
            The record.
        """
        return EpochRecord(epoch, 0.0, float(grows), 10.0 ** (300 * epoch / epochs) if grows else 1.0, 1)


@dataclass(frozen=True, kw_only=True, repr=False)
class Fixed(Schedule):
    """The same k in every epoch: PGD-k, FREE-m (k = m - 1), TRADES, MART, FAT.

    Args:
        k: The number of steps.
    """

    k: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("k", self.k, 0)

    @property
    def has_adversary(self) -> bool:
        """Whether k is greater than 0."""
        return self.k > 0

    def k_at(self, state: ScheduleState, epoch: int) -> int:
        """Return the fixed k."""
        return self.k

    def to_mplus(self, gamma: float, stretch_eps: float, ramp_eps: float) -> "GradientMagnitude":
        """Return M+ with this k as the largest; see `Schedule.to_mplus`."""
        if self.k == 0:
            raise UsageError("m+ needs a method with an adversary, and this one has none. Choose one such as m+pgd-7.")
        return GradientMagnitude(
            gamma=gamma,
            max_steps=self.k,
            alpha=self.alpha,
            alpha_eps=self.alpha_eps,
            stop_threshold=self.stop_threshold,
            stretch_eps=stretch_eps,
            ramp_eps=ramp_eps,
        )

    def to_auto(self, stretch_eps: float) -> "AdversaryGap":
        """Return auto+ with this k as the largest; see `Schedule.to_auto`."""
        if self.k == 0:
            raise UsageError(
                "auto+ needs a method with an adversary, and this one has none. Choose one such as auto+pgd-7."
            )
        return AdversaryGap(
            max_steps=self.k,
            alpha=self.alpha,
            alpha_eps=self.alpha_eps,
            stop_threshold=self.stop_threshold,
            stretch_eps=stretch_eps,
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class EveryEpochs(Schedule):
    """DEAT-d: k starts at 0 and grows by one every `period` epochs.

    Args:
        period: The number of epochs with the same k.
        max_steps: The largest k, if any.
    """

    period: int
    max_steps: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("period", self.period, 1)
        _check_max_steps(self.max_steps)

    def k_at(self, state: ScheduleState, epoch: int) -> int:
        """Return floor(epoch / period), at most max_steps."""
        return _clamp_k(epoch // self.period, self.max_steps)


@dataclass(frozen=True, kw_only=True, repr=False)
class AccuracyAbove(Schedule):
    """DEAT-p%: k grows by one after each epoch whose training accuracy is above `percent`.

    Args:
        percent: The accuracy, from 0 to 100.
        max_steps: The largest k, if any.
    """

    percent: float
    max_steps: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("percent", self.percent, lambda v: 0 <= v <= 100, "from 0 to 100")
        _check_max_steps(self.max_steps)

    def init(self) -> ScheduleState:
        """Return k = 0."""
        return {"k": 0}

    def k_at(self, state: ScheduleState, epoch: int) -> int:
        """Return the k of the state."""
        return int(state["k"])

    def observe(self, state: ScheduleState, record: EpochRecord) -> ScheduleState:
        """Return k + 1 if the accuracy is above the mark; see `Schedule.observe`."""
        above = record.accuracy > self.percent / 100
        return {**super().observe(state, record), "k": _clamp_k(int(state["k"]) + above, self.max_steps)}

    def explain_no_growth(self, state: ScheduleState, records: Sequence[EpochRecord]) -> str | None:
        """Explain that no epoch's accuracy was above the mark; see `Schedule.explain_no_growth`."""
        if state["k"] or len(records) < 2:
            return None
        best_accuracy = max(record.accuracy for record in records)
        return (
            f"k stayed at 0, so there was no adversary: it grows above {self.percent:g} % training accuracy, and "
            f"{best_accuracy:.1%} was the highest. Train for more epochs, or with a lower mark."
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class GradientMagnitude(Schedule):
    """M+ (Algorithm 1): k grows when l_X exceeds a threshold, gamma times its value at the last growth.

    Epoch 1 has k = 0, and its l_X is ignored. Epoch 2 has k = 1 and sets the threshold, which never decreases.

    Args:
        gamma: The factor of the threshold.
        max_steps: The largest k, if any.
        ramp: The additional rule of the released code: while k * alpha is shorter than this length, k grows in every
            epoch, also beyond max_steps. Absolute.
        ramp_eps: The same in units of eps.
    """

    gamma: float = 1.01
    max_steps: int | None = None
    ramp: float | None = None
    ramp_eps: float | None = None

    LENGTHS: ClassVar[tuple[str, ...]] = (*Schedule.LENGTHS, "ramp")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("gamma", self.gamma, lambda v: v > 0, "> 0, such as 1.01")
        _check_max_steps(self.max_steps)

    def init(self) -> ScheduleState:
        """Return k = 0 and no threshold."""
        return {"k": 0, "threshold": None}

    def k_at(self, state: ScheduleState, epoch: int) -> int:
        """Return the k of the state."""
        return int(state["k"])

    def observe(self, state: ScheduleState, record: EpochRecord) -> ScheduleState:
        """Apply lines 10 to 16 of Algorithm 1; see `Schedule.observe`."""
        _check_finite_magnitude(record)
        _warn_if_zero_magnitude(record)
        if record.epoch == 0:
            return {**state, "k": _clamp_k(int(state["k"]) + 1, self.max_steps)}
        if state["threshold"] is None:
            return {**state, "threshold": self.gamma * record.magnitude}
        if self._should_grow(state, record):
            return {**state, "k": int(state["k"]) + 1, "threshold": self.gamma * record.magnitude}
        return dict(state)

    def explain_no_growth(self, state: ScheduleState, records: Sequence[EpochRecord]) -> str | None:
        """Explain that l_X stayed below its first threshold, which a peak in epoch 2 can set too high."""
        if len(records) < 3 or state["k"] > 1 or self.max_steps == 1:
            return None
        first, largest = records[1], max(records[2:], key=lambda record: record.magnitude)
        if not first.magnitude:
            return None  # there was a warning in epoch 2
        return (
            f"k stayed at 1: l_X was {first.magnitude:.4g} in epoch 2, which set its threshold to "
            f"{state['threshold']:.4g}, and since then at most {largest.magnitude:.4g} (epoch {largest.epoch + 1}). "
            "This is common with few examples or with weights of natural training. Use a smaller gamma (--gamma, or "
            f"deat.configure_method in Python): below {largest.magnitude / first.magnitude:.3g}, k would have grown. "
            "Or put auto+ in the place of m+ (auto+deat, auto+pgd), which has no threshold, or choose k yourself: free-4, pgd-7."
        )

    def is_stuck(self, state: ScheduleState, records: Sequence[EpochRecord]) -> bool:
        """Return whether l_X is now well below its first threshold, as after a peak in epoch 2."""
        if self.explain_no_growth(state, records) is None:
            return False
        threshold: float = state["threshold"]
        return records[-1].magnitude < HOPELESS_SHARE * threshold

    def _should_grow(self, state: ScheduleState, record: EpochRecord) -> bool:
        k = int(state["k"])
        is_capped = self.max_steps is not None and k >= self.max_steps
        # The tolerance, since the released scripts multiply in units of 1/255, where k * alpha equals eps exactly.
        is_in_ramp = k * self._absolute("alpha") < self._absolute("ramp") * (1 - 1e-9)
        return is_in_ramp or (record.magnitude > state["threshold"] and not is_capped)


@dataclass(frozen=True, kw_only=True, repr=False)
class AdversaryGap(Schedule):
    """auto+: k follows how far the adversary converges, in the second half of training.

    It reads two measurements of the last update of each batch: the first-order rise of the loss that delta reaches, and the
    largest one in the ball. The gap is 1 - reached / largest, which is 0 where the adversary has converged.

    In the first half, k is 0, and 1 from the epoch on after which the largest rise exceeds the loss. The second half begins
    with half of `max_steps`, rounded down. Then k grows by one after an epoch whose gap is above `tolerance`, and falls by
    one, not below 1, after one whose gap is below a quarter of it. It needs no threshold from an early epoch.

    Args:
        max_steps: The largest k.
        tolerance: The gap above which k grows.
        epochs: The number of epochs of the training.

    Raises:
        UsageError: If a setting is not accepted.
    """

    max_steps: int
    tolerance: float = 0.04
    epochs: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("max_steps", self.max_steps, 1)
        check_number("tolerance", self.tolerance, lambda v: 0 < v < 1, "above 0 and below 1, such as 0.04")

    def bind(self, eps: float, epochs: int) -> Self:
        """Multiply all lengths by eps and set the number of epochs; see `Schedule.bind`."""
        return replace(super().bind(eps, epochs), epochs=epochs)

    def init(self) -> ScheduleState:
        """Return k = 0; a training of one epoch has no first half."""
        return {"k": self._late_k if self.epochs == 1 else 0}

    def k_at(self, state: ScheduleState, epoch: int) -> int:
        """Return the k of the state."""
        if self.epochs < 1:
            raise UsageError(
                "AdversaryGap needs the number of epochs: AdversaryGap(..., epochs=N) or method.bind(threat, N)."
            )
        return int(state["k"])

    def observe(self, state: ScheduleState, record: EpochRecord) -> ScheduleState:
        """Return the next epoch's k; see `Schedule.observe`."""
        state, k = super().observe(state, record), int(state["k"])
        reached, largest = _read_measured(record, REACHED_RISE.name), _read_measured(record, LARGEST_RISE.name)
        _warn_if_zero_magnitude(record)
        next_epoch, half = record.epoch + 1, self.epochs // 2
        if next_epoch < half:
            return {**state, "k": 1 if k or largest > record.loss else 0}
        if next_epoch == half:
            return {**state, "k": self._late_k}
        gap = 1 - reached / largest if largest > 0 else 0.0
        k += (gap > self.tolerance) - (gap < self.tolerance / 4)
        return {**state, "k": min(max(k, 1), self.max_steps)}

    def bounding_record(self, epoch: int, epochs: int, grows: bool) -> EpochRecord:
        """Make a record whose gap is 1 or 0; see `Schedule.bounding_record`."""
        rises = {REACHED_RISE.name: float(not grows), LARGEST_RISE.name: 1.0}
        return replace(super().bounding_record(epoch, epochs, grows), loss=float(not grows), measured=rises)

    @property
    def _late_k(self) -> int:
        """k at the beginning of the second half."""
        return max(1, self.max_steps // 2)


@dataclass(frozen=True, kw_only=True, repr=False)
class LinearRamp(Schedule):
    """Amata: k grows linearly from `first` to `last`, and the step size shrinks as stretch / k.

    It is also the schedule of DAT, whose stop threshold decreases linearly to zero.

    Args:
        first: k of the first epoch.
        last: The k that it grows to.
        epochs: The number of epochs of the training.
        reaches_last: Whether the last epoch has k = last. In the released code k would reach it one epoch later.
        stop_threshold_until: The fraction of training after which the threshold is zero; it is constant if None.
    """

    first: int
    last: int
    epochs: int = 0
    reaches_last: bool = True
    stop_threshold_until: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("first", self.first, 0)
        check_int("last", self.last, self.first)

    def bind(self, eps: float, epochs: int) -> Self:
        """Multiply all lengths by eps and set the number of epochs; see `Schedule.bind`."""
        return replace(super().bind(eps, epochs), epochs=epochs)

    def k_at(self, state: ScheduleState, epoch: int) -> int:
        """Return first + floor((last - first) * epoch / span)."""
        if self.epochs < 1:
            raise UsageError(
                "LinearRamp needs the number of epochs: LinearRamp(..., epochs=N) or method.bind(threat, N)."
            )
        span = max(1, self.epochs - 1) if self.reaches_last else self.epochs
        return self.first + (self.last - self.first) * min(epoch, span) // span

    def stop_threshold_at(self, epoch: int) -> float:
        """Return the threshold, which decreases if `stop_threshold_until` is given."""
        if self.stop_threshold_until is None:
            return self.stop_threshold
        return self.stop_threshold * max(0.0, 1 - epoch / (self.stop_threshold_until * self.epochs))

    def to_mplus(self, gamma: float, stretch_eps: float, ramp_eps: float) -> GradientMagnitude:
        """Return M+ with `last` as the largest k and the step size stretch / k; see `Schedule.to_mplus`."""
        if self.stop_threshold_until is not None:
            raise UsageError(
                "m+ cannot be applied to this method: its stop threshold already depends on the epoch. Use m+pgd."
            )
        return GradientMagnitude(
            gamma=gamma,
            max_steps=self.last,
            alpha=self.alpha,
            alpha_eps=self.alpha_eps,
            stop_threshold=self.stop_threshold,
            stretch=self.stretch,
            stretch_eps=self.stretch_eps,
        )

    def to_auto(self, stretch_eps: float) -> AdversaryGap:
        """Return auto+ with `last` as the largest k and the step size stretch / k; see `Schedule.to_auto`."""
        if self.stop_threshold_until is not None:
            raise UsageError(
                "auto+ cannot be applied to this method: its stopping level already depends on the epoch. Use auto+pgd."
            )
        return AdversaryGap(
            max_steps=self.last,
            alpha=self.alpha,
            alpha_eps=self.alpha_eps,
            stop_threshold=self.stop_threshold,
            stretch=self.stretch,
            stretch_eps=self.stretch_eps,
        )


def _read_measured(record: EpochRecord, name: str) -> float:
    if name not in record.measured:
        raise UsageError(
            f"the schedule reads the measurement {name!r}, and the method does not declare it: make the method by "
            "deat.auto_steps(base), or give it measurements=(REACHED_RISE, LARGEST_RISE) of deat.core.measurements."
        )
    return record.measured[name]


def _clamp_k(k: int, max_steps: int | None) -> int:
    return k if max_steps is None else min(k, max_steps)


def _check_max_steps(max_steps: int | None) -> None:
    if max_steps is not None:
        check_int("max_steps", max_steps, 1)


def _check_finite_magnitude(record: EpochRecord) -> None:
    if not math.isfinite(record.magnitude):
        raise NumericalError(
            f"the gradient magnitude l_X of epoch {record.epoch + 1} is {record.magnitude}: training diverged. "
            "Lower the learning rate or alpha, or train in fp32."
        )


def _warn_if_zero_magnitude(record: EpochRecord) -> None:
    if record.magnitude == 0 and record.epoch >= 1:
        warnings.warn(
            f"the gradient magnitude l_X of epoch {record.epoch + 1} is zero, so it cannot choose k: the gradient with "
            "respect to the images vanished.",
            RuntimeWarning,
            stacklevel=3,
        )
