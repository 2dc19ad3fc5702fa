"""Whether deat's speed on the CPU costs robustness: the same training, plain in float32 and deat in bfloat16.

PreAct-ResNet-18 on the 8x8 digits, 40 epochs' worth of backprops for either method, a cosine rate. Each side picks its
own peak learning rate by PGD-20 accuracy on 200 training images that it does not train on, in a run of a seed that is
not used again. Then both train on all training images, from the same initial weights for each seed, and are scored by
the same float32 PGD-20 on the 400 test images, which nothing was chosen by.
"""

from collections.abc import Callable
from statistics import mean, stdev

import torch
from cpu_page import Record
from cpu_sides import BATCH, NETWORK, deat_trainer, plain_script
from plain import EPOCHS
from torch import nn

import deat
from deat.data import ImageSet
from deat.evaluation.attacks import attack, correct

NUM_EPOCHS = {"pgd-7": 5, "free-8": 5}
RATES = (0.01, 0.02, 0.05)
EPS = 0.15
HELD_OUT, PILOT_SEED = 200, 1000
Train = Callable[[ImageSet, str, int, float, int], nn.Module]


def measure_accuracy(name: str, seeds: int, quick: bool) -> Record:
    """Choose each side's learning rate on held-out images, train on the digits in both ways, and score both alike."""
    train, test = digits(quick)
    epochs, rates = (1, RATES[:1]) if quick else (NUM_EPOCHS[name], RATES)
    sides: dict[str, Train] = {"plain": train_plain, "deat": train_deat}
    pilots = {who: pilot(way, train, name, epochs, rates) for who, way in sides.items()}
    chosen = {who: best_rate(scores) for who, scores in pilots.items()}
    print(f"{name}: held-out PGD-20 by learning rate {pilots}", flush=True)
    scores: dict[str, list[dict[str, float]]] = {who: [] for who in sides}
    for seed in range(seeds):
        for who, way in sides.items():
            scores[who].append(score(way(train, name, epochs, chosen[who], seed), test))
        print(f"{name} seed {seed}: {', '.join(f'{who} {each[-1]}' for who, each in scores.items())}", flush=True)
    return {
        "method": name,
        "data": "digits",
        "threat": f"linf:{EPS}",
        "epochs": epochs,
        "held_out_pgd20": pilots,
        "lr": chosen,
        "train_images": len(train),
        "test_images": len(test),
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


def pilot(way: Train, data: ImageSet, name: str, epochs: int, rates: tuple[float, ...]) -> dict[str, float]:
    """PGD-20 accuracy on held-out images, by learning rate."""
    train, held = data.split(HELD_OUT, PILOT_SEED)
    return {str(lr): score(way(train, name, epochs, lr, PILOT_SEED), held)["pgd-20"] for lr in rates}


def best_rate(scores: dict[str, float]) -> float:
    """The learning rate with the highest score, the lowest of several."""
    return float(max(scores, key=lambda lr: (scores[lr], -float(lr))))


def train_plain(train: ImageSet, name: str, epochs: int, lr: float, seed: int) -> nn.Module:
    """A network trained by the plain loop."""
    script = plain_script(grey_net(seed), train, name, EPS, lr, epochs, rate="cosine", seed=seed)
    for _ in range(epochs):
        EPOCHS[name](script)
    return script.model


def train_deat(train: ImageSet, name: str, epochs: int, lr: float, seed: int) -> nn.Module:
    """A network trained by deat, in the precision that it is fast in."""
    net = grey_net(seed)
    return deat_trainer(net, train, name, EPS, lr, epochs, rate="cosine", seed=seed, precision="bf16").fit().model


def score(net: nn.Module, test: ImageSet) -> dict[str, float]:
    """Accuracy in float32, natural and under PGD-20."""
    x, y, threat = test.images.float() / 255, test.labels, deat.Linf(EPS)
    hits = {
        how: correct(net, x, y, attack(how), threat, torch.Generator().manual_seed(0)) for how in ("natural", "pgd-20")
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
