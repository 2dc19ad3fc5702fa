"""The logger `mlflow`: an MLflow server or its local database."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from deat.integrations.loggers.logger import LoggedRun, Logger, Status, register_logger

STATUSES = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


@register_logger(
    "mlflow",
    what="MLflow; MLFLOW_TRACKING_URI as usual, by default a database in the working folder",
    packages=["mlflow"],
    extra="mlflow",
)
class MLflow(Logger):
    """Logs to MLflow, without touching its active run.

    Args:
        experiment: The experiment; by default MLFLOW_EXPERIMENT_NAME, or "deat".
        tracking_uri: The server or database, such as "sqlite:///mlflow.db"; by default MLflow's own.
    """

    def __init__(self, experiment: str | None = None, tracking_uri: str | None = None) -> None:
        self.experiment, self.tracking_uri = experiment, tracking_uri

    def start(self, run: LoggedRun) -> None:
        """Begin a run, or resume it by its id."""
        import os

        from mlflow import MlflowClient

        self.client = MlflowClient(self.tracking_uri)
        if run.state:
            self.run_id = str(run.state["id"])
            self.client.update_run(self.run_id, status="RUNNING")
        else:
            name = self.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", "deat")
            experiment = self.client.get_experiment_by_name(name)
            experiment_id = experiment.experiment_id if experiment else self.client.create_experiment(name)
            self.run_id = self.client.create_run(experiment_id, run_name=run.name).info.run_id
            for key, value in run.flat_config.items():
                self.client.log_param(self.run_id, key, value)
            self.client.log_dict(self.run_id, dict(run.config), "config.json")
        self.state = {"id": self.run_id}

    def log_metrics(self, metrics: Mapping[str, float], step: int, axis: Literal["epoch", "batch"] = "epoch") -> None:
        """Log metrics; those of batches have steps of their own."""
        for name, value in metrics.items():
            self.client.log_metric(self.run_id, name, value, step=step)

    def log_image(self, name: str, image: Tensor, step: int) -> None:
        """Log an image as a file."""
        array = image.permute(1, 2, 0).numpy()
        self.client.log_image(self.run_id, array, artifact_file=f"{name}/epoch-{step:04d}.png")

    def log_summary(self, summary: Mapping[str, float]) -> None:
        """Log the results as metrics."""
        for name, value in summary.items():
            self.client.log_metric(self.run_id, f"result/{name}", value)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Log a table as a file."""
        data = {column: [row[i] for row in rows] for i, column in enumerate(columns)}
        self.client.log_table(self.run_id, data, artifact_file=f"{name}.json")

    def log_file(self, path: Path, name: str) -> None:
        """Log an artifact."""
        self.client.log_artifact(self.run_id, str(path), artifact_path=name)

    def finish(self, status: Status) -> None:
        """End the run."""
        self.client.set_terminated(self.run_id, STATUSES[status])
