"""Tasks: classification, multi-label classification, segmentation and regression.

A task is a frozen declaration of what outputs and labels mean: the loss, when an answer is right, the metrics. `fit`,
`evaluate`, `Game` and `Objective` take one. docs/tasks.md has the tasks, and how to write one of your own.
"""

from typing import Any

from deat.errors import UsageError, unknown_name_error
from deat.tasks.classification import Classification
from deat.tasks.multi_label import MultiLabel
from deat.tasks.recorded import recorded_task
from deat.tasks.regression import Regression
from deat.tasks.segmentation import Segmentation
from deat.tasks.task import Task

CLASSIFICATION = Classification()
"""The default task."""
_TASKS: dict[str, type[Task]] = {cls.name: cls for cls in (Classification, MultiLabel, Segmentation, Regression)}


def list_tasks() -> tuple[str, ...]:
    """Return the names that `get_task` takes."""
    return tuple(_TASKS)


def get_task(task: str | Task) -> Task:
    """Return the task of a name.

    Args:
        task: "classification", "multilabel", "segmentation" or "regression", with the task's defaults; or a task, which
            is returned as it is.

    Returns:
        The task.

    Raises:
        UsageError: If no task has this name.

    Example:
        >>> get_task("regression")
        Regression(tolerance=0.5)
    """
    if isinstance(task, Task):
        return task
    if isinstance(task, type) and issubclass(task, Task):
        raise UsageError(f"task is the class {task.__name__}; give an object: task={task.__name__}().")
    name = task.strip().lower().replace("-", "").replace("_", "") if isinstance(task, str) else ""
    if name not in _TASKS:
        raise unknown_name_error(
            "task", task, _TASKS, "Or give an object, such as deat.tasks.Segmentation(ignore_index=255)."
        )
    return _TASKS[name]()


def build_task(description: Any) -> Task:
    """Build a task from its description in a record.

    Args:
        description: What `Task.describe` returned; None for records that are older than tasks.

    Returns:
        The task. One of a user's own class cannot be built: the result then has its name and metrics only.

    Raises:
        TypeError, ValueError, KeyError: The description is damaged.
    """
    if description is None:
        return CLASSIFICATION
    if description["name"] not in _TASKS:
        return recorded_task(description)
    settings = {name: value for name, value in description.items() if name not in ("name", "metrics", "graded")}
    return _TASKS[description["name"]](**settings)


__all__ = [
    "CLASSIFICATION",
    "Classification",
    "MultiLabel",
    "Regression",
    "Segmentation",
    "Task",
    "build_task",
    "get_task",
    "list_tasks",
]
