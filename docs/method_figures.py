"""Draws the figures of docs/method.md from a bench on digits, and writes the numbers that the page quotes.

deat bench quick --methods natural,fgsm,pgd-7,free-8,deat-3,m+deat --seeds 0,1,2 --set val_attack=pgd-20 \
    --set held_out=400 --set attacks=natural,pgd-20 --out runs/theory
python docs/method_figures.py runs/theory docs/images

With a bench alone it prints what can be said of any: how l_X goes with an epoch's gain.

python docs/method_figures.py docs/results/training-process/runs
"""

import json
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor, nn

from deat.models import load_weights
from deat.report.run_results import BenchResults, ReportRow, RunResults, load_bench
from deat.runs.resolve_request import Request, Run, resolve_request
from deat.tasks.per_example_losses import cross_entropy
from deat.threat import Linf

A, J, GREY, BLUE = "#f8961e", "#7209b7", "#888888", "#4361ee"
WORDS = {"natural": "J", "U-FGSM": "AJ", "PGD-7": "AAAAAAAJ", "FREE-8": "JJJJJJJJ"}
POINTS = 40
"""Random points of an image's ball at which gradients are compared."""
NEAR = 0.1
"""Pairs of points nearer than this part of eps are left out: across a ReLU's kink the slope has no bound."""


def main(bench: Path, images: Path) -> None:
    """Draw everything, and write what was counted."""
    mpl.rcParams.update({"svg.hashsalt": "deat", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    images.mkdir(parents=True, exist_ok=True)
    found = load_bench(bench)
    rows = {row.name: row for row in found.rows}
    save(words(rows["m+deat"].runs[0]), images / "method-words.svg")
    save(gains(found), images / "method-gain.svg")
    save(raises(rows["m+deat"]), images / "method-raises.svg")
    sides = {name: theorem(rows[name].runs[0]) for name in ("natural", "m+deat")}
    save(draw_sides(sides), images / "method-theorem.svg")
    numbers = {
        "gain": correlations(found),
        "cost": costs(found),
        "raised after epochs": {run.seed: raised(run) for run in rows["m+deat"].runs},
        "theorem": {name: held.numbers() for name, held in sides.items()},
    }
    (images / "method-numbers.json").write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")


def save(figure: Figure, path: Path) -> None:
    """Write a picture that is the same bytes for the same numbers."""
    figure.savefig(path, metadata={"Date": None}, dpi=200)


def words(run: RunResults) -> Figure:
    """A batch's word by method, and M+DEAT's word by epoch."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained", width_ratios=(1, 1.4))
    for row, (name, word) in enumerate(WORDS.items()):
        left.text(-0.4, -row, name, ha="right", va="center")
        for place, letter in enumerate(word):
            square(left, place, -row, A if letter == "A" else J)
            left.text(place + 0.5, -row, letter, ha="center", va="center", color="white")
    left.set(xlim=(-3, 8.5), ylim=(-3.7, 0.8), title="one batch: craft, then update; or replay")
    left.axis("off")
    for epoch, stats in enumerate(run.history):
        for place in range(stats.k + 1):
            right.add_patch(Rectangle((epoch + 0.55, place + 0.06), 0.9, 0.88, color=J))
        right.add_patch(Rectangle((epoch + 0.55, 0), 0.9, 8, fill=False, ec="#dddddd", lw=0.5))
    right.set(xlim=(0, len(run.history) + 1), ylim=(0, 8.2), xlabel="epoch", ylabel="word of a batch")
    right.set_title("M+DEAT's word J^(k+1), in the frame of FREE-8's")
    return figure


def square(axes: Axes, x: float, y: float, colour: str) -> None:
    """One letter's box."""
    axes.add_patch(Rectangle((x + 0.05, y - 0.42), 0.9, 0.84, color=colour))


def gains(found: BenchResults) -> Figure:
    """Per method, epoch by epoch: how much robustness the epoch brought, and l_X in it."""
    rows = [row for row in found.rows if row.name != "natural"]
    figure, axes = plt.subplots(2, len(rows), figsize=(9, 3.4), layout="constrained", sharex=True, sharey="row")
    for column, row in zip(axes.T, rows, strict=True):
        history = row.runs[0].history
        epochs, gain, size = zip(*steps(row.runs[0]), strict=True)
        column[0].bar(epochs, [100 * g for g in gain], color=[BLUE if g > 0 else "#f72585" for g in gain])
        column[0].set_title(row.name)
        column[1].plot(epochs, [s / max(size) for s in size], color=J)
        column[1].set(xlabel="epoch", ylim=(0, 1.05), xlim=(0, len(history) + 1))
    axes[0, 0].set_ylabel("robustness gain, points")
    axes[1, 0].set_ylabel("l_X, largest = 1")
    return figure


def steps(run: RunResults) -> list[tuple[int, float, float]]:
    """(epoch, gain in robust accuracy, l_X) of every epoch with an adversary, from the second on."""
    pairs = pairwise(run.history)
    return [(b.epoch + 1, (b.val_robust or 0) - (a.val_robust or 0), b.magnitude) for a, b in pairs if b.k]


def correlations(found: BenchResults) -> dict[str, dict[str, float]]:
    """Spearman's rank correlation of l_X with the gain and with the robust accuracy itself, a mean over seeds."""
    numbers = {}
    for row in found.rows:
        if row.name == "natural":
            continue
        pairs = [(size, gain) for run in row.runs for _, gain, size in steps(run)]
        each = [spearman([s for _, _, s in steps(run)], [g for _, g, _ in steps(run)]) for run in row.runs]
        worse = [size for size, gain in pairs if gain < 0]
        better = [size for size, gain in pairs if gain >= 0]
        numbers[row.name] = {
            "spearman": sum(each) / len(each),
            "epochs": len(pairs),
            "worse": len(worse),
            "median l_X where worse / where better": median(worse) / median(better)
            if worse and better
            else float("nan"),
        }
    return numbers


def median(values: list[float]) -> float:
    """The median of a list."""
    return float(torch.tensor(values).median())


def spearman(a: list[float], b: list[float]) -> float:
    """Spearman's rank correlation; ties share their mean rank."""
    ranks = torch.stack([mean_ranks(torch.tensor(v, dtype=torch.float64)) for v in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])


def mean_ranks(values: Tensor) -> Tensor:
    """Ranks from 0, ties at their mean."""
    below, upto = (values[:, None] > values).sum(1), (values[:, None] >= values).sum(1)
    return (below + upto - 1) / 2


def costs(found: BenchResults) -> dict[str, dict[str, float]]:
    """Mean PGD-20 accuracy and backprops a batch by method."""
    spreads = {row.name: (row.seed_statistics("pgd-20"), row.seed_statistics("per_batch")) for row in found.rows}
    return {n: {"pgd-20": a.mean, "per_batch": b.mean} for n, (a, b) in spreads.items() if a and b}


def raises(row: ReportRow) -> Figure:
    """l_X against its threshold, and the k that follows, for each seed."""
    figure, axes = plt.subplots(1, len(row.runs), figsize=(9, 2.8), layout="constrained", sharey=True)
    for panel, run in zip(axes, row.runs, strict=True):
        history = run.history[1:]
        epochs = [h.epoch + 1 for h in history]
        panel.plot(epochs, [h.magnitude for h in history], color=J, lw=1.3, label="l_X")
        known = [(h.epoch + 1, h.threshold) for h in history if h.threshold is not None]
        panel.step(*zip(*known, strict=True), where="mid", color=GREY, ls=":", label="threshold")
        over = raised(run)
        panel.plot(
            over, [run.history[epoch - 1].magnitude for epoch in over], "o", color="#f72585", ms=4, label="k is raised"
        )
        panel.set(xlabel="epoch", title=f"seed {run.seed}")
        twin = panel.twinx()
        twin.step(epochs, [h.k for h in history], where="mid", color=BLUE, lw=1)
        twin.set(ylim=(0, 8))
        twin.tick_params(axis="y", colors=BLUE)
    twin.set_ylabel("k", color=BLUE)
    axes[0].set(ylabel="l_X", ylim=(0, 1.05 * max(h.magnitude for run in row.runs for h in run.history[1:])))
    axes[0].legend(frameon=False, loc="lower right")
    return figure


def raised(run: RunResults) -> list[int]:
    """The epochs, from 1, after which l_X had k raised; the first step after the first epoch is not l_X's doing."""
    return [a.epoch + 1 for a, b in pairwise(run.history) if b.k > a.k and a.epoch]


@dataclass(frozen=True)
class Sides:
    """Theorem 1 on every test image: the gradient where PGD ends, the largest slope and smallest gradient found, and
    the gradient at x."""

    gradient: Tensor
    slope: Tensor
    smallest: Tensor
    natural: Tensor
    eps: float
    dimensions: int

    @property
    def printed(self) -> Tensor:
        """The left side as printed: the gradient over 2 n eps."""
        return self.gradient / (2 * self.dimensions * self.eps)

    @property
    def tight(self) -> Tensor:
        """The left side that the proof allows: the gradient over 2 eps."""
        return self.gradient / (2 * self.eps)

    def numbers(self) -> dict[str, float]:
        """What the page quotes."""
        return {
            "images": len(self.gradient),
            "printed side above the slope found": int((self.printed > self.slope).sum()),
            "tight side above the slope found": int((self.tight > self.slope).sum()),
            "median slope / printed side": float((self.slope / self.printed).median()),
            "median slope / tight side": float((self.slope / self.tight).median()),
            "gradient at PGD's end above that at x": int((self.gradient > self.natural).sum()),
            "median gradient at PGD's end / at x": float((self.gradient / self.natural).median()),
            "no point with a tenth of the gradient": int((self.smallest > 0.1 * self.gradient).sum()),
            "no point with half of the gradient": int((self.smallest > 0.5 * self.gradient).sum()),
        }


def theorem(run: RunResults) -> Sides:
    """Both sides of Theorem 1 for a run's best weights, on the whole test set, at the point PGD-20 finds."""
    held = opened(run)
    model = held.model().eval()
    load_weights(model, run.path / "best" / "model.safetensors")
    for p in model.parameters():
        p.requires_grad_(False)
    test = held.test_images(10**6)
    assert test is not None
    assert isinstance(held.threat, Linf)
    x, y = (torch.cat(parts) for parts in zip(*test.epoch(0), strict=True))
    generator = torch.Generator().manual_seed(0)
    worst = climb(model, x, y, held.threat, generator)
    flat, smallest = flattest(model, x, y, held.threat, generator)
    starts = [held.threat.initial_delta(x, "uniform", generator) for _ in range(POINTS)]
    deltas = torch.stack([torch.zeros_like(x), worst, flat, *starts])
    slope = largest_slope(model, x, y, deltas, held.threat.eps)
    at_worst, at_x = (sizes(grad(model, x + delta, y)) for delta in (worst, 0))
    return Sides(at_worst, slope, smallest, at_x, held.threat.eps, x[0].numel())


def opened(run: RunResults) -> Run:
    """The run's data, model and threat model again."""
    assert run.record is not None
    threat, data, model = (run.record[name] for name in ("threat", "data", "model"))
    request = Request(data=data["name"], model=model["name"], norm=threat["norm"], eps=threat["eps"])
    return resolve_request(request, val_attack="none", batch_size=400, device="cpu")


def grad(model: nn.Module, x: Tensor, y: Tensor, *, graph: bool = False) -> Tensor:
    """Each image's gradient of its loss by its pixels."""
    x = x if graph else x.detach().requires_grad_()
    (found,) = torch.autograd.grad(cross_entropy(model(x), y).sum(), x, create_graph=graph)
    return found


def sizes(gradient: Tensor) -> Tensor:
    """The l1 norm of each image's gradient."""
    return gradient.detach().flatten(1).abs().sum(1)


def climb(model: nn.Module, x: Tensor, y: Tensor, threat: Linf, generator: torch.Generator) -> Tensor:
    """The delta that PGD-20 ends at."""
    delta = threat.initial_delta(x, "uniform", generator)
    for _ in range(20):
        delta = threat.pgd_step(x, delta, grad(model, x + delta, y), threat.eps / 4)
    return delta


def flattest(model: nn.Module, x: Tensor, y: Tensor, threat: Linf, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Where the gradient is smallest, as far as descents on its size and on the loss from several starts can find."""
    best, smallest = torch.zeros_like(x), sizes(grad(model, x, y))
    for start in ("zero", "uniform", "uniform", "uniform"):
        for descend in (gradient_of_size, grad):
            delta = threat.initial_delta(x, start, generator)
            for step in range(100):
                delta = threat.pgd_step(x, delta, -descend(model, x + delta, y), threat.eps * 0.25 * 0.96**step)
                size = sizes(grad(model, x + delta, y))
                better = size < smallest
                smallest = torch.where(better, size, smallest)
                best = torch.where(better[:, None, None, None], delta, best)
    return best, smallest


def gradient_of_size(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The gradient of the gradient's own l1 norm."""
    x = x.detach().requires_grad_()
    size = grad(model, x, y, graph=True).abs().sum()
    (found,) = torch.autograd.grad(size, x)
    return found


def largest_slope(model: nn.Module, x: Tensor, y: Tensor, deltas: Tensor, eps: float) -> Tensor:
    """The largest change of the gradient over the distance, over all pairs of points that are not too near."""
    gradients = torch.stack([grad(model, x + delta, y) for delta in deltas]).flatten(2)
    places = deltas.flatten(2)
    slope = torch.zeros(len(x))
    for i in range(len(deltas)):
        change = (gradients[i + 1 :] - gradients[i]).abs().sum(2)
        distance = (places[i + 1 :] - places[i]).abs().amax(2) if i + 1 < len(deltas) else torch.zeros(0, len(x))
        ratio = torch.where(distance > NEAR * eps, change / distance.clamp_min(1e-12), torch.zeros(()))
        slope = torch.maximum(slope, ratio.amax(0)) if len(ratio) else slope
    return slope


def draw_sides(found: dict[str, Sides]) -> Figure:
    """Both sides of the theorem, image by image, in the order of the slope."""
    figure, axes = plt.subplots(1, len(found), figsize=(9, 3.2), layout="constrained", sharey=True)
    for panel, (name, sides) in zip(axes, found.items(), strict=True):
        order = sides.slope.argsort()
        for label, values, colour in (
            ("largest slope found, for l_xx", sides.slope, "black"),
            ("gradient / (2 eps), tight", sides.tight, J),
            ("gradient / (2 n eps), as printed", sides.printed, A),
        ):
            panel.plot(
                values[order], ".", ms=2.5 if colour != "black" else 2, color=colour, label=label, rasterized=True
            )
        panel.set(yscale="log", ylim=(1e-4, None), title=f"{name}", xlabel="test image, by slope")
    axes[0].legend(frameon=False, loc="lower right", markerscale=3)
    return figure


if __name__ == "__main__":
    if len(sys.argv) == 2:
        print(json.dumps(correlations(load_bench(sys.argv[1])), indent=2))
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
