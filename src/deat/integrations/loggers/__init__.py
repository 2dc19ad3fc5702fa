"""Loggers: TensorBoard, Weights & Biases, MLflow, Trackio, CSV files, and those of your own."""

from deat.integrations.loggers.logger import LoggedRun, Logger, get_loggers, list_loggers, register_logger
from deat.integrations.loggers.logging_callback import RunLog

__all__ = ["LoggedRun", "Logger", "RunLog", "get_loggers", "list_loggers", "register_logger"]
