"""The logger `tensorboard`: event files, by the writer that torch has."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from deat.integrations.loggers.logger import LoggedRun, Logger, Status, register_logger

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


@register_logger(
    "tensorboard",
    what="event files; show them by tensorboard --logdir FOLDER",
    packages=["tensorboard"],
    extra="tensorboard",
)
class TensorBoard(Logger):
    """Writes event files: scalars, images, the settings and the results.

    Losses of batches have a folder of their own, since their steps are batches.

    Args:
        folder: Where; by default tensorboard/ in the run's folder of logs.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = folder

    def start(self, run: LoggedRun) -> None:
        """Open the files; what an interrupted run wrote after the epoch that is resumed from is hidden."""
        self.run, self.path = run, Path(self.folder or run.folder / "tensorboard")
        is_resumed = bool(run.state)
        self.writer = self._open(self.path, run.epochs_done + 1 if is_resumed else None)
        self.batches: SummaryWriter | None = None
        if not is_resumed:
            lines = (f"| {name} | {value} |" for name, value in run.flat_config.items())
            self.writer.add_text("config", "\n".join(["| setting | value |", "|---|---|", *lines]))
        self.state = {"folder": str(self.path)}

    def log_metrics(self, metrics: Mapping[str, float], step: int, axis: Literal["epoch", "batch"] = "epoch") -> None:
        """Add scalars."""
        if axis == "batch" and self.batches is None:
            done = self.run.batches_done + 1 if self.run.state else None
            self.batches = self._open(self.path / "batches", done)
        writer = self.batches if axis == "batch" and self.batches else self.writer
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def log_image(self, name: str, image: Tensor, step: int) -> None:
        """Add an image."""
        self.writer.add_image(name, image, step)

    def log_summary(self, summary: Mapping[str, float]) -> None:
        """Add settings and results for the HParams page."""
        self.writer.add_hparams(self.run.flat_config, {f"result/{k}": v for k, v in summary.items()}, run_name=".")

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Add a table as text."""
        lines = [columns, ["---"] * len(columns), *rows]
        self.writer.add_text(name, "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines))

    def finish(self, status: Status) -> None:
        """Close the files."""
        self.writer.close()
        if self.batches:
            self.batches.close()

    def _open(self, path: Path, purge_step: int | None) -> "SummaryWriter":
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(path), purge_step=purge_step)
