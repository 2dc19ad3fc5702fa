"""The whole FAST run of M+DEAT with several engines and precisions: seconds and accuracy.

The recipe cifar10-fast on PreAct-ResNet 18, 11 epochs, with data and augmentation. Runs: compiled in bf16 and eager in
float32, several seeds each; recorded in bf16; as `auto` chooses; and compiled with larger batches, whose learning rate
grows in proportion. A BP-epoch is one backprop for every batch of an epoch.

An engine's first epoch contains its warm-up. The warm-up is the time of this epoch beyond that of its backprops at the
speed of the engine's other epochs. "First" marks a run that had to build our kernels, because no earlier process had
built them. The total is the time of all epochs with every warm-up. Natural and PGD-20 accuracy are on all test images.

Then compiled and eager moves in bf16 are compared. A network of the first side makes one ascend move (for YOPO one full
pass) and one joint move of several methods on the same 128 images. Reported are the difference of the losses, and the
share of delta's signs that differ between the two and from eager float32. The page has the largest values, with TRADES
apart; the JSON file has all. Runs that are in the file are not repeated, so the command can be given again:

    python bench/gpu_fast.py --data folder:cifar10-jpeg.tar.xz --out docs/results/fast.json
    python bench/gpu_fast.py --data folder:cifar10-jpeg.tar.xz --out docs/results/fast.json compile-bf16-0

Runs that share a GPU get --crowded and a file of their own: they give accuracy and no seconds. --take adds them to the
result. The command writes the JSON file and a table beside it.
"""

import argparse
import copy
import json
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from gpu_source import describe_source, made_by
from shared import Record, clocked, command_block, gpu_machine, paragraph, write_result
from torch import nn

import deat
from deat.core.batch_buffers import Buffers
from deat.data import ImageSet
from deat.engine.kernels import has_cached_kernels
from deat.recipes import get_recipe
from deat.training.epoch_records import EpochTiming
from gpu import DEVICE

SIDES: dict[str, dict[str, Any]] = {
    "compile-bf16": {"engine": "compile", "precision": "bf16"},
    "eager-fp32": {"engine": "eager", "precision": "fp32"},
    "graph-bf16": {"engine": "graph", "precision": "bf16"},
    "auto-bf16": {"engine": "auto", "precision": "bf16"},
    "compile-bf16-batch256": {"engine": "compile", "precision": "bf16", "batch_size": 256, "lr": 0.2},
    "compile-bf16-batch512": {"engine": "compile", "precision": "bf16", "batch_size": 512, "lr": 0.4},
}
COMPARED, SEEDS = ("compile-bf16", "eager-fp32"), (0, 1, 2)
"""The sides whose accuracy is compared, and their seeds."""
OTHERS = {"auto-bf16": 2}
"""How many seeds other sides have, where more than one: what auto chooses depends on kernels built before."""
MOVED = ("pgd-1", "mart-1", "fat-1", "yopo-2-2")
"""Methods whose moves are compared: what they ascend, in which mode and through how much of the network differs."""
NEAR = "trades-1"
"""Its gradient is a difference of two close outputs, which rounding to half precision changes: compared with float32."""
SECONDS = ("seconds", "seconds_per_bp_epoch", "warm_up_seconds")
ATTACKS = ("natural", "pgd-20")


def main() -> None:
    """Train and judge what is missing."""
    names = [f"{side}-{seed}" for side in SIDES for seed in seeds(side)]
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
            result["machine"] = gpu_machine()
            found = measure(args.data, SIDES[side], int(seed), args.epochs)
            result["runs"][name] = found | (dict.fromkeys(SECONDS) if args.crowded else {})
            print(name, result["runs"][name], flush=True)
            write_result(result, args.out, render)
    write_result(result, args.out, render)


def seeds(side: str) -> tuple[int, ...]:
    """The seeds of a side."""
    return SEEDS if side in COMPARED else SEEDS[: OTHERS.get(side, 1)]


def measure(data: str, side: Record, seed: int, epochs: int | None) -> Record:
    """One run, by the clock, and its accuracies."""
    (row,) = get_recipe("cifar10-fast").make_rows(["m+deat"], [], data)
    row = replace(row, settings={**row.settings, **side, **({"epochs": epochs} if epochs else {})})
    run = row.resolve(seed)
    trainer = run.trainer()
    seconds, first = [], side["engine"] in ("compile", "auto") and not has_cached_kernels()
    trainer.callbacks.append(noted := Noted())
    with trainer.session():
        for _ in range(run.config.epochs):
            seconds.append(clocked(trainer.run_epoch))
    spent = [stats.k + 1 for stats in trainer.history]
    pace, warm_up = paced(seconds, spent, noted.engines)
    test: Any = run.splits.test
    found = deat.evaluate(trainer.model, test, threat=run.threat, attacks=list(ATTACKS), sanity=False, block=2500)
    return {
        "seconds": [round(s, 3) for s in seconds],
        "bp_epochs": spent,
        "seconds_per_bp_epoch": round(pace, 4),
        "warm_up_seconds": round(warm_up, 1),
        "first": first,
        "ran": noted.engines[-1],
        "engines": noted.engines,
        "made": made_by(),
        "accuracy": {name: found.accuracy[name] for name in ATTACKS},
        "move": agreement(trainer.model, run.splits.train) if side == SIDES[COMPARED[0]] else None,
    }


class Noted:
    """Notes what every epoch ran by; a callback of the trainer."""

    def __init__(self) -> None:
        self.engines = list[str]()

    def on_epoch(self, trainer: deat.Trainer, stats: deat.EpochStats, timing: EpochTiming) -> None:
        """An epoch has ended, and a pace has decided about the next one."""
        self.engines.append(timing.engine)


def paced(seconds: list[float], spent: list[int], engines: list[str]) -> tuple[float, float]:
    """Seconds a BP-epoch of the engine that a run ended with, and what all engines' first epochs took beyond theirs."""
    begins = [i for i, engine in enumerate(engines) if i == 0 or engine != engines[i - 1]]
    spans = [range(i, j) for i, j in zip(begins, [*begins[1:], len(engines)], strict=True)]
    last = _pace(seconds, spent, spans[-1])
    paces = [_pace(seconds, spent, span) if len(span) > 1 else last for span in spans]
    beyond = [max(0.0, seconds[span[0]] - spent[span[0]] * pace) for span, pace in zip(spans, paces, strict=True)]
    return last, sum(beyond)


def _pace(seconds: list[float], spent: list[int], span: range) -> float:
    """Of an engine's epochs but its first, if there are others."""
    counted = span[1:] or span
    return sum(seconds[i] for i in counted) / sum(spent[i] for i in counted)


def agreement(model: nn.Module, train: Any) -> Record | None:
    """How far moves that are compiled are from the same ones made eagerly, for each method."""
    batch = ImageSet(train.images[:128], train.labels[:128], train.classes)
    each = {method: apart(model, batch, method) for method in (*MOVED, NEAR)}
    return {"each": each} if any(each.values()) else None


def apart(model: nn.Module, batch: ImageSet, method: str) -> Record | None:
    """Of one method: losses, signs of delta, and steps of it that went elsewhere; None where compiling fell back."""
    sides = ("compile", "bf16"), ("eager", "bf16"), ("eager", "fp32")
    one, other, exact = (moved(copy.deepcopy(model), batch, method, *how) for how in sides)
    if one is None or other is None or exact is None:
        return None
    # A step that is shorter than a pixel's random start cannot turn delta's sign, but it ends elsewhere.
    steps = float(((one.delta - other.delta).abs() > 1e-3).float().mean())
    loss = abs(float(one.loss) - float(other.loss))
    far = {"signs": signs(one, other), "compile_from_fp32": signs(one, exact), "eager_from_fp32": signs(other, exact)}
    return {"loss": round(loss, 6), "steps": round(steps, 6), **far}


def signs(one: Buffers, other: Buffers) -> float:
    """The share of delta's signs that differ."""
    return round(float((one.delta.sign() != other.delta.sign()).float().mean()), 6)


def moved(model: nn.Module, batch: ImageSet, method: str, engine: str, precision: str) -> Buffers | None:
    """A batch after a method's moves, if they ran as they were to."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    settings = deat.TrainConfig(
        epochs=2, batch_size=len(batch), lr=1e-6, lr_schedule="flat", device=DEVICE, engine=engine
    )
    trainer = deat.make_trainer(model, batch, method=method, config=replace(settings, precision=precision))
    with trainer.session():
        trainer.run_epoch()
        return next(iter(trainer.game._buffers_by_shape.values())) if trainer.engine.name == engine else None


def render(result: Record) -> str:
    """The result as a page of Markdown."""
    machine, runs = result["machine"], result["runs"]
    lines = [
        "# The whole FAST run of M+DEAT",
        "",
        *command_block("python bench/gpu_fast.py --data folder:cifar10-jpeg.tar.xz --out docs/results/fast.json"),
        "",
        *paragraph(
            f"Machine: {machine['device']}, torch {machine['torch']}. The docstring of `bench/gpu_fast.py` describes "
            'the measurement. Accuracies are in %, on all test images. A name ends with the seed. "First" marks a '
            "warm-up in which our kernels had to be built. The last two columns compare compiled with eager moves."
        ),
        "",
        "| run | BP-epochs | seconds | s per BP-epoch | warm-up, s | total, s | natural | PGD-20 | loss difference "
        "| signs that differ |",
        "|---" * 10 + "|",
    ]
    for name, run in runs.items():
        scores = " | ".join(f"{100 * run['accuracy'][a]:.2f}" for a in ATTACKS)
        columns = (sum(run["bp_epochs"]), *clock(run))
        far = "{loss:.5f} | {signs:.2%}".format(**worst(run["move"])) if run["move"] else " | "
        lines.append(f"| {name}{ended(name, run['ran'])} | " + " | ".join(map(str, columns)) + f" | {scores} | {far} |")
    return "\n".join([*lines, "", *compared(runs), "", *nearest(runs), *makers(runs), ""])


def worst(move: Record) -> Record:
    """The largest difference of any method; files from before there were several have one."""
    known = [found for method in MOVED if (found := move.get("each", {}).get(method))] or [move]
    return {name: max(found[name] for found in known) for name in ("loss", "signs")}


def nearest(runs: dict[str, Record]) -> list[str]:
    """Return what the table leaves out; older files have no comparison with float32."""
    known = [found for run in runs.values() if (found := (run["move"] or {}).get("each", {}).get(NEAR))]
    beside = [found for found in known if "eager_from_fp32" in found]
    return [*alone([found for found in known if found not in beside]), *beside_float32(beside)]


def alone(known: list[Record]) -> list[str]:
    """Return the text on runs whose first gradient was taken at the start itself."""
    if not known:
        return []
    text = (
        f"The last two columns leave out {NEAR}. It starts within 0.001 of the clean image, where rounding to bf16 can be larger "
        f"than the effect of its gradient: {shares(known, 'signs')} of its signs differ."
    )
    return [*paragraph(text), ""]


def beside_float32(known: list[Record]) -> list[str]:
    """Return the text on runs with a comparison of compiled and eager moves with eager float32."""
    if not known:
        return []
    exact = [shares(known, f"{engine}_from_fp32") for engine in ("compile", "eager")]
    text = (
        f"The last two columns leave out {NEAR}. Its gradient is a difference of two close outputs, which rounding to bf16 "
        f"changes: {shares(known, 'signs')} of its signs differ. From eager fp32, {exact[0]} differ with compiled moves "
        f"and {exact[1]} with eager moves."
    )
    return [*paragraph(text), ""]


def shares(known: list[Record], name: str) -> str:
    """Return a number of each run, in percent."""
    return ", ".join(f"{move[name]:.2%}" for move in known)


def ended(name: str, ran: str) -> str:
    """Return the engine that a run ended with, if its name does not say so."""
    return f", ended with {ran}" if name.startswith("auto") else f", fell back: {ran}" * (ran not in name)


def makers(runs: dict[str, Record]) -> list[str]:
    """Return the table of the versions of deat that made the runs."""
    by_version: dict[str, list[str]] = {}
    for name, run in runs.items():
        by_version.setdefault(describe_source(run.get("made")), []).append(name)
    rows = [f"| {version} | {', '.join(names)} |" for version, names in by_version.items()]
    return ["| version of deat | runs |", "|---|---|", *rows]


def clock(run: Record) -> tuple[str, ...]:
    """Return seconds without warm-up, per BP-epoch, of the warm-up and in total; empty for a run that shared its GPU."""
    if run["seconds"] is None:
        return "", "", "", ""
    paid = sum(run["seconds"]) - run["warm_up_seconds"]
    return (
        f"{paid:.1f}",
        f"{run['seconds_per_bp_epoch']:.3f}",
        f"{run['warm_up_seconds']:.1f}{', first' * run.get('first', False)}",
        f"{sum(run['seconds']):.1f}",
    )


def compared(runs: dict[str, Record]) -> list[str]:
    """Return the difference of the sides' means; empty until both have the same seeds."""
    sides = {side: [runs[f"{side}-{seed}"] for seed in SEEDS if f"{side}-{seed}" in runs] for side in COMPARED}
    if len({len(runs_of_side) for runs_of_side in sides.values()}) > 1 or len(next(iter(sides.values()))) < 2:
        return []
    texts = []
    for attack in ATTACKS:
        pairs = zip(*sides.values(), strict=True)
        gains = [100 * (quick["accuracy"][attack] - plain["accuracy"][attack]) for quick, plain in pairs]
        texts.append(f"{attack} {mean(gains):+.2f} +- {stdev(gains) / len(gains) ** 0.5:.2f}")
    return paragraph(
        "Accuracy of compiled bf16 minus that of eager fp32, in points, as mean over seeds +- standard error: "
        f"{', '.join(texts)}."
    )


if __name__ == "__main__":
    main()
