"""Seconds, and how much of them other processes took: a shared machine makes a benchmark lie."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

STAT = Path("/proc/stat")


@dataclass(frozen=True)
class Lap:
    """How long a piece of work took, and the share of its cores that went to others (0 where unknown)."""

    seconds: float
    others: float


def own_seconds() -> float:
    """Processor time that this process has used."""
    times = os.times()
    return times.user + times.system


def lap(work: Callable[[], object], own: Callable[[], float] = own_seconds) -> Lap:
    """Do a piece of work by the clock; `own` is the processor time of all who do it."""
    before, busy, started = own(), _busy(), perf_counter()
    work()
    seconds = perf_counter() - started
    others = (_busy() - busy) - (own() - before)
    return Lap(seconds, max(0.0, others) / (seconds * len(_cores())) if STAT.exists() else 0.0)


def _busy() -> float:
    """Seconds for which this process's cores have been busy, with anything or anybody."""
    if not STAT.exists():
        return 0.0
    rows = [line.split() for line in STAT.read_text(encoding="ascii").splitlines()]
    ours = [row for row in rows if row[0] in {f"cpu{core}" for core in _cores()}]
    # user, nice, system, then idle and waiting left out, then interrupts and what the hypervisor stole
    return sum(sum(map(int, row[1:4])) + sum(map(int, row[6:9])) for row in ours) / os.sysconf("SC_CLK_TCK")


def _cores() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
