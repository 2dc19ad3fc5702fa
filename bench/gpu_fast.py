"""The whole FAST run of M+DEAT, as fast as it goes and as plainly as it goes: seconds, and what it costs in accuracy.

The recipe cifar10-fast on PreAct-ResNet 18, 11 epochs, data and augmentation included: compiled in bf16, and eager in
float32, a few seeds each. A BP-epoch is one backprop for every batch of an epoch. The first epoch of an engine holds
its warm-up, which is what it took beyond its backprops at the pace of the others. Natural and PGD-20 accuracy are on
all test images. Runs that are in the file already are kept, so that the command may be given again:

    python bench/gpu_fast.py --data folder:cifar10-jpeg.tar.xz --out docs/results/fast.json
    python bench/gpu_fast.py --data folder:cifar10-jpeg.tar.xz --out docs/results/fast.json compile-bf16-0

It writes the JSON file and a table beside it.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

import deat
from deat.recipes import recipe
from deat.versions import versions
from gpu import clocked

SIDES = {
    "compile-bf16": {"engine": "compile", "precision": "bf16"},
    "eager-fp32": {"engine": "eager", "precision": "fp32"},
}
SEEDS = (0, 1, 2)
ATTACKS = ("natural", "pgd-20")
Record = dict[str, Any]


def main() -> None:
    """Train and judge what is missing."""
    names = [f"{side}-{seed}" for side in SIDES for seed in SEEDS]
    parser = argparse.ArgumentParser(description="The whole FAST run of M+DEAT, compiled and plain.")
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"what to run; all of {', '.join(names)}")
    parser.add_argument("--data", required=True, help="CIFAR-10, as deat train takes it")
    parser.add_argument("--epochs", type=int, default=None, help="other than the recipe's, to try the command out")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write or to add to")
    args = parser.parse_args()
    if unknown := set(args.runs) - set(names):
        parser.error(f"no such run: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    result = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {"runs": {}}
    result["machine"] = {"device": torch.cuda.get_device_name(), **versions()}
    for name in args.runs or names:
        if name not in result["runs"]:
            side, _, seed = name.rpartition("-")
            result["runs"][name] = measure(args.data, SIDES[side], int(seed), args.epochs)
            print(name, result["runs"][name], flush=True)
            args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    args.out.with_suffix(".md").write_text(render(result), encoding="utf-8")


def measure(data: str, side: Record, seed: int, epochs: int | None) -> Record:
    """One run, by the clock, and its accuracies."""
    (row,) = recipe("cifar10-fast").table(["m+deat"], [], data)
    row = replace(row, settings={**row.settings, **side, **({"epochs": epochs} if epochs else {})})
    run = row.resolve(seed)
    trainer = run.trainer()
    seconds = []
    with trainer.session():
        for _ in range(run.settings.epochs):
            seconds.append(clocked(trainer.run_epoch))
    spent = [stats.k + 1 for stats in trainer.history]
    pace = sum(seconds[1:]) / sum(spent[1:])
    test: Any = run.corpus.test
    found = deat.evaluate(trainer.model, test, threat=run.threat, attacks=list(ATTACKS), sanity=False, block=2500)
    return {
        "seconds": [round(s, 3) for s in seconds],
        "bp_epochs": spent,
        "seconds_per_bp_epoch": round(pace, 4),
        "warm_up_seconds": round(seconds[0] - spent[0] * pace, 1),
        "ran": trainer.engine.name,
        "accuracy": {name: found.accuracy[name] for name in ATTACKS},
    }


def render(result: Record) -> str:
    """The result as a page of Markdown."""
    machine, runs = result["machine"], result["runs"]
    lines = [
        "# The whole FAST run of M+DEAT",
        "",
        "`python bench/gpu_fast.py --data folder:cifar10-jpeg.tar.xz --out docs/results/fast.json` on",
        f"{machine['device']}, torch {machine['torch']}; its head says what is measured. Accuracies in %, on all test",
        "images.",
        "",
        "| run | BP-epochs | seconds | s a BP-epoch | warm-up, s | natural | PGD-20 |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, run in runs.items():
        paid = sum(run["seconds"]) - run["warm_up_seconds"]
        scores = " | ".join(f"{100 * run['accuracy'][a]:.2f}" for a in ATTACKS)
        columns = (sum(run["bp_epochs"]), f"{paid:.1f}", f"{run['seconds_per_bp_epoch']:.2f}", run["warm_up_seconds"])
        lines.append(f"| {name} | " + " | ".join(map(str, columns)) + f" | {scores} |")
    return "\n".join([*lines, "", *compared(runs), ""])


def compared(runs: dict[str, Record]) -> list[str]:
    """The difference of the sides' means, once both have the same seeds."""
    sides = {side: [runs[f"{side}-{seed}"] for seed in SEEDS if f"{side}-{seed}" in runs] for side in SIDES}
    if len({len(held) for held in sides.values()}) > 1 or len(next(iter(sides.values()))) < 2:
        return []
    texts = []
    for attack in ATTACKS:
        pairs = zip(*sides.values(), strict=True)
        gains = [100 * (quick["accuracy"][attack] - plain["accuracy"][attack]) for quick, plain in pairs]
        texts.append(f"{attack} {mean(gains):+.2f} +- {stdev(gains) / len(gains) ** 0.5:.2f}")
    return [f"Compiled bf16 less eager fp32, in points, seed by seed, with standard errors: {', '.join(texts)}."]


if __name__ == "__main__":
    main()
