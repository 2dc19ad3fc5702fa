"""The history of a training as a table of pandas, and as what a notebook shows of it."""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from deat.training.epoch_records import EpochStats
from deat.utils.notebook_html import make_data_frame, render_html

NUM_SHOWN_EPOCHS = 8


def history_to_pandas(history: Sequence[EpochStats]) -> Any:
    """Return a pandas.DataFrame with one row for each epoch, and the names of `EpochStats` as columns."""
    return make_data_frame({f.name: [getattr(stats, f.name) for stats in history] for f in fields(EpochStats)})


def render_history(title: str, lines: Iterable[str], history: Sequence[EpochStats]) -> str:
    """Return HTML with the last epochs as a table, and accuracies on held-out images as curves.

    Args:
        title: The first line.
        lines: Further lines.
        history: The statistics of each epoch.
    """
    shown = list(history[-NUM_SHOWN_EPOCHS:])
    rows = [
        [
            str(stats.epoch + 1),
            str(stats.k),
            _format_magnitude(stats.magnitude),
            f"{stats.loss:.3f}",
            *map(_format_share, (stats.train_natural, stats.train_robust, stats.val_natural, stats.val_robust)),
            f"{stats.backprops:,}",
        ]
        for stats in shown
    ]
    earlier = len(history) - len(shown)
    more = [f"The table has the last {len(shown)} of {len(history)} epochs; to_pandas() has all."] if earlier else []
    header = ("epoch", "k", "l_X", "loss", "train, clean", "train, attacked", "val", "val, attacked", "backprops")
    curves = {
        "val": [stats.val_natural for stats in history],
        "val, attacked": [stats.val_robust for stats in history],
        "train, attacked": [stats.train_robust for stats in history],
    }
    return render_html(title, [*lines, *more], header=header, rows=rows, curves=curves, curves_title="score by epoch")


def _format_magnitude(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= value < 1e7 else f"{value:.4g}"


def _format_share(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
