"""Tasks: classification, multi-label classification, segmentation and regression.

A task is a frozen declaration of what outputs and labels mean: the loss, when an answer is right, the metrics. `fit`,
`evaluate`, `Game` and `Objective` take one. docs/tasks.md has the tasks, and how to write one of your own.
"""

from dataclasses import fields
from typing import Any

from deat.errors import UsageError, unknown_name_error
from deat.tasks.classification import Classification
from deat.tasks.loss_options import LearnerOptions
from deat.tasks.multi_label import MultiLabel
from deat.tasks.regression import Regression
from deat.tasks.segmentation import Segmentation
from deat.tasks.task import Task
from deat.tasks.unavailable_task import make_unavailable_task
from deat.utils.plugins import load_plugins

CLASSIFICATION = Classification()
"""The default task."""
_TASKS: dict[str, type[Task]] = {cls.name: cls for cls in (Classification, MultiLabel, Segmentation, Regression)}
_PLUGIN_GROUP = "deat.tasks"
_ORIGINS: dict[type[Task], str] = {}
"""The packages of tasks that are plugins."""


def list_tasks() -> tuple[str, ...]:
    """Return the names that `get_task` takes, also those of installed plugins."""
    load_plugins(_PLUGIN_GROUP, _add_plugin)
    return tuple(_TASKS)


def find_task_plugin(task: Task) -> str:
    """Return the package and version of the plugin that a task is of; empty for any other task.

    Args:
        task: The task.
    """
    return _ORIGINS.get(type(task), "")


def _add_plugin(name: str, value: object, origin: str) -> None:
    """Register the task of an entry point under its name; a name that is taken is refused."""
    if not isinstance(value, type) or not issubclass(value, Task):
        raise UsageError("it is no subclass of deat.tasks.Task.")
    if name in _TASKS:
        raise UsageError(f"the name {name} is taken by {_ORIGINS.get(_TASKS[name], 'deat')}.")
    if value.name != name or _normalize_name(name) != name:
        raise UsageError(
            f"the class has the name {value.name!r}: both names must be one, in lower case without - and _."
        )
    value()  # it must have defaults for all of its settings
    _TASKS[name], _ORIGINS[value] = value, origin


def _normalize_name(text: str) -> str:
    return text.lower().replace("-", "").replace("_", "")


def get_task(task: str | Task) -> Task:
    """Return the task of a name.

    Args:
        task: "classification", "multilabel", "segmentation" or "regression", with the task's defaults, or with settings,
            as in "segmentation:ignore_index=255"; or a task, which is returned as it is.

    Returns:
        The task.

    Raises:
        UsageError: If no task has this name.

    Example:
        >>> get_task("regression")
        Regression(tolerance=0.5)
    """
    if isinstance(task, Task):
        _check_name(task)
        return task
    if isinstance(task, type) and issubclass(task, Task):
        raise UsageError(f"task is the class {task.__name__}; give an object: task={task.__name__}().")
    text, _, settings = task.strip().partition(":") if isinstance(task, str) else ("", "", "")
    name = _normalize_name(text)
    if name not in _TASKS:
        load_plugins(_PLUGIN_GROUP, _add_plugin)
    if name not in _TASKS:
        raise unknown_name_error(
            "task", task, _TASKS, "Or give an object, such as deat.tasks.Segmentation(ignore_index=255)."
        )
    return _TASKS[name](**_parse_settings(name, settings)) if settings else _TASKS[name]()


def _check_name(task: Task) -> None:
    """Check that a task has a name, and not that of another one: records name tasks."""
    name, cls = getattr(task, "name", None), type(task)
    if not isinstance(name, str) or not name:
        raise UsageError(f"the task {cls.__name__} has no name: add name = {cls.__name__.lower()!r} to its class.")
    taken = _TASKS.get(name)
    if taken not in (None, cls) and not issubclass(cls, LearnerOptions):
        raise UsageError(
            f"the name {name!r} of the task {cls.__name__} is that of deat's {taken.__name__}, which would be taken for it "
            "when a result is read. Give it a name of its own."
        )


def _parse_settings(name: str, text: str) -> dict[str, Any]:
    """The settings in a text such as "ignore_index=255"."""
    types = {f.name: int if "int" in str(f.type) else float for f in fields(_TASKS[name])}
    settings: dict[str, Any] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        if key.strip() not in types:
            raise unknown_name_error(f"setting of {name}", key.strip(), types, "Write NAME:SETTING=NUMBER.")
        try:
            settings[key.strip()] = types[key.strip()](value)
        except ValueError:
            raise UsageError(f"{key.strip()}={value!r} is no number: write {name}:{key.strip()}=NUMBER.") from None
    return settings


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
        load_plugins(_PLUGIN_GROUP, _add_plugin)
    if description["name"] not in _TASKS:
        return make_unavailable_task(description)
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
    "find_task_plugin",
    "get_task",
    "list_tasks",
]
