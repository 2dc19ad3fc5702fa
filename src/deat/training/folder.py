"""The folder a run leaves: run.json, history.jsonl, timing.jsonl, and the weights of its best and last epoch."""

import json
import shutil
from pathlib import Path
from typing import Any

from deat.errors import CheckpointError, UsageError
from deat.models import save_weights
from deat.training.history import EpochStats, EpochTiming, append, rewrite
from deat.training.trainer import Trainer
from deat.versions import versions
from deat.writing import write_json, write_whole

RUN, HISTORY, TIMING, WATCH = "run.json", "history.jsonl", "timing.jsonl", "watch.jsonl"
FIGURES = ("training-process", "validation", "backprops", "cost", "alpha-gamma", "sweep", "gallery")
REPORT_FILES = {"index.html", "table.md", "table.tex", "table.csv"} | {
    f"figures/{name}.{kind}" for name in FIGURES for kind in ("svg", "png", "csv")
}
"""What a report may consist of, so that nothing else is ever replaced or removed."""


class RunFolder:
    """Writes a run down while it goes on; a callback of the trainer. Every file is replaced whole or appended to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines = 0

    @classmethod
    def create(cls, path: Path, record: dict[str, Any], *, overwrite: bool = False) -> "RunFolder":
        """A new folder with its run.json; an existing one only where overwriting a run was asked for."""
        check_free(path, overwrite)
        try:
            if path.exists():
                shutil.rmtree(path)
            path.mkdir(parents=True)
            write_json(path / RUN, {**record, "versions": versions()})
        except OSError as error:
            raise CheckpointError(f"cannot write to {str(path)!r}: {error.strerror}. Choose another --out.") from None
        return cls(path)

    def on_epoch(self, trainer: Trainer, stats: EpochStats, timing: EpochTiming) -> None:
        """Add to the records, and keep last and best, which are of an earlier epoch if this one was put back."""
        last = trainer.history[-1]
        self._keep_history(trainer.history)
        append(self.path / TIMING, timing)
        save_weights(trainer.model, self.path / "last" / "model.safetensors")
        write_json(self.path / "last" / "state.json", _about(last))
        if trainer.best.snapshot.epoch == last.epoch:
            for name in ("model.safetensors", "state.json"):
                write_whole(self.path / "best" / name, (self.path / "last" / name).read_bytes())

    def _keep_history(self, history: list[EpochStats]) -> None:
        """One line for each epoch that stands: added, or all written anew where epochs were put back."""
        if len(history) == self._lines + 1:
            append(self.path / HISTORY, history[-1])
        else:
            rewrite(self.path / HISTORY, history)
        self._lines = len(history)


def check_free(path: Path, overwrite: bool = False) -> None:
    """Refuse an output folder that is taken, or that is no run and must not be deleted."""
    if not path.exists():
        return
    if not overwrite:
        raise UsageError(f"{str(path)!r} exists already. Choose another --out, or add --overwrite to replace that run.")
    if not _is_run(path):
        raise UsageError(f"{str(path)!r} is not a run of deat's, so it is not overwritten. Choose another --out.")


def _is_run(path: Path) -> bool:
    """Whether a folder holds a run's record and nothing that no run writes."""
    try:
        record = json.loads((path / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    ours = {RUN, HISTORY, TIMING, WATCH, "best", "last", "scores.json", "report.md"}
    made = {p.name for p in path.glob("evaluation*.json")} | ({"report"} if is_report(path / "report") else set())
    foreign = [p.name for p in path.iterdir() if p.name not in ours | made and not p.name.startswith(".")]
    return isinstance(record, dict) and {"request", "method", "versions"} <= record.keys() and not foreign


def is_report(path: Path) -> bool:
    """Whether a folder holds what `deat report` writes and nothing else."""
    held = {p.relative_to(path).as_posix() for p in path.rglob("*") if not p.is_dir()}
    return path.is_dir() and held <= REPORT_FILES


def free_name(parent: Path, name: str) -> Path:
    """parent/name, or the first parent/name-2, -3 … that is not taken."""
    clean = "".join(c if c.isalnum() or c in "+%._-" else "-" for c in name)[:80]
    number = 1
    while (path := parent / (clean if number == 1 else f"{clean}-{number}")).exists():
        number += 1
    return path


def _about(stats: EpochStats) -> dict[str, Any]:
    return {"epoch": stats.epoch, "val_natural": stats.val_natural, "val_robust": stats.val_robust, "k": stats.k}
