"""Detection of catastrophic overfitting: training that only resists its own adversary.

Within one epoch, accuracy against a single step rises towards 100 %, accuracy against several steps falls to zero and
l_X jumps. l_X falls again later, but the network stays broken, even if steps are added. The watch therefore scores
every epoch against a single step and against several on a few held-out images, and looks for a fall or a jump.
"""

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch

from deat.checkpoint.encoding import check_list_of
from deat.data import BatchSource, DataLike, ImageSet, InMemorySource
from deat.errors import unknown_name_error
from deat.evaluation.attacks import parse_attack
from deat.evaluation.block_evaluation import sample_images
from deat.evaluation.intervals import newcombe_interval
from deat.evaluation.quick_scores import compute_accuracies
from deat.tasks import Task, get_task
from deat.threat import ThreatModel, parse_threat
from deat.training.config import TrainConfig
from deat.training.data_split import open_source
from deat.training.epoch_records import EpochStats, EpochTiming, EpochWatch, append_record, write_records
from deat.training.trainer import Trainer
from deat.training.validation import read_labels
from deat.utils.numbers import check_int, check_number, convert_number_fields
from deat.utils.text import MessageHandler, format_eps, show_as_warning

SINGLE_STEP_ATTACK, MULTI_STEP_ATTACK = "fgsm", "pgd-10"
WATCH_ACTIONS = ("warn", "stop", "rollback")
OVERFITTING, COLLAPSE = "catastrophic overfitting", "a collapse of the whole network"
REMEDIES = {
    OVERFITTING: "Take smaller steps (alpha, --alpha), or more of them",
    COLLAPSE: "A single step sees it too, so it is no overfitting to one: take a smaller learning rate (lr, --lr)",
}
NOTE_ACTION = "note"
"""The action for a jump of l_X that the accuracies do not confirm."""
MAX_SCORED_IMAGES = 256
"""The largest number of held-out images that are scored."""

WatchAction = Literal["warn", "stop", "rollback"]


@dataclass(frozen=True)
class OverfitRule:
    """The rule that decides whether an epoch is a collapse. It only uses the epochs so far.

    An epoch is a collapse if one of these holds:

    * Accuracy against several steps is more than `fall` below that of the last healthy epoch, significantly (95 %)
      for the number of images. This needs k > 0 and a healthy accuracy above chance.
    * l_X is more than `jump` times that of the previous epoch, with the same k, and the gap between single-step and
      multi-step accuracy has grown by more than `gap`. A jump without such a gap is only a suspicion: l_X also jumps
      when a network begins to learn and when its loss is almost zero.

    Args:
        fall: The largest fall of multi-step accuracy of a healthy epoch.
        jump: The largest factor by which l_X may grow in a healthy epoch.
        gap: The largest growth of the gap; -1 treats every jump as a collapse.
    """

    fall: float = 0.20
    jump: float = 2.0
    gap: float = 0.10

    def __post_init__(self) -> None:
        convert_number_fields(self)
        check_number("fall", self.fall, lambda v: 0 < v < 1, "between 0 and 1, such as 0.2")
        check_number("jump", self.jump, lambda v: v > 1, "> 1, such as 2")
        check_number("gap", self.gap, lambda v: -1 <= v < 1, "from -1 to below 1, such as 0.1")

    def find_collapse(
        self, history: Sequence[EpochWatch], num_images: int, chance: float
    ) -> tuple[EpochWatch, str | None]:
        """Find out whether the last epoch of a history is a collapse.

        Args:
            history: The scored epochs; the first one counts as healthy.
            num_images: The number of images scored.
            chance: The accuracy of the best constant answer on them.

        Returns:
            The last healthy epoch, and why the last epoch is a collapse; None if it is not.
        """
        healthy, reason = history[0], None
        for before, now in pairwise(history):
            # 1e-9: 0.9 - 0.7 is more than 0.2 in floating point
            fell = now.k > 0 and healthy.multi > chance and healthy.multi - now.multi > self.fall + 1e-9
            is_significant = newcombe_interval(healthy.multi, now.multi, num_images)[0] > 0
            reason = self._collapse_reason(healthy, before, now, fell and is_significant)
            healthy = healthy if fell or reason else now
        return healthy, reason

    def find_jump(self, history: Sequence[EpochWatch]) -> str | None:
        """Describe a jump of l_X in the last epoch of a history, whatever the accuracies are.

        Args:
            history: The scored epochs.

        Returns:
            The jump in words, or None.
        """
        if len(history) < 2 or not self._has_jumped(*history[-2:]):
            return None
        return _describe_jump(*history[-2:])

    def _collapse_reason(self, healthy: EpochWatch, before: EpochWatch, now: EpochWatch, fell: bool) -> str | None:
        signs = []
        if fell:
            signs.append(f"{MULTI_STEP_ATTACK} accuracy fell from {healthy.multi:.1%} to {now.multi:.1%}")
        if self._has_jumped(before, now) and now.gap - healthy.gap > self.gap:
            signs.append(_describe_jump(before, now))
        return f"{' and '.join(signs)}, with {SINGLE_STEP_ATTACK} accuracy at {now.single:.1%}" if signs else None

    def _has_jumped(self, before: EpochWatch, now: EpochWatch) -> bool:
        return before.k == now.k >= 1 and now.magnitude > self.jump * before.magnitude


def _describe_jump(before: EpochWatch, now: EpochWatch) -> str:
    return f"l_X rose from {before.magnitude:.4g} to {now.magnitude:.4g} at k {now.k}"


def classify_collapse(event: EpochWatch, gap: float = OverfitRule.gap) -> str:
    """Name the kind of a collapse.

    Args:
        event: The epoch of the collapse.
        gap: The gap between single-step and multi-step accuracy above which it is overfitting to a single step.

    Returns:
        Catastrophic overfitting, or a collapse of the whole network.
    """
    return OVERFITTING if event.gap > gap else COLLAPSE


class OverfitWatch:
    """Scores held-out images after every epoch and acts when training collapses. A callback of the trainer.

    Put it before callbacks that record epochs. Costs are not reset when weights are restored.

    Args:
        images: Held-out images, in any form that `deat.fit` takes.
        threat: The threat model, or its text such as "linf:8/255".
        action: "warn" reports a collapse; "stop" restores the last healthy epoch and ends training; "rollback"
            restores it and continues with shorter steps.
        fall: See :class:`OverfitRule`.
        jump: See :class:`OverfitRule`.
        gap: See :class:`OverfitRule`.
        shrink: The factor of the step length after a rollback.
        rollbacks: The largest number of rollbacks; the next collapse stops training.
        seed: The seed of the attacks.
        task: What labels mean, for images that do not say so; by default classification.
        log_path: A file to which every scored epoch is added as a line of JSON.
        notify: Shows a message when an epoch is a collapse, and at the first suspicion; by default a RuntimeWarning.

    Attributes:
        events: Every epoch scored, those that were undone included.
        passes: The forward and backward passes of the watch, per image.
        seconds: The seconds that scoring took.

    Raises:
        UsageError: An option has no valid value.

    Example:
        >>> watch = OverfitWatch(held_out_images, "linf:8/255", action="rollback")
        >>> deat.fit(model, train, method="fgsm", callbacks=[watch])
    """

    def __init__(
        self,
        images: DataLike | BatchSource,
        threat: str | ThreatModel,
        action: WatchAction = "warn",
        *,
        fall: float = OverfitRule.fall,
        jump: float = OverfitRule.jump,
        gap: float = OverfitRule.gap,
        shrink: float = 0.5,
        rollbacks: int = 3,
        seed: int = 0,
        task: str | Task | None = None,
        log_path: Path | None = None,
        notify: MessageHandler | None = None,
    ) -> None:
        if action not in WATCH_ACTIONS:
            raise unknown_name_error("action of the overfit watch", action, WATCH_ACTIONS)
        check_number("shrink", shrink, lambda v: 0 < v < 1, "between 0 and 1, such as 0.5")
        check_int("rollbacks", rollbacks, 0)
        self.threat = parse_threat(threat)
        task = None if task is None else get_task(task)
        self.images = open_source(images, TrainConfig(device="cpu"), shuffle=False, task=task, box=self.threat.box)
        self.action, self.seed = action, seed
        self.rule, self.shrink, self.rollbacks = OverfitRule(fall, jump, gap), shrink, rollbacks
        self.log_path, self.notify = log_path, notify or show_as_warning
        self.events: list[EpochWatch] = []
        self.passes, self.seconds = 0, 0.0
        self._history: list[EpochWatch] = []
        self._healthy_state: dict[str, Any] = {}
        self._image_slice: InMemorySource | None = None

    @property
    def alarms(self) -> list[EpochWatch]:
        """The collapses and suspicions."""
        return [event for event in self.events if event.reason]

    @property
    def collapses(self) -> list[EpochWatch]:
        """The collapses."""
        return [event for event in self.alarms if event.action != NOTE_ACTION]

    def on_epoch(self, trainer: Trainer, stats: EpochStats, timing: EpochTiming) -> None:
        """Score the epoch, record it, and act if it is a collapse."""
        self._history.append(self._score_epoch(trainer, stats))
        scored = self._scored_images(trainer)
        healthy, reason = self.rule.find_collapse(self._history, scored.num_examples, _chance(scored))
        suspicion = None if reason else self.rule.find_jump(self._history)
        action = self._next_action() if reason else NOTE_ACTION if suspicion else None
        is_first_suspicion = suspicion is not None and not self.alarms
        event = replace(self._history[-1], reason=reason or suspicion, action=action)
        self._record_event(event)
        if is_first_suspicion:
            self.notify(f"{suspicion} in epoch {stats.epoch + 1}. {_noted_message(event)}")
        if reason:
            self.notify(
                f"{self._collapse_kind(event)} in epoch {stats.epoch + 1}: {reason}. {self._apply_action(trainer, event)}"
            )
        elif self.action != "warn" and healthy is self._history[-1]:
            self._healthy_state = _copy_state(trainer.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Return the events and the state of the last healthy epoch."""
        return {
            "events": list(self.events),
            "standing": list(self._history),
            "healthy": self._healthy_state,
            "passes": self.passes,
            "seconds": self.seconds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a result of `state_dict`; the log file is rewritten.

        Args:
            state: What `state_dict` returned.
        """
        self.events, self._history = (check_list_of(EpochWatch, state[name]) for name in ("events", "standing"))
        self._healthy_state = dict(state["healthy"])
        self.passes, self.seconds = int(state["passes"]), float(state["seconds"])
        if self.log_path:
            write_records(self.log_path, self.events)

    def summary(self) -> str | None:
        """Describe all collapses in one line; None if there were none.

        Returns:
            The line, or None.
        """
        collapses = self.collapses
        if not collapses:
            return None
        epochs = ", ".join(f"{event.epoch + 1} ({event.action})" for event in collapses)
        return f"{self._collapse_kind(collapses[0])} in epoch {epochs}; first: {collapses[0].reason}"

    def _collapse_kind(self, event: EpochWatch) -> str:
        return classify_collapse(event, self.rule.gap)

    def _next_action(self) -> str:
        exhausted = sum(event.action == "rollback" for event in self.events) >= self.rollbacks
        return "stop" if self.action == "rollback" and exhausted else self.action

    def _apply_action(self, trainer: Trainer, event: EpochWatch) -> str:
        """Do the event's action, and return a message about it."""
        if event.action == "warn":
            others = "the watch can also stop or roll back (action, --watch stop or --watch rollback)."
            return f"{REMEDIES[self._collapse_kind(event)]}; {others}"
        trainer.rewind(self._healthy_state)
        self._history = [epoch for epoch in self._history if epoch.epoch < trainer.epoch]
        if event.action == "stop":
            trainer.stop()
            return f"Stopped at the weights of epoch {trainer.epoch}."
        trainer.scale_step_size(self.shrink)
        alpha = trainer.schedule.budget(trainer.schedule_state, trainer.epoch).step_size
        return f"Back to epoch {trainer.epoch}, continuing with alpha {format_eps(alpha)}."

    def _record_event(self, event: EpochWatch) -> None:
        self.events.append(event)
        if self.log_path:
            try:
                append_record(self.log_path, event)
            except OSError as error:
                self.notify(f"cannot write {self.log_path.name} ({error.strerror})")

    def _score_epoch(self, trainer: Trainer, stats: EpochStats) -> EpochWatch:
        started = perf_counter()
        single, multi = self._accuracies(trainer)
        self.seconds += perf_counter() - started
        return EpochWatch(stats.epoch, stats.k, stats.alpha, single, multi, stats.magnitude)

    def _accuracies(self, trainer: Trainer) -> tuple[float, float]:
        """Return accuracy against a single step and several, in float32, with the same random starts in every epoch."""
        images = self._scored_images(trainer)
        attacks = parse_attack(SINGLE_STEP_ATTACK), parse_attack(MULTI_STEP_ATTACK)
        accuracies = compute_accuracies(
            trainer.model,
            images,
            attacks,
            self.threat,
            self.seed,
            trainer.engine.to_memory_format,
            trainer.distributed,
            trainer.task,
            per_example=True,
        )
        balls = len(self.threat.balls)
        self.passes += sum(2 * balls - 1 + 2 * attack.steps * balls for attack in attacks) * len(images)
        return accuracies[SINGLE_STEP_ATTACK], accuracies[MULTI_STEP_ATTACK]

    def _scored_images(self, trainer: Trainer) -> InMemorySource:
        """Return the images that every epoch is scored on; they are read once."""
        self._image_slice = self._image_slice or _make_image_slice(self.images, trainer.engine.device, trainer.task)
        return self._image_slice


def _noted_message(event: EpochWatch) -> str:
    accuracies = f"{MULTI_STEP_ATTACK} leaves {event.multi:.1%} and {SINGLE_STEP_ATTACK} {event.single:.1%}"
    return f"That can be the onset of catastrophic overfitting, but {accuracies}, so it is only noted."


def _chance(source: InMemorySource) -> float:
    """The share of right answers of a constant answer; 0 for tasks whose shares have none that is known."""
    classes = source.images.task.class_labels(read_labels(source))
    return max(Counter(classes).values()) / len(classes) if classes else 0.0


def _make_image_slice(source: BatchSource, device: torch.device, task: Task) -> InMemorySource:
    """Read at most MAX_SCORED_IMAGES images, evenly spaced over a source."""
    x, y = sample_images(source, source.num_examples, MAX_SCORED_IMAGES, device)
    classes = tuple(str(c) for c in range(source.num_classes))
    return InMemorySource(ImageSet(x, y, classes, task), source.batch_size, device=device, shuffle=False)


def _copy_state(state: dict[str, Any]) -> dict[str, Any]:
    """Copy a state_dict() deeply, but for the best epoch's weights, which are a copy already."""
    return {name: value if name == "best" else copy.deepcopy(value) for name, value in state.items()}
