"""How far an evaluation is, and how long the rest will take, by the passes that attacks are expected to make."""

import sys
from collections.abc import Callable, Sequence
from time import perf_counter

from deat.evaluation.attack_registry import estimate_passes
from deat.evaluation.attacks import is_natural
from deat.evaluation.judge import AttackLike, get_stages
from deat.utils.text import format_duration

FORWARD_ONLY_COST = 0.3
"""What `natural` costs an image: a pass without its way back."""
UNKNOWN_ATTACK_PASSES = 20
"""Passes that somebody else's attack is taken to make."""
MAX_RUNNING_SHARE = 0.95
"""How much of a ruling under way counts as made, at most: it may take more passes than expected."""
MIN_SHARE_FOR_ESTIMATE = 0.005
"""The share of the work that must be made here before it says anything about the rest."""


ProgressCallback = Callable[["EvaluationProgress"], None]
"""Called when an evaluation begins, after each ruling, and after each attack of the sanity checks."""
CHECKS_LABEL = "sanity checks"
"""What is going on when the rulings are there."""


class EvaluationProgress:
    """Rulings made and ahead, weighed by passes times images; those from an earlier call cost no time and tell none.

    Each stage of an attack is a ruling. asked says how many images have passed through the model so far, so that a long
    ruling shows how far it is; checks are the passes that are made of them when all rulings are there.
    """

    def __init__(
        self,
        attacks: Sequence[AttackLike],
        num_images: int,
        total: int,
        count_passes: Callable[[], int],
        clock: Callable[[], float] = perf_counter,
        check_passes: float = 0.0,
    ) -> None:
        self.done, self.total, self.name = 0, total, ""
        self.made, self.work_left, self._checks = (
            0.0,
            num_images * sum(map(estimate_attack_cost, attacks)) + check_passes,
            check_passes,
        )
        self._count_passes, self._clock, self._started = count_passes, clock, clock()
        self._running, self._passes_before = 0.0, 0

    def begin(self, attack: AttackLike, num_images: int) -> None:
        """A ruling begins to be made here."""
        self.name, self._running, self._passes_before = (
            attack.name,
            estimate_attack_cost(attack) * num_images,
            self._count_passes(),
        )

    def check(self) -> None:
        """The rulings are there, and what they say is looked into."""
        self.name, self._running, self._passes_before = CHECKS_LABEL, self._checks, self._count_passes()

    @property
    def is_checking(self) -> bool:
        """Whether all rulings are there, and what they say is looked into."""
        return self.name == CHECKS_LABEL

    def end(self, attack: AttackLike, num_images: int, is_new: bool) -> None:
        """A ruling is there: made just now, or by an earlier call."""
        self.done, self.name, self._running = self.done + 1, attack.name, 0.0
        self.made += estimate_attack_cost(attack) * num_images if is_new else 0.0
        self.work_left -= estimate_attack_cost(attack) * num_images

    @property
    def left(self) -> float | None:
        """Seconds left, at least one while there is anything to do; None while nothing can be said."""
        part = (
            min(self._count_passes() - self._passes_before, MAX_RUNNING_SHARE * self._running) if self._running else 0.0
        )
        made, ahead = self.made + part, self.work_left - part
        if made <= MIN_SHARE_FOR_ESTIMATE * (made + ahead):
            return None
        return max(1.0, (self._clock() - self._started) * ahead / made)


def estimate_attack_cost(attack: AttackLike) -> float:
    """What an attack costs an image, in passes there and back: the sum of its stages."""
    return sum(
        FORWARD_ONLY_COST if is_natural(stage) else estimate_passes(stage) or UNKNOWN_ATTACK_PASSES
        for stage in get_stages(attack)
    )


LINE_INTERVAL_SECONDS = 10.0
"""Seconds after which, or ahead of which, an evaluation says where it stands; a shorter one says nothing."""


class ProgressPrinter:
    """Prints lines to standard error: one for the sanity checks that take long, and others after long silences."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock, self._last_printed, self._announced_checks = clock, clock(), False

    def __call__(self, progress: EvaluationProgress) -> None:
        """Say where the evaluation stands, if it is time to."""
        begins = progress.is_checking and not self._announced_checks and (progress.left or 0.0) >= LINE_INTERVAL_SECONDS
        self._announced_checks |= progress.is_checking
        if begins or self._clock() - self._last_printed >= LINE_INTERVAL_SECONDS:
            self._last_printed = self._clock()
            print(f"deat: {format_progress(progress)}", file=sys.stderr, flush=True)


def format_progress(progress: EvaluationProgress) -> str:
    """Where an evaluation stands."""
    left = "-:--" if progress.left is None else format_duration(progress.left)
    return f"evaluating  {progress.done}/{progress.total}  {left} left  {progress.name}".rstrip()
