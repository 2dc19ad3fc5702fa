"""Whether deat's speed on the CPU costs robustness: the same training, plain in float32 and deat in bfloat16.

PreAct-ResNet-18 on the 8x8 digits, 40 epochs' worth of backprops for either method, a cosine learning rate. Each side
chooses its peak learning rate by PGD-20 accuracy on 200 held-out training images, in a run with a seed that is not used
again. Then both train on all training images, from the same initial weights for each seed. Both are evaluated by the
same float32 PGD-20 on the 400 test images, on which nothing was chosen.
"""

import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev

import torch
from cpu_sides import BATCH, CORES, NETWORK, deat_trainer, machine, plain_script
from plain import EPOCHS
from shared import Record
from torch import nn

import deat
from deat.data import ImageSet
from deat.evaluation.attacks import correct_under_attack, parse_attack

NUM_EPOCHS = {"pgd-7": 5, "free-8": 5}
RATES = (0.01, 0.02, 0.05)
EPS = 0.15
HELD_OUT, PILOT_SEED = 200, 1000
Train = Callable[[ImageSet, str, int, float, int], nn.Module]


@dataclass(frozen=True)
class Trial:
    """One training run of one side, and what it is scored on."""

    who: str
    method: str
    lr: float
    seed: int
    pilot: bool
    quick: bool

    @property
    def epochs(self) -> int:
        """How long it trains."""
        return 1 if self.quick else NUM_EPOCHS[self.method]

    def __call__(self) -> dict[str, float]:
        """Train, and score on held-out images or on the test images."""
        train, test = digits(self.quick)
        if self.pilot:
            train, test = train.split(HELD_OUT, PILOT_SEED)
        found = score(SIDES[self.who](train, self.method, self.epochs, self.lr, self.seed), test)
        print(f"{self} {found}", flush=True)
        return found

    def key(self) -> Record:
        """What identifies it in a file of trials."""
        return {name: value for name, value in asdict(self).items() if name != "quick"}


def measure_accuracy(name: str, seeds: int, quick: bool, jobs: int, known: Path | None = None) -> Record:
    """Choose each side's learning rate on held-out images, train on the digits in both ways, and score both alike."""
    rates = RATES[:1] if quick else RATES
    tries = [Trial(who, name, lr, PILOT_SEED, True, quick) for who in SIDES for lr in rates]
    held = dict(zip(tries, together(tries, jobs, known), strict=True))
    pilots = {who: {str(t.lr): found["pgd-20"] for t, found in held.items() if t.who == who} for who in SIDES}
    chosen = {who: best_rate(scores) for who, scores in pilots.items()}
    trials = [Trial(who, name, chosen[who], seed, False, quick) for seed in range(seeds) for who in SIDES]
    found = together(trials, jobs, known)
    scores = {who: [each for t, each in zip(trials, found, strict=True) if t.who == who] for who in SIDES}
    train, test = digits(quick)
    epochs = trials[0].epochs
    return {
        "method": name,
        "data": "digits",
        "threat": f"linf:{EPS}",
        "epochs": epochs,
        "held_out_pgd20": pilots,
        "lr": chosen,
        "train_images": len(train),
        "test_images": len(test),
        "trained_on": sorted(trained_on(known, [*tries, *trials])),
        **scores,
        "difference": {
            how: difference(*([r[how] for r in each] for each in scores.values())) for how in ("natural", "pgd-20")
        },
    }


def digits(quick: bool) -> tuple[ImageSet, ImageSet]:
    """Training and test images, a few of each where it must be quick."""
    corpus = deat.load_data("digits")
    train, test = corpus.train, corpus.test
    assert isinstance(train, ImageSet)
    assert isinstance(test, ImageSet)
    return (train.subset(range(HELD_OUT + BATCH)), test.subset(range(BATCH))) if quick else (train, test)


def together(trials: list[Trial], jobs: int, known: Path | None) -> list[dict[str, float]]:
    """Every trial's scores: as a file of earlier trials has them, or made now, several at once, and added to it."""
    held = recall(known)
    missing = [trial for trial in trials if json.dumps(trial.key()) not in held]
    threads = CORES if jobs == 1 else 1
    with ProcessPoolExecutor(jobs, get_context("spawn"), torch.set_num_threads, (threads,)) as pool:
        for trial, found in zip(missing, pool.map(Trial.__call__, missing), strict=True):
            held[json.dumps(trial.key())] = found
            if known:
                with known.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"trial": trial.key(), "scores": found, "on": machine()}) + "\n")
    return [held[json.dumps(trial.key())] for trial in trials]


def trained_on(known: Path | None, trials: list[Trial]) -> set[str]:
    """The machines of the trials, as their file has them."""
    keys = {json.dumps(trial.key()) for trial in trials}
    lines = known.read_text(encoding="utf-8").splitlines() if known and known.exists() else []
    where = [entry["on"] for entry in map(json.loads, lines) if json.dumps(entry["trial"]) in keys]
    return {f"{on['cpu']}, torch {on['torch']}" for on in where} or {f"{machine()['cpu']}, torch {machine()['torch']}"}


def recall(known: Path | None) -> dict[str, dict[str, float]]:
    """The scores of earlier trials."""
    lines = known.read_text(encoding="utf-8").splitlines() if known and known.exists() else []
    return {json.dumps(entry["trial"]): entry["scores"] for entry in map(json.loads, lines)}


def best_rate(scores: dict[str, float]) -> float:
    """The learning rate with the highest score, the lowest of several."""
    return float(max(scores, key=lambda lr: (scores[lr], -float(lr))))


def train_plain(train: ImageSet, name: str, epochs: int, lr: float, seed: int) -> nn.Module:
    """A network trained by the plain loop."""
    script = plain_script(grey_net(seed), train, name, EPS, lr, epochs, lr_schedule="cosine", seed=seed)
    for _ in range(epochs):
        EPOCHS[name](script)
    return script.model


def train_deat(train: ImageSet, name: str, epochs: int, lr: float, seed: int) -> nn.Module:
    """A network trained by deat, in the precision that it is fast in."""
    net = grey_net(seed)
    return (
        deat_trainer(net, train, name, EPS, lr, epochs, lr_schedule="cosine", seed=seed, precision="bf16").fit().model
    )


SIDES: dict[str, Train] = {"plain": train_plain, "deat": train_deat}


def score(net: nn.Module, test: ImageSet) -> dict[str, float]:
    """Accuracy in float32, natural and under PGD-20."""
    x, y, threat = test.images.float() / 255, test.labels, deat.Linf(EPS)
    hits = {
        how: correct_under_attack(net, x, y, parse_attack(how), threat, torch.Generator().manual_seed(0))
        for how in ("natural", "pgd-20")
    }
    return {how: round(hit.double().mean().item(), 4) for how, hit in hits.items()}


def difference(plain: list[float], ours: list[float]) -> Record:
    """The mean of ours less that of plain, and its standard error over the seeds."""
    n = len(plain)
    error = ((stdev(plain) ** 2 + stdev(ours) ** 2) / n) ** 0.5 if n > 1 else None
    return {
        "mean": round(mean(ours) - mean(plain), 4),
        "standard_error": None if error is None else round(error, 4),
    }


def grey_net(seed: int) -> nn.Module:
    """A fresh network; a seed's two networks begin alike."""
    torch.manual_seed(seed)
    return deat.build_model(NETWORK, in_channels=1, image_size=8)
