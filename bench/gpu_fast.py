"""The whole FAST run of M+DEAT, as fast as it goes and as plainly as it goes: seconds, and what it costs in accuracy.

The recipe cifar10-fast on PreAct-ResNet 18, 11 epochs, data and augmentation included: compiled in bf16, and eager in
float32, a few seeds each. A BP-epoch is one backprop for every batch of an epoch. The first epoch of an engine holds
its warm-up, which is what it took beyond its backprops at the pace of the others; "first" are those that found no
kernel of ours that an earlier process had built. Natural and PGD-20 accuracy are on
all test images. Then the trained network makes one ascent and one joint move on the same 128 images, compiled and
eager, both in bf16: how far their losses are apart, and how many signs of delta differ. Runs that are in the file
already are kept, so that the command may be given again:

    python bench/gpu_fast.py --data folder:cifar10-jpeg.tar.xz --out docs/results/fast.json
    python bench/gpu_fast.py --data folder:cifar10-jpeg.tar.xz --out docs/results/fast.json compile-bf16-0

Runs that share a GPU, each with --crowded and a file of its own, show accuracy and no seconds; --take brings them in.
It writes the JSON file and a table beside it.
"""

import argparse
import copy
import json
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import nn

import deat
from deat.data import ImageSet
from deat.game.round import Round
from deat.kernels import are_built
from deat.recipes import recipe
from deat.versions import versions
from gpu import clocked

SIDES = {
    "compile-bf16": {"engine": "compile", "precision": "bf16"},
    "eager-fp32": {"engine": "eager", "precision": "fp32"},
}
SEEDS = (0, 1, 2)
SECONDS = ("seconds", "seconds_per_bp_epoch", "warm_up_seconds")
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
    parser.add_argument("--crowded", action="store_true", help="others use this GPU too, so seconds mean nothing")
    parser.add_argument("--take", type=Path, nargs="*", default=[], help="files whose runs to bring in")
    args = parser.parse_args()
    if unknown := set(args.runs) - set(names):
        parser.error(f"no such run: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    result = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {"runs": {}}
    for file in args.take:
        taken = json.loads(file.read_text(encoding="utf-8"))
        result = {**taken, **result, "runs": result["runs"] | taken["runs"]}
    for name in args.runs or names:
        if name not in result["runs"]:
            side, _, seed = name.rpartition("-")
            result["machine"] = {"device": torch.cuda.get_device_name(), **versions()}
            found = measure(args.data, SIDES[side], int(seed), args.epochs)
            result["runs"][name] = found | (dict.fromkeys(SECONDS) if args.crowded else {})
            print(name, result["runs"][name], flush=True)
            write(result, args.out)
    write(result, args.out)


def write(result: Record, out: Path) -> None:
    """The JSON file, and the page beside it."""
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    out.with_suffix(".md").write_text(render(result), encoding="utf-8")


def measure(data: str, side: Record, seed: int, epochs: int | None) -> Record:
    """One run, by the clock, and its accuracies."""
    (row,) = recipe("cifar10-fast").table(["m+deat"], [], data)
    row = replace(row, settings={**row.settings, **side, **({"epochs": epochs} if epochs else {})})
    run = row.resolve(seed)
    trainer = run.trainer()
    seconds, first = [], not are_built()
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
        "warm_up_seconds": round(max(0.0, seconds[0] - spent[0] * pace), 1),
        "first": first,
        "ran": trainer.engine.name,
        "accuracy": {name: found.accuracy[name] for name in ATTACKS},
        "move": agreement(trainer.model, run.corpus.train) if side["engine"] == "compile" else None,
    }


def agreement(model: nn.Module, train: Any) -> Record:
    """How far one ascent and one joint move, compiled, are from the same moves made eagerly."""
    batch = ImageSet(train.images[:128], train.labels[:128], train.classes)
    one, other = (moved(copy.deepcopy(model), batch, engine) for engine in ("compile", "eager"))
    signs = float((one.delta.sign() != other.delta.sign()).float().mean())
    return {"loss": round(abs(float(one.loss) - float(other.loss)), 6), "signs": round(signs, 6)}


def moved(model: nn.Module, batch: ImageSet, engine: str) -> Round:
    """A batch after PGD-1's two moves."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    settings = deat.Settings(epochs=2, batch_size=128, lr=1e-6, rate="flat", device="cuda", engine=engine)
    trainer = deat.make_trainer(model, batch, method="pgd-1", settings=replace(settings, precision="bf16"))
    with trainer.session():
        trainer.run_epoch()
        return next(iter(trainer.game._rounds.values()))


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
        "| run | BP-epochs | seconds | s a BP-epoch | warm-up, s | natural | PGD-20 | loss apart | other signs |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, run in runs.items():
        scores = " | ".join(f"{100 * run['accuracy'][a]:.2f}" for a in ATTACKS)
        columns = (sum(run["bp_epochs"]), *clock(run))
        far = f"{run['move']['loss']:.5f} | {run['move']['signs']:.2%}" if run["move"] else " | "
        fell = f", fell back: {run['ran']}" * (run["ran"] not in name)
        lines.append(f"| {name}{fell} | " + " | ".join(map(str, columns)) + f" | {scores} | {far} |")
    return "\n".join([*lines, "", *compared(runs), ""])


def clock(run: Record) -> tuple[str, ...]:
    """Seconds after the warm-up, seconds a BP-epoch and the warm-up's; nothing of a run that was not alone."""
    if run["seconds"] is None:
        return "", "", ""
    paid = sum(run["seconds"]) - run["warm_up_seconds"]
    return (
        f"{paid:.1f}",
        f"{run['seconds_per_bp_epoch']:.3f}",
        f"{run['warm_up_seconds']:.1f}{', first' * run.get('first', False)}",
    )


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
