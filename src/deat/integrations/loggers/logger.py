"""What a logger is, and the loggers by name."""

import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from torch import Tensor

from deat.errors import UsageError, unknown_name_error
from deat.utils.plugins import load_plugins
from deat.utils.user_code import is_file_spec, load_object

Status = Literal["finished", "interrupted", "failed"]
"""How a run ended."""


@dataclass(frozen=True)
class LoggedRun:
    """The run that a logger is to record.

    Attributes:
        name: A name for people.
        folder: A folder for the tool's files; it may not exist yet.
        config: The settings, as nested JSON values.
        metric_names: The metrics that may come by epoch; not every epoch has all.
        epochs_done: The finished epochs of a run that is resumed, otherwise 0.
        batches_done: Its finished batches.
        backprops_done: Its backprops, which also count those of epochs that were rolled back.
        state: What the logger left in `state` when the run was started; empty in a new record.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    metric_names: Sequence[str] = ()
    epochs_done: int = 0
    batches_done: int = 0
    backprops_done: int = 0
    state: Mapping[str, Any] = field(default_factory=dict)

    @property
    def flat_config(self) -> dict[str, str | int | float | bool]:
        """The settings in one level, such as {"settings.lr": 0.1}."""
        return _flatten(self.config)


class Logger:
    """A tool that records runs. Override `log_metrics` and what else the tool can do.

    Only the main process of a run calls a logger. What a method raises is reported, and ends the logging, never the
    training.

    Attributes:
        name: The name in messages; `register_logger` sets it.
        state: JSON values by which a resumed run finds its record again, such as the tool's id. Set it in `start`.

    Example:
        >>> @register_logger("print", what="lines on standard output")
        ... class Print(Logger):
        ...     def log_metrics(self, metrics, step, axis="epoch"):
        ...         print(axis, step, metrics)
    """

    name: ClassVar[str] = ""
    state: Mapping[str, Any] = {}

    def start(self, run: LoggedRun) -> None:
        """Begin the record of a run, or continue it where `run.state` is not empty.

        Args:
            run: Its name, folder and settings, and the state of an earlier start.
        """

    def log_metrics(self, metrics: Mapping[str, float], step: int, axis: Literal["epoch", "batch"] = "epoch") -> None:
        """Log numbers.

        Args:
            metrics: The values by name.
            step: How many epochs or batches are done.
            axis: Whether `step` counts epochs or batches.
        """
        raise NotImplementedError

    def log_step_begin(self, name: str, value: float, step: int) -> None:
        """Log the value that a metric has from `step` on. With its value at the end of the epoch it is a step plot.

        Args:
            name: The metric's name.
            value: Its value.
            step: How many epochs are done.
        """
        self.log_metrics({name: value}, step)

    def log_image(self, name: str, image: Tensor, step: int) -> None:
        """Log an image, (C, H, W) uint8 on the CPU, after so many epochs.

        Args:
            name: The image's name.
            image: The image.
            step: How many epochs are done.
        """

    def log_summary(self, summary: Mapping[str, float]) -> None:
        """Log the results of the run.

        Args:
            summary: The results by name.
        """

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Log a table.

        Args:
            name: The table's name.
            columns: The names of its columns.
            rows: Its rows, with a value for each column.
        """

    def log_file(self, path: Path, name: str) -> None:
        """Store a file, such as weights, or a folder, such as a checkpoint, with the record.

        Args:
            path: The file or folder.
            name: Its name in the record.
        """

    def finish(self, status: Status) -> None:
        """End the record.

        Args:
            status: How the training ended.
        """


@dataclass(frozen=True)
class LoggerInfo:
    """A registered logger.

    Attributes:
        name: Its name.
        make: Makes one; usually the class.
        what: What it writes, in a few words.
        packages: The packages that it imports.
        extra: The extra of deat that installs them.
    """

    name: str
    make: Callable[[], Logger]
    what: str
    packages: tuple[str, ...] = ()
    extra: str = ""

    @property
    def missing(self) -> list[str]:
        """The packages that are not installed."""
        return [package for package in self.packages if find_spec(package) is None]


_LOGGERS: dict[str, LoggerInfo] = {}
LoggerT = TypeVar("LoggerT", bound=Callable[[], Logger])


def register_logger(
    name: str, *, what: str, packages: Sequence[str] = (), extra: str = ""
) -> Callable[[LoggerT], LoggerT]:
    """Register a class, or a function that makes a logger, under a name for `--log` and `fit(loggers=...)`.

    Args:
        name: The name.
        what: What it writes, in a few words.
        packages: The packages that it needs, by their import names.
        extra: The extra of deat that installs them.

    Returns:
        A decorator.
    """

    def register(make: LoggerT) -> LoggerT:
        """Register the logger and return it."""
        _LOGGERS[name] = LoggerInfo(name, make, what, tuple(packages), extra)
        if isinstance(make, type) and issubclass(make, Logger):
            make.name = name
        return make

    return register


def list_loggers() -> list[LoggerInfo]:
    """List the registered loggers, by name.

    Returns:
        What is known of each.
    """
    package = import_module("deat.integrations.loggers")
    for module in pkgutil.iter_modules(package.__path__):
        import_module(f"{package.__name__}.{module.name}")
    load_plugins("deat.loggers", _add_plugin)
    return [_LOGGERS[name] for name in sorted(_LOGGERS)]


def _add_plugin(name: str, value: object, origin: str) -> None:
    if not (isinstance(value, type) and issubclass(value, Logger)):
        raise UsageError("it is no class derived from deat.integrations.loggers.Logger")
    if name in _LOGGERS:
        raise UsageError("the name is taken")
    register_logger(name, what=f"of {origin}")(value)


def get_loggers(loggers: str | Iterable[str | Logger]) -> list[Logger]:
    """Return loggers by name.

    Args:
        loggers: Names, in a list or in one text with commas, or `Logger` objects. A name may be that of a class in a
            file, my_logger.py:NAME.

    Returns:
        The loggers, not started.

    Raises:
        UsageError: A name is unknown, or its package is not installed.
    """
    names = [name.strip() for name in loggers.split(",")] if isinstance(loggers, str) else list(loggers)
    return [name if isinstance(name, Logger) else _make_logger(name) for name in names if name != ""]


def _make_logger(name: object) -> Logger:
    if not isinstance(name, str):
        raise UsageError(f"{name!r} is no logger: give a name, such as 'csv', or an object of a class of Logger.")
    if is_file_spec(name):
        made = load_object(name)
        made = made() if isinstance(made, type) else made
        if not isinstance(made, Logger):
            raise UsageError(f"{name!r} is no logger: make it a class derived from deat.integrations.loggers.Logger.")
        return made
    known = {info.name: info for info in list_loggers()}
    if name not in known:
        raise unknown_name_error("logger", name, known)
    info = known[name]
    if info.missing:
        extra = f"pip install 'deat[{info.extra}]'" if info.extra else f"pip install {' '.join(info.missing)}"
        raise UsageError(f"the logger {name!r} needs {' and '.join(info.missing)}, not installed here: {extra}")
    return info.make()


def _flatten(value: Any, name: str = "") -> dict[str, str | int | float | bool]:
    if isinstance(value, Mapping):
        parts = [_flatten(part, f"{name}.{key}" if name else str(key)) for key, part in value.items()]
        return {key: part for each in parts for key, part in each.items()}
    return {name: value if isinstance(value, str | int | float | bool) else str(value)}
