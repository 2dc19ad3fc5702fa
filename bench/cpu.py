"""Training speed on two CPU cores: plain PGD-7 and FREE-8 loops and deat's own, side by side in one run.

Speed: PreAct-ResNet-18 on 3x32x32 images, batch 64. In every round the plain loop (bench/plain.py) and deat's trainer
train on the same number of batches, one directly after the other. The first round is a warm-up and is not counted. The
result is the ratio of the two times of a round: its median and its range over the rounds. A round of deat is a whole
`Trainer.run_epoch`, with its records. A round in which other processes took 5 % of the cores from either side is
repeated; at most four times the requested number of rounds are run.

Compiled: deat's trainer eager, and compiled by torch's compiler (--engine compile), in the same way.

Accuracy: bench/cpu_accuracy.py.

Run it on an idle machine; it takes about an hour:

    python bench/cpu.py

It writes docs/results/cpu.json and docs/results/cpu.md. `--part speed`, `--part compiled` and `--part accuracy` replace
one part of them; only the last can share the machine with other work. `--quick` shows in two minutes that everything
works; its numbers mean nothing and are only printed, unless --out names a file.
"""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
import torch._dynamo
from clock import Lap, lap
from cpu_accuracy import measure_accuracy
from cpu_page import render
from cpu_sides import BATCH, CORES, NETWORK, deat_trainer, machine, plain_script
from plain import EPOCHS
from shared import Record, images, net_of, write_result

from deat.data import Augment

PAD = 4
GOALS = {"pgd-7": 2.5, "free-8": 1.7}
QUIET = 0.05
ATTEMPTS = 4
OUT = Path(__file__).resolve().parents[1] / "docs" / "results" / "cpu.json"
Pair = tuple[Lap, Lap]


def main() -> None:
    """Measure, print, and write the result."""
    args = arguments()
    torch.set_num_threads(CORES)
    out = args.out or (None if args.quick else OUT)
    result = json.loads(out.read_text(encoding="utf-8")) if out and out.exists() else {}
    for part, measure in (("speed", measure_speed), ("compiled", measure_compiled)):
        if args.part in ("all", part):
            use_two_cores()
            attempts = 1 if args.quick else ATTEMPTS
            methods = [measure(name, args.rounds, args.batches, attempts) for name in GOALS]
            result[part] = machine() | {"command": command(args, part), "methods": methods}
    if args.part in ("all", "accuracy"):
        methods = [measure_accuracy(name, args.seeds, args.quick, args.jobs, args.trials) for name in GOALS]
        result["accuracy"] = machine() | {"command": command(args, "accuracy"), "methods": methods}
    publish(result, out)


def publish(result: Record, out: Path | None) -> None:
    """Write the result where it belongs, and print it."""
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_result(result, out, render)
    print(render(result))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Plain loops and deat, side by side on two CPU cores.")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds, after one that warms up")
    parser.add_argument("--batches", type=int, default=2, help="batches of 64 in a round")
    parser.add_argument(
        "--part", choices=("all", "speed", "compiled", "accuracy"), default="all", help="what to measure"
    )
    parser.add_argument("--seeds", type=int, default=6, help="training runs of each kind in the accuracy part")
    parser.add_argument(
        "--jobs", type=int, default=1, help="training runs of the accuracy part at once, of two threads"
    )
    parser.add_argument("--trials", type=Path, help="the accuracy part's trials, a JSON line each: read, and added to")
    parser.add_argument("--out", type=Path, help="the JSON file to write; a table goes beside it as .md")
    parser.add_argument("--quick", action="store_true", help="one round, one batch, one short training run")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.batches, args.seeds = 1, 1, 1
    if min(args.rounds, args.batches, args.seeds, args.jobs) < 1:
        parser.error("--rounds, --batches, --seeds and --jobs must be at least 1")
    return args


def command(args: argparse.Namespace, part: str) -> str:
    """The command that repeats this part."""
    trials = f" --trials {args.trials}" if args.trials else ""
    size = f"--seeds {args.seeds}{trials}" if part == "accuracy" else f"--rounds {args.rounds} --batches {args.batches}"
    return f"python bench/cpu.py --part {part} {'--quick' if args.quick else size}"


def use_two_cores() -> None:
    """Stay on two cores."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])


def measure_speed(name: str, rounds: int, batches: int, attempts: int) -> Record:
    """The plain loop and deat's trainer, in turns."""
    data, most = images(32, batches * BATCH), attempts * rounds + 1
    script = plain_script(net_of(NETWORK), data, name, lr=0.01, epochs=most, pad=PAD, workers=2)
    trainer = deat_trainer(net_of(NETWORK), data, name, lr=0.01, epochs=most, augment=Augment(PAD))
    laps = in_turns(name, {"plain": lambda: EPOCHS[name](script), "deat": trainer.run_epoch}, rounds, most)
    counts = {"plain": script.backprops // len(laps), "deat": trainer.game.cost.backprops // len(laps)}
    about = {"method": name, "goal": GOALS[name], "precision": trainer.engine.precision, "batches_per_round": batches}
    return about | told(laps, counts)


def measure_compiled(name: str, rounds: int, batches: int, attempts: int) -> Record:
    """deat's trainer eager and compiled, in turns; a compiled first round holds what compiling takes."""
    data, most = images(32, batches * BATCH), attempts * rounds + 1
    sides = {
        engine: deat_trainer(net_of(NETWORK), data, name, lr=0.01, epochs=most, augment=Augment(PAD), engine=engine)
        for engine in ("eager", "compile")
    }
    torch._dynamo.reset()
    # An empty folder: what an earlier process built would not be waited for.
    with TemporaryDirectory() as cache, patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=cache):
        laps = in_turns(name, {engine: side.run_epoch for engine, side in sides.items()}, rounds, most)
    counts = {engine: side.game.cost.backprops // len(laps) for engine, side in sides.items()}
    found = told(laps, counts)
    first = laps[0][1].seconds - found["compile"]["median"]
    about = {"method": name, "ran": sides["compile"].engine.name, "batches_per_round": batches}
    return about | {"warm_up_seconds": round(first, 1)} | found


def in_turns(name: str, sides: dict[str, Callable[[], object]], rounds: int, most: int) -> list[Pair]:
    """Alternate rounds of two sides, the first one to warm up, until enough of them were undisturbed."""
    laps: list[Pair] = []
    while len(laps) < most and len(undisturbed(laps[1:])) < rounds:
        one, other = (lap(play) for play in sides.values())
        laps.append((one, other))
        show = ", ".join(f"{who} {side.seconds:.2f} s" for who, side in zip(sides, laps[-1], strict=True))
        print(f"{name} round {len(laps) - 1}: {show}; others took {disturbance(laps[-1]):.1%}", flush=True)
    return laps


def told(laps: list[Pair], counts: dict[str, int]) -> Record:
    """What the rounds of two sides say, with the backprops of one."""
    kept = undisturbed(laps[1:]) or laps[1:]
    sides = {who: summary([pair[i] for pair in kept], count) for i, (who, count) in enumerate(counts.items())}
    return {
        "rounds": {"played": len(laps) - 1, "undisturbed": len(undisturbed(laps[1:]))},
        "others": [round(disturbance(pair), 3) for pair in kept],
        **sides,
        "ratio": spread([one.seconds / other.seconds for one, other in kept]),
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


if __name__ == "__main__":
    main()
