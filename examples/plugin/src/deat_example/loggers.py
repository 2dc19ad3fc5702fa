"""A logger for `deat train --log lines`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from deat.integrations.loggers import LoggedRun, Logger


class Lines(Logger):
    """Appends a line for each epoch to lines.txt, in the run's folder of logs."""

    def start(self, run: LoggedRun) -> None:
        """Choose the file."""
        self.file = Path(run.folder) / "lines.txt"
        self.file.parent.mkdir(parents=True, exist_ok=True)

    def log_metrics(self, metrics: Mapping[str, float], step: int, axis: Literal["epoch", "batch"] = "epoch") -> None:
        """Write the numbers of an epoch."""
        if axis == "epoch":
            with self.file.open("a", encoding="utf-8") as file:
                file.write(f"epoch {step}: {', '.join(f'{name} {value:.4g}' for name, value in metrics.items())}\n")

    def log_step_begin(self, name: str, value: float, step: int) -> None:
        """Write nothing: the epoch's line has the value."""
