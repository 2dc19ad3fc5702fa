"""The logger `wandb`: Weights & Biases, also offline."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from deat.integrations.loggers.logger import LoggedRun, Logger, Status, register_logger


@register_logger(
    "wandb",
    what="Weights & Biases; WANDB_PROJECT and WANDB_MODE=offline as usual",
    packages=["wandb"],
    extra="wandb",
)
class Wandb(Logger):
    """Logs to Weights & Biases.

    Args:
        project: The project; by default WANDB_PROJECT, or "deat".
        **options: Other arguments of `wandb.init`, such as mode="offline" or tags=["cifar"].
    """

    def __init__(self, project: str | None = None, **options: Any) -> None:
        self.project, self.options = project, options

    def start(self, run: LoggedRun) -> None:
        """Begin a run, or resume it by its id."""
        import wandb

        run.folder.mkdir(parents=True, exist_ok=True)
        options = {"resume": "allow", "id": run.state["id"]} if run.state else {}
        self.run = wandb.init(
            project=self.project or os.environ.get("WANDB_PROJECT", "deat"),
            name=run.name,
            dir=str(run.folder),
            config=dict(run.config),
            **options,
            **self.options,
        )
        for axis in ("epoch", "batch"):
            self.run.define_metric(axis, hidden=True)
        self.run.define_metric("*", step_metric="epoch")
        self.run.define_metric("batch_loss", step_metric="batch")
        self.state = {"id": self.run.id}
        # wandb drops what is logged at a step below its last one, which it does not know of a run that was offline. An
        # epoch, and so every batch and its backprops, makes at most four rows.
        self.step = 4 * run.backprops_done

    def log_metrics(self, metrics: Mapping[str, float], step: int, axis: Literal["epoch", "batch"] = "epoch") -> None:
        """Log metrics over their own axis: wandb's own steps only grow, and a rollback returns to an earlier one."""
        self._log({axis: step, **metrics})

    def log_image(self, name: str, image: Tensor, step: int) -> None:
        """Log an image."""
        import wandb

        self._log({"epoch": step, name: wandb.Image(image.permute(1, 2, 0).squeeze(2).numpy())})

    def log_summary(self, summary: Mapping[str, float]) -> None:
        """Set the values of the table of runs."""
        self.run.summary.update(dict(summary))

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Log a table."""
        import wandb

        self._log({name: wandb.Table(columns=list(columns), data=[list(row) for row in rows])})

    def log_file(self, path: Path, name: str) -> None:
        """Log an artifact."""
        import wandb

        artifact = wandb.Artifact(f"{name}-{self.run.id}", type="model")
        if path.is_dir():
            artifact.add_dir(str(path))
        else:
            artifact.add_file(str(path))
        self.run.log_artifact(artifact)

    def finish(self, status: Status) -> None:
        """End the run."""
        self.run.finish(exit_code=0 if status == "finished" else 1)

    def _log(self, row: dict[str, Any]) -> None:
        self.run.log(row, step=self.step)
        self.step += 1
