"""A task of which only the record is known, as of a user's own class in an evaluation.json."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from deat.errors import UsageError
from deat.tasks.task import Task


class UnavailableTask(Task):
    """A task that was described in a record and has no functions here; its metrics are in the record, too."""

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Raise UsageError."""
        raise self._unknown()

    def is_right(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Raise UsageError."""
        raise self._unknown()

    def _unknown(self) -> UsageError:
        return UsageError(
            f"the task {self.name} is a class of your own, which a record only names: pass the task itself."
        )


def make_unavailable_task(description: Mapping[str, Any]) -> Task:
    """Make a task that has what a record says of it: its name and its metrics' names.

    Raises:
        TypeError, ValueError, KeyError: The description is damaged.
    """
    names = {
        "name": str(description["name"]),
        "metric_names": tuple(map(str, description["metrics"])),
        "is_graded": bool(description["graded"]),
    }
    if not names["metric_names"]:
        raise ValueError("the task has no metrics")
    task: Task = type("UnavailableTask", (UnavailableTask,), names)()
    return task
