"""Draws a run's history as a picture: how k follows l_X, and what robustness it buys.

python docs/plot_run.py runs/demo docs/images/first-run.svg
"""

import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

from deat.training.epoch_records import read_history


def draw(run: Path, picture: Path) -> None:
    """One picture of two panels: k and l_X by epoch, and accuracies by epoch."""
    mpl.rcParams.update({"svg.hashsalt": "deat", "font.size": 9, "axes.spines.top": False})
    history = read_history(run / "history.jsonl")
    epochs = [h.epoch + 1 for h in history]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 2.9), layout="constrained")
    left.step(epochs, [h.k for h in history], where="mid", color="#b5179e", lw=2)
    left.set(xlabel="epoch", ylabel="adversarial steps k", ylim=(0, None), title="k follows the gradient magnitude")
    twin = left.twinx()
    twin.plot(epochs, [h.magnitude for h in history], color="#888888", lw=1.2, label="l_X")
    limits = [(e, h.threshold) for e, h in zip(epochs, history, strict=True) if h.threshold is not None]
    if limits:  # a short run, or one without M+, has no threshold
        twin.step(*zip(*limits, strict=True), where="mid", color="#888888", lw=1, ls=":", label="threshold")
    twin.set(ylabel="l_X", ylim=(0, None))
    twin.legend(frameon=False, loc="lower right")
    for name, values, colour in (
        ("validation, natural", [h.val_natural for h in history], "#4361ee"),
        ("validation, CW-20", [h.val_robust for h in history], "#f72585"),
        ("training, under attack", [h.train_accuracy if h.k else None for h in history], "#888888"),
        ("training, clean", [None if h.k else h.train_accuracy for h in history], "#bbbbbb"),
    ):
        if any(v is not None for v in values):
            shares = [float("nan") if v is None else 100 * v for v in values]
            right.plot(epochs, shares, color=colour, label=name, marker="." if "clean" in name else None)
    right.set(xlabel="epoch", ylabel="accuracy %", ylim=(0, 102), title="what it buys")
    right.legend(frameon=False, loc="lower right")
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
