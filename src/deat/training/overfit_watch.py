"""A watch for catastrophic overfitting: training that learns to withstand its own adversary and nothing else.

It happens within an epoch. Accuracy against a single step rises towards 100 % while accuracy against several
falls to nothing, and l_X leaps, only to fall again while the network stays broken; adding steps then does not
undo it. So every epoch is scored both ways on a few held-out images, and a fall or a leap is an alarm.
"""

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch

from deat.checkpoint.state import check_list_of
from deat.data import DataLike, ImageSet, InMemorySource, Source
from deat.errors import unknown_name_error
from deat.evaluation.attacks import parse_attack
from deat.evaluation.blocks import sample_images
from deat.evaluation.intervals import newcombe_interval
from deat.evaluation.scoring import compute_accuracies
from deat.threat import ThreatModel, parse_threat
from deat.training.config import TrainConfig
from deat.training.data_split import open_source
from deat.training.records import EpochStats, EpochTiming, EpochWatch, append_record, write_records
from deat.training.trainer import Trainer
from deat.training.validation import majority_class_share
from deat.utils.numbers import check_int, check_number, convert_number_fields, format_eps
from deat.utils.text import MessageHandler

SINGLE_STEP_ATTACK, MULTI_STEP_ATTACK = "fgsm", "pgd-10"
WATCH_ACTIONS = ("warn", "stop", "rollback")
OVERFITTING, COLLAPSE = "catastrophic overfitting", "a collapse of the whole network"
REMEDIES = {
    OVERFITTING: "Take smaller steps (alpha, --alpha), or more of them",
    COLLAPSE: "A single step sees it too, so it is no overfitting to one: take a smaller learning rate (lr, --lr)",
}
NOTE_ACTION = "note"
"""What is done about a leap of l_X that the accuracies do not bear out."""
MAX_SCORED_IMAGES = 256
"""Held-out images that are scored, at most."""

WatchAction = Literal["warn", "stop", "rollback"]


@dataclass(frozen=True)
class OverfitRule:
    """When an epoch is a collapse, told from the epochs so far alone.

    It is one where accuracy against several steps lies more than `fall` below the last healthy epoch's, further than
    chance can make it on so few images (95 %), or where l_X is more than `jump` times the epoch before's, both of the
    same k. Without an adversary (k = 0) nothing can overfit to it; what one answer for all would get too is nothing to
    fall from. A leap is a collapse if it opened the gap between a single step and several by more than `gap`, and a
    suspicion otherwise: when a network begins to learn, and when its loss is almost nothing, l_X leaps in good health.
    gap = -1 takes every leap at its word.
    """

    fall: float = 0.20
    jump: float = 2.0
    gap: float = 0.10

    def __post_init__(self) -> None:
        convert_number_fields(self)
        check_number("fall", self.fall, lambda v: 0 < v < 1, "between 0 and 1, such as 0.2")
        check_number("jump", self.jump, lambda v: v > 1, "> 1, such as 2")
        check_number("gap", self.gap, lambda v: -1 <= v < 1, "from -1 to below 1, such as 0.1")

    def judge(self, history: Sequence[EpochWatch], num_images: int, chance: float) -> tuple[EpochWatch, str | None]:
        """The last healthy epoch, and why the last one is a collapse, if it is; one that fell is not healthy either.

        So many images were scored, of which one answer for all gets `chance`.
        """
        healthy, reason = history[0], None
        for before, now in pairwise(history):
            # 0.9 - 0.7 is more than 0.2 in floating point
            fell = now.k > 0 and healthy.multi > chance and healthy.multi - now.multi > self.fall + 1e-9
            surely = newcombe_interval(healthy.multi, now.multi, num_images)[0] > 0
            reason = self._collapse_reason(healthy, before, now, fell and surely)
            healthy = healthy if fell or reason else now
        return healthy, reason

    def find_jump(self, history: Sequence[EpochWatch]) -> str | None:
        """That l_X leapt in the last epoch of a history, whatever the accuracies say; None if it did not."""
        if len(history) < 2 or not self._has_jumped(*history[-2:]):
            return None
        return _describe_jump(*history[-2:])

    def _collapse_reason(self, healthy: EpochWatch, before: EpochWatch, now: EpochWatch, fell: bool) -> str | None:
        found = []
        if fell:
            found.append(f"{MULTI_STEP_ATTACK} accuracy fell from {healthy.multi:.1%} to {now.multi:.1%}")
        if self._has_jumped(before, now) and now.gap - healthy.gap > self.gap:
            found.append(_describe_jump(before, now))
        return f"{' and '.join(found)}, with {SINGLE_STEP_ATTACK} accuracy at {now.single:.1%}" if found else None

    def _has_jumped(self, before: EpochWatch, now: EpochWatch) -> bool:
        return before.k == now.k >= 1 and now.magnitude > self.jump * before.magnitude


def _describe_jump(before: EpochWatch, now: EpochWatch) -> str:
    return f"l_X rose from {before.magnitude:.4g} to {now.magnitude:.4g} at k {now.k}"


def classify_collapse(event: EpochWatch, gap: float = OverfitRule.gap) -> str:
    """What a collapse is called: one that a single step sees too is no overfitting to it."""
    return OVERFITTING if event.gap > gap else COLLAPSE


class OverfitWatch:
    """Scores a held-out slice after every epoch, and fires when training collapses; a callback of the trainer.

    warn says so and goes on. stop puts the last healthy epoch back and ends training. rollback puts it back
    and goes on from there with steps `shrink` times as long, at most `rollbacks` times; then it stops. What
    was spent stays spent. Where other callbacks write epochs down, it comes before them.

    images are held-out ones, in any form that fit takes.

    A leap of l_X that the accuracies do not bear out fires as well, but only to be noted: the first one is
    said aloud, and nothing is put back.

    events has one entry for each epoch played, those put back included; `log` is a file they are added to.
    `say` is told in words when the watch fires, and is a RuntimeWarning by default. passes and seconds are
    the watch's own cost.
    """

    def __init__(
        self,
        images: DataLike | Source,
        threat: str | ThreatModel,
        action: WatchAction = "warn",
        *,
        fall: float = OverfitRule.fall,
        jump: float = OverfitRule.jump,
        gap: float = OverfitRule.gap,
        shrink: float = 0.5,
        rollbacks: int = 3,
        seed: int = 0,
        log_path: Path | None = None,
        notify: MessageHandler | None = None,
    ) -> None:
        if action not in WATCH_ACTIONS:
            raise unknown_name_error("action of the overfit watch", action, WATCH_ACTIONS)
        check_number("shrink", shrink, lambda v: 0 < v < 1, "between 0 and 1, such as 0.5")
        check_int("rollbacks", rollbacks, 0)
        self.images, self.threat = open_source(images, TrainConfig(device="cpu"), shuffle=False), parse_threat(threat)
        self.action, self.seed = action, seed
        self.rule, self.shrink, self.rollbacks = OverfitRule(fall, jump, gap), shrink, rollbacks
        self.log, self.notify = log_path, notify or _warn
        self.events: list[EpochWatch] = []
        self.passes, self.seconds = 0, 0.0
        self._history: list[EpochWatch] = []
        self._healthy_state: dict[str, Any] = {}
        self._image_slice: InMemorySource | None = None

    @property
    def alarms(self) -> list[EpochWatch]:
        """The events at which it fired, suspicions among them."""
        return [event for event in self.events if event.reason]

    @property
    def collapses(self) -> list[EpochWatch]:
        """The events that it acted on."""
        return [event for event in self.alarms if event.action != NOTE_ACTION]

    def on_epoch(self, trainer: Trainer, stats: EpochStats, timing: EpochTiming) -> None:
        """Score the epoch, write it down, and act where it is a collapse."""
        self._history.append(self._score(trainer, stats))
        scored = self._scored_images(trainer)
        healthy, reason = self.rule.judge(self._history, scored.num_examples, majority_class_share(scored))
        suspicion = None if reason else self.rule.find_jump(self._history)
        action = self._next_action() if reason else NOTE_ACTION if suspicion else None
        first = suspicion is not None and not self.alarms
        event = replace(self._history[-1], reason=reason or suspicion, action=action)
        self._note(event)
        if first:
            self.notify(f"{suspicion} in epoch {stats.epoch + 1}. {_noted_message(event)}")
        if reason:
            self.notify(
                f"{self._collapse_kind(event)} in epoch {stats.epoch + 1}: {reason}. {self._apply_action(trainer, event)}"
            )
        elif self.action != "warn" and healthy is self._history[-1]:
            self._healthy_state = _copy_state(trainer.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """What it has seen, and the healthy epoch it would go back to."""
        return {
            "events": list(self.events),
            "standing": list(self._history),
            "healthy": self._healthy_state,
            "passes": self.passes,
            "seconds": self.seconds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on watching from there; the log is written anew."""
        self.events, self._history = (check_list_of(EpochWatch, state[name]) for name in ("events", "standing"))
        self._healthy_state, self.passes, self.seconds = (
            dict(state["healthy"]),
            int(state["passes"]),
            float(state["seconds"]),
        )
        if self.log:
            write_records(self.log, self.events)

    def summary(self) -> str | None:
        """All that it acted on, in one line; None if there was nothing."""
        fired = self.collapses
        if not fired:
            return None
        where = ", ".join(f"{event.epoch + 1} ({event.action})" for event in fired)
        return f"{self._collapse_kind(fired[0])} in epoch {where}; first: {fired[0].reason}"

    def _collapse_kind(self, event: EpochWatch) -> str:
        return classify_collapse(event, self.rule.gap)

    def _next_action(self) -> str:
        exhausted = sum(event.action == "rollback" for event in self.events) >= self.rollbacks
        return "stop" if self.action == "rollback" and exhausted else self.action

    def _apply_action(self, trainer: Trainer, event: EpochWatch) -> str:
        """Do what the event says; what was done, in words."""
        if event.action == "warn":
            also = "the watch can also stop or roll back (action, --watch stop or --watch rollback)."
            return f"{REMEDIES[self._collapse_kind(event)]}; {also}"
        trainer.rewind(self._healthy_state)
        self._history = [held for held in self._history if held.epoch < trainer.epoch]
        if event.action == "stop":
            trainer.stop()
            return f"Stopped at the weights of epoch {trainer.epoch}."
        trainer.scale_step_size(self.shrink)
        alpha = trainer.schedule.budget(trainer.state, trainer.epoch).step_size
        return f"Back to epoch {trainer.epoch}, and on with alpha {format_eps(alpha)}."

    def _note(self, event: EpochWatch) -> None:
        self.events.append(event)
        if self.log:
            try:
                append_record(self.log, event)
            except OSError as error:
                self.notify(f"cannot write {self.log.name} ({error.strerror})")

    def _score(self, trainer: Trainer, stats: EpochStats) -> EpochWatch:
        started = perf_counter()
        single, multi = self._accuracies(trainer)
        self.seconds += perf_counter() - started
        return EpochWatch(stats.epoch, stats.k, stats.alpha, single, multi, stats.magnitude)

    def _accuracies(self, trainer: Trainer) -> tuple[float, float]:
        """Accuracy against a single step and several, in float32, from the same starts in every epoch."""
        images, both = self._scored_images(trainer), (parse_attack(SINGLE_STEP_ATTACK), parse_attack(MULTI_STEP_ATTACK))
        found = compute_accuracies(
            trainer.model, images, both, self.threat, self.seed, trainer.engine.to_memory_format, trainer.distributed
        )
        self.passes += sum(1 + 2 * how.steps for how in both) * len(images)
        return found[SINGLE_STEP_ATTACK], found[MULTI_STEP_ATTACK]

    def _scored_images(self, trainer: Trainer) -> InMemorySource:
        """The images that every epoch is scored on, read once."""
        self._image_slice = self._image_slice or _make_image_slice(self.images, trainer.engine.device)
        return self._image_slice


def _noted_message(event: EpochWatch) -> str:
    seen = f"{MULTI_STEP_ATTACK} leaves {event.multi:.1%} and {SINGLE_STEP_ATTACK} {event.single:.1%}"
    return f"That can be the onset of catastrophic overfitting, but {seen}, so it is only noted."


def _make_image_slice(source: Source, device: torch.device) -> InMemorySource:
    """At most MOST of a source's images, from all over it."""
    x, y = sample_images(source, source.num_examples, MAX_SCORED_IMAGES, device)
    classes = tuple(str(c) for c in range(source.num_classes))
    return InMemorySource(ImageSet(x, y, classes), source.batch_size, device=device, shuffle=False)


def _copy_state(state: dict[str, Any]) -> dict[str, Any]:
    """A state_dict() that training cannot reach; the best epoch's weights are a copy already."""
    return {name: value if name == "best" else copy.deepcopy(value) for name, value in state.items()}


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=2)
