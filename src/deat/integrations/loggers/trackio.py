"""The logger `trackio`: a local database with a page, by the calls of wandb."""

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from deat.integrations.loggers.logger import LoggedRun, Logger, Status, register_logger


@register_logger(
    "trackio",
    what="Trackio's local database; show it by trackio show",
    packages=["trackio"],
    extra="trackio",
)
class Trackio(Logger):
    """Logs to Trackio.

    Args:
        project: The project; by default TRACKIO_PROJECT, or "deat".
        **options: Other arguments of `trackio.init`, such as space_id.
    """

    def __init__(self, project: str | None = None, **options: Any) -> None:
        self.project, self.options = project, options

    def start(self, run: LoggedRun) -> None:
        """Begin a run, or resume it by its name."""
        import trackio

        project = self.project or os.environ.get("TRACKIO_PROJECT", "deat")
        name = run.state["name"] if run.state else f"{run.name}-{secrets.token_hex(3)}"  # its names are unique
        resume: Literal["must", "never"] = "must" if run.state else "never"
        self.run = trackio.init(project=project, name=name, resume=resume, config=run.flat_config, **self.options)
        self.state = {"name": name}

    def log_metrics(self, metrics: Mapping[str, float], step: int, axis: Literal["epoch", "batch"] = "epoch") -> None:
        """Log metrics with their axis."""
        self.run.log({axis: step, **metrics})

    def log_image(self, name: str, image: Tensor, step: int) -> None:
        """Log an image."""
        import trackio

        array = image.permute(1, 2, 0).numpy()
        self.run.log({"epoch": step, name: trackio.Image(array.repeat(3, 2) if array.shape[2] == 1 else array)})

    def log_summary(self, summary: Mapping[str, float]) -> None:
        """Log the results as metrics."""
        self.run.log({f"result/{name}": value for name, value in summary.items()})

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Log a table."""
        import trackio

        self.run.log({name: trackio.Table(columns=list(columns), data=[list(row) for row in rows])})

    def log_file(self, path: Path, name: str) -> None:
        """Log an artifact."""
        self.run.log_artifact(str(path), name=name, type="model")

    def finish(self, status: Status) -> None:
        """End the run."""
        self.run.finish()
