"""The logger `mlflow`: an MLflow server or its local database."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from deat.integrations.loggers.logger import LoggedRun, Logger, Status, register_logger

STATUSES = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
"""How long MLflow waits for a server, where its variables do not say: its own defaults would stop training for minutes."""
PARAMS_PER_CALL = 100
"""How many parameters MLflow takes at once."""


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
        from mlflow import MlflowClient

        with _short_waits():
            self.client = MlflowClient(self.tracking_uri)
            if run.state:
                self.run_id = str(run.state["id"])
                self.client.update_run(self.run_id, status="RUNNING")
            else:
                self.run_id = self._create(run)
        self.state = {"id": self.run_id}

    def log_metrics(self, metrics: Mapping[str, float], step: int, axis: Literal["epoch", "batch"] = "epoch") -> None:
        """Log metrics; those of batches have steps of their own."""
        self._log_metrics(metrics, step)

    def log_image(self, name: str, image: Tensor, step: int) -> None:
        """Log an image as a file."""
        array = image.permute(1, 2, 0).numpy()
        with _short_waits():
            self.client.log_image(self.run_id, array, artifact_file=f"{name}/epoch-{step:04d}.png")

    def log_summary(self, summary: Mapping[str, float]) -> None:
        """Log the results as metrics."""
        self._log_metrics({f"result/{name}": value for name, value in summary.items()}, 0)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Log a table as a file."""
        data = {column: [row[i] for row in rows] for i, column in enumerate(columns)}
        with _short_waits():
            self.client.log_table(self.run_id, data, artifact_file=f"{name}.json")

    def log_file(self, path: Path, name: str) -> None:
        """Log an artifact."""
        log = self.client.log_artifacts if path.is_dir() else self.client.log_artifact
        with _short_waits():
            log(self.run_id, str(path), artifact_path=f"{name}/{path.name}" if path.is_dir() else name)

    def finish(self, status: Status) -> None:
        """End the run."""
        with _short_waits():
            self.client.set_terminated(self.run_id, STATUSES[status])

    def _create(self, run: LoggedRun) -> str:
        from mlflow.entities import Param

        name = self.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", "deat")
        experiment = self.client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self.client.create_experiment(name)
        run_id = str(self.client.create_run(experiment_id, run_name=run.name).info.run_id)
        params = [Param(key, str(value)) for key, value in run.flat_config.items()]
        for start in range(0, len(params), PARAMS_PER_CALL):
            self.client.log_batch(run_id, params=params[start : start + PARAMS_PER_CALL])
        self.client.log_dict(run_id, dict(run.config), "config.json")
        return run_id

    def _log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        with _short_waits():
            self.client.log_batch(self.run_id, [Metric(name, value, now, step) for name, value in metrics.items()])


@contextmanager
def _short_waits() -> Iterator[None]:
    """Let calls of MLflow give up early, for it reads these variables at every request."""
    added = {name: value for name, value in PATIENCE.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
