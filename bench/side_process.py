"""One side of a comparison in a process of its own, and sides that take turns.

A side is a work that can be repeated: `play_rounds` starts a process for each of them, lets them do their work in turns, and
repeats rounds that other processes disturbed. The work's function is found by its module and name, so that a process
imports only what its side needs.
"""

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

from clock import lap
from shared import Record

QUIET = 0.05
"""A round counts if other processes took a smaller share of the cores from each side."""
ATTEMPTS = 3
"""At most so many times the wanted rounds are played."""
Work = Callable[[], Record]
"""What a side repeats; it returns what is to be recorded besides the time."""


class SideError(Exception):
    """A side could not do its work."""


class SideProcess:
    """A process that does a side's work whenever it is asked.

    Args:
        make: "module:function". The function takes `arguments` and returns the work, ready and warm.
        arguments: JSON values.
        threads: The number of threads.
    """

    def __init__(self, make: str, arguments: Record, threads: int) -> None:
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        command = [sys.executable, __file__, json.dumps({"make": make, "arguments": arguments, "threads": threads})]
        self._process = subprocess.Popen(command, stdin=-1, stdout=-1, stderr=self._log, text=True, env=environment)

    def wait_until_ready(self) -> None:
        """Wait until the work can begin.

        Raises:
            SideError: The process failed.
        """
        self._receive()

    def lap(self) -> Record:
        """Do the work once.

        Returns:
            What the work returned, with `seconds`, `cpu_seconds`, and the share of the cores that `others` took.

        Raises:
            SideError: The process failed.
        """
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        return self._receive()

    def _receive(self) -> Record:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if line:
            answer: Record = json.loads(line)
            return answer
        self._process.wait()
        self._log.seek(0)
        raise SideError((self._log.read().strip().splitlines() or ["ended without a word"])[-1])

    def end(self) -> None:
        """End the process."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()
        self._log.close()


@contextlib.contextmanager
def started(sides: Mapping[str, tuple[str, Record]], threads: int) -> Iterator[tuple[dict[str, SideProcess], Record]]:
    """Start the processes of several sides, and end them.

    Args:
        sides: For each side, "module:function" and its arguments.
        threads: Threads of each process.

    Yields:
        The processes that are ready, and the errors of the others.
    """
    processes = {name: SideProcess(make, arguments, threads) for name, (make, arguments) in sides.items()}
    ready: dict[str, SideProcess] = {}
    errors: Record = {}
    try:
        for name, process in processes.items():
            try:
                process.wait_until_ready()
                ready[name] = process
            except SideError as error:
                errors[name] = str(error)
        yield ready, errors
    finally:
        for process in processes.values():
            process.end()


def play_rounds(
    sides: Mapping[str, tuple[str, Record]], rounds: int, threads: int, clock: str = "wall", show: str = ""
) -> Record:
    """Let sides take turns until enough rounds were undisturbed.

    Args:
        sides: For each side, "module:function" and its arguments.
        rounds: How many rounds to count.
        threads: Threads of each process.
        clock: "wall" compares seconds and repeats disturbed rounds; "cpu" compares processor time, also on a busy
            machine, and repeats none.
        show: What to print before each round's seconds.

    Returns:
        The laps of each side in the rounds that count, under `sides`; the errors; and how many rounds were played.
    """
    with started(sides, threads) as (processes, errors):
        laps: list[Record] = []
        most = rounds if clock == "cpu" else ATTEMPTS * rounds
        while len(laps) < most and len(count_quiet(laps, clock)) < rounds:
            laps.append({name: process.lap() for name, process in processes.items()})
            seconds = ", ".join(f"{name} {one[seconds_key(clock)]:.2f}" for name, one in laps[-1].items())
            others = max(one["others"] for one in laps[-1].values())
            print(f"{show}: {seconds} s; others {others:.0%}", flush=True)
    quiet = count_quiet(laps, clock)
    kept = quiet or laps
    return {
        "clock": clock,
        "played": len(laps),
        "undisturbed": len([one for one in laps if is_quiet(one)]),
        "errors": errors,
        "sides": {name: [one[name] for one in kept] for name in processes},
    }


def count_quiet(laps: list[Record], clock: str) -> list[Record]:
    """The rounds that count."""
    return laps if clock == "cpu" else [one for one in laps if is_quiet(one)]


def is_quiet(one: Record) -> bool:
    """Whether other processes took next to nothing from any side in a round."""
    return all(side["others"] < QUIET for side in one.values())


def seconds_key(clock: str) -> str:
    """The name of the seconds that a clock compares."""
    return {"wall": "seconds", "cpu": "cpu_seconds"}[clock]


def compare(played: Record, side: str, other: str, key: Callable[[Record], float] | None = None) -> list[float] | None:
    """Compare two sides round by round.

    Args:
        played: The result of `play_rounds`.
        side: The side whose number is the numerator.
        other: The denominator.
        key: The number of a lap; by default its seconds by the clock of the rounds.

    Returns:
        The lowest, median and highest ratio, or None if a side is missing.
    """
    number = key or (lambda one: float(one[seconds_key(played["clock"])]))
    laps = played["sides"]
    if side not in laps or other not in laps:
        return None
    ratios = sorted(number(one) / number(two) for one, two in zip(laps[side], laps[other], strict=True))
    return [ratios[0], median(ratios), ratios[-1]]


def middle(played: Record, side: str) -> float:
    """The median of a side's seconds."""
    return float(median(one[seconds_key(played["clock"])] for one in played["sides"][side]))


def serve(task: Record) -> None:
    """Do a side's work for each line on standard input; what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(task["threads"])
    module, _, function = task["make"].partition(":")
    work: Work = getattr(importlib.import_module(module), function)(**task["arguments"])
    print(json.dumps({}), file=answers, flush=True)
    for _ in sys.stdin:
        found: dict[str, Any] = {}
        before = process_time()
        one = lap(lambda found=found: found.update(work()))  # type: ignore[misc]
        found |= {"seconds": one.seconds, "cpu_seconds": process_time() - before, "others": one.others}
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    serve(json.loads(sys.argv[1]))
