"""What a long evaluation says of itself on the way, where no terminal shows it: a line now and then."""

import sys
from collections.abc import Callable
from time import perf_counter

from deat.evaluation.pace import Pace
from deat.numbers import clock

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
