"""What the overfit watch saw while rows were trained, and what it did about it."""

from collections.abc import Sequence

from deat.report.collect import Row
from deat.training.history import EpochWatch
from deat.training.watch import NOTED, kind_of

DONE = {"warn": "warned, and went on", "stop": "stopped", "rollback": "rolled back, and went on"}
CALM = "The overfit watch noted a leap of l_X that the accuracies do not bear out, and did nothing"


def alarms(row: Row, short: bool = False) -> list[str]:
    """Each collapse of a row's runs: its seed, its epoch, what was done and, unless short, what was seen."""
    return [
        f"seed {run.seed}: {_alarm(event)}{'' if short else f': {event.reason}'}"
        for run in row.runs
        for event in run.watch
        if event.reason and event.action != NOTED
    ]


def noted(rows: Sequence[Row]) -> list[str]:
    """The leaps of l_X that were only noted, all in one line."""
    found = [
        f"{row.name} seed {run.seed} in epoch{'' if len(epochs) == 1 else 's'} {', '.join(map(str, epochs))}"
        for row in rows
        for run in row.runs
        if (epochs := [event.epoch + 1 for event in run.watch if event.action == NOTED])
    ]
    return [f"{CALM}: {'; '.join(found)}."] if found else []


def _alarm(event: EpochWatch) -> str:
    return f"{kind_of(event)} in epoch {event.epoch + 1} ({DONE.get(str(event.action), event.action)})"
