"""How far an evaluation is, and how long the rest will take, by the passes that attacks are expected to make."""

import sys
from collections.abc import Callable, Sequence
from time import perf_counter

from deat.evaluation.attack_registry import passes
from deat.evaluation.attacks import is_natural
from deat.evaluation.judge import Attacker, stages_of
from deat.utils.numbers import clock

LITTLE = 0.3
"""What `natural` costs an image: a pass without its way back."""
GUESS = 20
"""Passes that somebody else's attack is taken to make."""
NEARLY = 0.95
"""How much of a ruling under way counts as made, at most: it may take more passes than expected."""
EARLY = 0.005
"""The share of the work that must be made here before it says anything about the rest."""


Progress = Callable[["Pace"], None]
"""Called when an evaluation begins, after each ruling, and after each attack of the sanity checks."""
CHECKS = "sanity checks"
"""What is going on when the rulings are there."""


class Pace:
    """Rulings made and ahead, weighed by passes times images; those from an earlier call cost no time and tell none.

    Each stage of an attack is a ruling. asked says how many images have passed through the model so far, so that a long
    ruling shows how far it is; checks are the passes that are made of them when all rulings are there.
    """

    def __init__(
        self,
        attacks: Sequence[Attacker],
        images: int,
        rulings: int,
        asked: Callable[[], int],
        now: Callable[[], float] = perf_counter,
        checks: float = 0.0,
    ) -> None:
        self.done, self.total, self.name = 0, rulings, ""
        self.made, self.ahead, self._checks = 0.0, images * sum(map(weight, attacks)) + checks, checks
        self._asked, self._now, self._started = asked, now, now()
        self._running, self._before = 0.0, 0

    def begin(self, how: Attacker, images: int) -> None:
        """A ruling begins to be made here."""
        self.name, self._running, self._before = how.name, weight(how) * images, self._asked()

    def check(self) -> None:
        """The rulings are there, and what they say is looked into."""
        self.name, self._running, self._before = CHECKS, self._checks, self._asked()

    @property
    def checking(self) -> bool:
        """Whether all rulings are there, and what they say is looked into."""
        return self.name == CHECKS

    def end(self, how: Attacker, images: int, made: bool) -> None:
        """A ruling is there: made just now, or by an earlier call."""
        self.done, self.name, self._running = self.done + 1, how.name, 0.0
        self.made += weight(how) * images if made else 0.0
        self.ahead -= weight(how) * images

    @property
    def left(self) -> float | None:
        """Seconds left, at least one while there is anything to do; None while nothing can be said."""
        part = min(self._asked() - self._before, NEARLY * self._running) if self._running else 0.0
        made, ahead = self.made + part, self.ahead - part
        if made <= EARLY * (made + ahead):
            return None
        return max(1.0, (self._now() - self._started) * ahead / made)


def weight(how: Attacker) -> float:
    """What an attack costs an image, in passes there and back: the sum of its stages."""
    return sum(LITTLE if is_natural(stage) else passes(stage) or GUESS for stage in stages_of(how))


SILENCE = 10.0
"""Seconds after which, or ahead of which, an evaluation says where it stands; a shorter one says nothing."""


class PaceLines:
    """Prints lines to standard error: one for the sanity checks that take long, and others after long silences."""

    def __init__(self, now: Callable[[], float] = perf_counter) -> None:
        self._now, self._said, self._told = now, now(), False

    def __call__(self, pace: Pace) -> None:
        """Say where the evaluation stands, if it is time to."""
        begins = pace.checking and not self._told and (pace.left or 0.0) >= SILENCE
        self._told |= pace.checking
        if begins or self._now() - self._said >= SILENCE:
            self._said = self._now()
            print(f"deat: {line(pace)}", file=sys.stderr, flush=True)


def line(pace: Pace) -> str:
    """Where an evaluation stands."""
    left = "-:--" if pace.left is None else clock(pace.left)
    return f"evaluating  {pace.done}/{pace.total}  {left} left  {pace.name}".rstrip()
