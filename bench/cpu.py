"""Training speed on two CPU cores: plain PGD-7 and FREE-8 loops and deat's own, side by side in one run.

Speed: PreAct-ResNet-18 on 3x32x32 images, batch 64. In every round the plain loop (bench/plain.py) and deat's trainer
play the same number of batches, one directly after the other; the first round warms up and is dropped. What counts is
the ratio of the two times of a round: its median, and its range over the rounds. A round of deat is a whole
`Trainer.run_epoch`, its records included. A round in which other processes took 5 % of the cores from either side is
played again, up to four times as many rounds as were asked for.

Accuracy: PreAct-ResNet-18 on the 8x8 digits, trained by the plain float32 loop and by deat in bfloat16 from the same
initial weights, scored by the same float32 PGD-20 on the 400 test images.

Run it on an idle machine, for about fifteen minutes:

    python bench/cpu.py

It writes docs/results/cpu.json and docs/results/cpu.md. `--quick` shows in two minutes that everything works; its
numbers mean nothing and are only printed unless --out says where to write them.
"""

import argparse
import json
import os
import platform
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch
from clock import Lap, lap
from cpu_page import Record, render
from plain import EPOCHS, Images, Script
from torch import nn

import deat
from deat.data import Augment, ImageSet
from deat.evaluation.attacks import attack, correct
from deat.game.engine import cpu_is_fast_at_bf16

CORES = 2
BATCH = 64
PAD = 4
NETWORK = "preact_resnet18"
GOALS = {"pgd-7": 2.5, "free-8": 1.7}
ALPHA = {"pgd-7": 0.25, "free-8": 1.0}  # in units of eps, as the library has them
ACCURACY_EPOCHS = {"pgd-7": 4, "free-8": 2}
ACCURACY_LR = 0.02
QUIET = 0.05
ATTEMPTS = 4
OUT = Path(__file__).resolve().parents[1] / "docs" / "results" / "cpu.json"
Pair = tuple[Lap, Lap]


def main() -> None:
    """Measure, print, and write the result."""
    args = arguments()
    use_two_cores()
    result = machine() | {"command": command(args)}
    attempts = 1 if args.quick else ATTEMPTS
    result["speed"] = [measure_speed(name, args.rounds, args.batches, attempts) for name in GOALS]
    result["accuracy"] = [measure_accuracy(name, args.seeds, args.quick) for name in GOALS]
    table = render(result)
    print(table)
    out = args.out or (None if args.quick else OUT)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        out.with_suffix(".md").write_text(table, encoding="utf-8")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Plain loops and deat, side by side on two CPU cores.")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds, after one that warms up")
    parser.add_argument("--batches", type=int, default=2, help="batches of 64 in a round")
    parser.add_argument("--seeds", type=int, default=3, help="training runs of each kind in the accuracy part")
    parser.add_argument("--out", type=Path, help="the JSON file to write; a table goes beside it as .md")
    parser.add_argument("--quick", action="store_true", help="one round, one batch, one short training run")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.batches, args.seeds = 1, 1, 1
    if min(args.rounds, args.batches, args.seeds) < 1:
        parser.error("--rounds, --batches and --seeds must be at least 1")
    return args


def command(args: argparse.Namespace) -> str:
    """The command that repeats this run."""
    size = "--quick" if args.quick else f"--rounds {args.rounds} --batches {args.batches} --seeds {args.seeds}"
    return f"python bench/cpu.py {size}"


def use_two_cores() -> None:
    """Stay on two cores, in as many threads."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    torch.set_num_threads(CORES)


def machine() -> Record:
    """What the numbers depend on besides the code."""
    return {
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "bf16_in_hardware": cpu_is_fast_at_bf16(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deat": deat.__version__,
        "network": NETWORK,
        "batch_size": BATCH,
    }


def cpu_name() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def measure_speed(name: str, rounds: int, batches: int, attempts: int) -> Record:
    """Alternate rounds of the plain loop and of deat's trainer until enough of them were undisturbed."""
    data, most = random_images(batches * BATCH), attempts * rounds + 1
    script = plain_script(colour_net(), data, name, lr=0.01, epochs=most, pad=PAD, workers=2)
    trainer = deat_trainer(colour_net(), data, name, lr=0.01, epochs=most, augment=Augment(PAD))
    laps: list[Pair] = []
    while len(laps) < most and len(undisturbed(laps[1:])) < rounds:
        laps.append((lap(lambda: EPOCHS[name](script)), lap(trainer.run_epoch)))
        show = ", ".join(f"{who} {one.seconds:.2f} s" for who, one in zip(("plain", "deat"), laps[-1], strict=True))
        print(f"{name} round {len(laps) - 1}: {show}; others took {disturbance(laps[-1]):.1%}", flush=True)
    counts = script.backprops // len(laps), trainer.game.cost.backprops // len(laps)
    kept = undisturbed(laps[1:]) or laps[1:]
    return {
        "method": name,
        "goal": GOALS[name],
        "precision": trainer.engine.precision,
        "batches_per_round": batches,
        "rounds": {"played": len(laps) - 1, "undisturbed": len(undisturbed(laps[1:]))},
        "others": [round(disturbance(pair), 3) for pair in kept],
        "plain": summary([pair[0] for pair in kept], counts[0]),
        "deat": summary([pair[1] for pair in kept], counts[1]),
        "ratio": spread([plain.seconds / ours.seconds for plain, ours in kept]),
    }


def undisturbed(laps: list[Pair]) -> list[Pair]:
    """The rounds in which other processes took next to nothing from either side."""
    return [pair for pair in laps if disturbance(pair) < QUIET]


def disturbance(pair: Pair) -> float:
    """The larger share that others took from one of the two."""
    return max(one.others for one in pair)


def summary(laps: list[Lap], backprops: int) -> Record:
    """One side's rounds."""
    seconds = [round(one.seconds, 3) for one in laps]
    return {"backprops_per_round": backprops, "seconds": seconds, "median": round(median(seconds), 3)}


def spread(ratios: list[float]) -> Record:
    """The median and range of the rounds' ratios."""
    each = [round(ratio, 3) for ratio in ratios]
    return {"rounds": each, "median": round(median(each), 3), "min": min(each), "max": max(each)}


def measure_accuracy(name: str, seeds: int, quick: bool) -> Record:
    """Train on the digits in both ways, and score both in the same way."""
    corpus = deat.load_data("digits")
    train, test = corpus.train, corpus.test
    assert isinstance(train, ImageSet)
    assert isinstance(test, ImageSet)
    if quick:
        train, test = train.subset(range(2 * BATCH)), test.subset(range(BATCH))
    epochs = 1 if quick else ACCURACY_EPOCHS[name]
    plain, ours = [], []
    for seed in range(seeds):
        plain.append(score(train_plain(train, name, epochs, seed), test))
        ours.append(score(train_deat(train, name, epochs, seed), test))
        print(f"{name} seed {seed}: plain {plain[-1]}, deat {ours[-1]}", flush=True)
    return {
        "method": name,
        "data": "digits",
        "threat": "linf:0.15",
        "epochs": epochs,
        "lr": ACCURACY_LR,
        "train_images": len(train),
        "test_images": len(test),
        "plain": plain,
        "deat": ours,
        "difference": {key: difference([r[key] for r in plain], [r[key] for r in ours]) for key in plain[0]},
    }


def train_plain(train: ImageSet, name: str, epochs: int, seed: int) -> nn.Module:
    """A network trained by the plain loop."""
    script = plain_script(grey_net(seed), train, name, 0.15, ACCURACY_LR, epochs, rate="cosine", seed=seed)
    for _ in range(epochs):
        EPOCHS[name](script)
    return script.model


def train_deat(train: ImageSet, name: str, epochs: int, seed: int) -> nn.Module:
    """A network trained by deat, in the precision that it is fast in."""
    trainer = deat_trainer(
        grey_net(seed), train, name, 0.15, ACCURACY_LR, epochs, rate="cosine", seed=seed, precision="bf16"
    )
    return trainer.fit().model


def score(net: nn.Module, test: ImageSet) -> dict[str, float]:
    """Accuracy in float32, natural and under PGD-20."""
    x, y, threat = test.images.float() / 255, test.labels, deat.Linf(0.15)
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


def plain_script(
    net: nn.Module,
    data: ImageSet,
    name: str,
    eps: float = 8 / 255,
    lr: float = 0.1,
    epochs: int = 1,
    pad: int = 0,
    **options: Any,
) -> Script:
    """The plain loop's state for a method."""
    images = Images(data.images, data.labels, pad)
    return Script(net, images, BATCH, epochs, lr, eps, ALPHA[name] * eps, **options)


def deat_trainer(
    net: nn.Module,
    data: ImageSet,
    name: str,
    eps: float = 8 / 255,
    lr: float = 0.1,
    epochs: int = 1,
    augment: Augment | None = None,
    rate: str = "flat",
    **options: Any,
) -> deat.Trainer:
    """The library's trainer, as everybody gets it."""
    settings = deat.Settings(epochs=epochs, batch_size=BATCH, lr=lr, rate=rate, threads=CORES, **options)
    return deat.make_trainer(net, data, method=name, threat=deat.Linf(eps), settings=settings, augment=augment)


def random_images(num: int) -> ImageSet:
    """Noise of CIFAR's shape: how long a step takes does not depend on what is on the images."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (num, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return ImageSet(images, torch.randint(0, 10, (num,), generator=generator), tuple("0123456789"))


def colour_net() -> nn.Module:
    """The network of the speed part, normalisation included."""
    torch.manual_seed(0)
    return deat.build_model(NETWORK, normalize=((0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)))


def grey_net(seed: int) -> nn.Module:
    """The network of the accuracy part; a seed's two networks begin alike."""
    torch.manual_seed(seed)
    return deat.build_model(NETWORK, in_channels=1, image_size=8)


if __name__ == "__main__":
    main()
