"""Training speed on a GPU: a plain loop, and deat eager, recorded and compiled, by method, network and batch size.

Every cell trains a new network on random images for a few batches, with a fixed number of attack steps. Its first pass
is the warm-up, whose seconds are reported separately. Then whole passes are timed, with data and augmentation. `plain`
is a loop as paper repositories have it: torch's default precision (float32, in which convolutions may use TF32), a
DataLoader with workers, and attack steps that compute more than they need. It makes as many backprops per batch as the
others. The engines of one network, method and batch size are measured in one call. Cells that are in the file are not
repeated unless they failed, so the command can be given again:

    python bench/gpu.py --out docs/results/speed.json
    python bench/gpu.py --out docs/results/speed.json preact_resnet18/pgd-7/128

It writes the JSON file and a table beside it. TFLOP/s count multiplications and additions of convolutions and matrix
products: three forward passes' worth for a joint backprop and two for an ascend. The share of peak is relative to this
device's speed on a large bf16 matrix product in the same call. Memory is the largest amount in use at once, warm-up
included. "First" marks a compiled cell that had to build our kernels. Each call records the version of deat.
"""

import argparse
import gc
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from gpu_page import render
from gpu_source import made_by
from plain import Images, Script, fat_epoch, free_epoch, mart_epoch, pgd_epoch, trades_epoch, yopo_epoch
from shared import Record, clocked, fixed_budget, gpu_machine, images, net_of, trainer_of, write_result
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import deat
from deat.data import ImageSet
from deat.engine.kernels import has_cached_kernels

STEPS = {"pgd-7": 7, "m+deat": 2, "trades": 10, "m+mart": 2, "fat-5": 5, "yopo-5-3": 4}
"""The k that a cell plays with; for methods whose k changes, one they spend most of a run at."""
SIDES = {"preact_resnet18": 32, "wide_resnet34_10": 32, "densenet121_12": 32, "resnet50": 224}
FIRST = ("normalize", "net.conv1")
"""What a network does to images up to its first layer's output."""
PLAIN: dict[str, tuple[Callable[[Script], None], int]] = {
    "pgd-7": (pgd_epoch, 3 * 8),
    "m+deat": (partial(free_epoch, replays=3), 3 * 3),
    "trades": (trades_epoch, 3 * 10 + 3 * 3),
    "m+mart": (partial(mart_epoch, steps=2), 2 * 2 + 3 * 2),
    "fat-5": (fat_epoch, 3 * 6),
    "yopo-5-3": (partial(yopo_epoch, first=lambda net: nn.Sequential(*(net.get_submodule(n) for n in FIRST))), 3 * 5),
}
"""The plain loop that makes the same moves, and a batch's work in forwards."""
OTHERS = ("wide_resnet34_10", "densenet121_12", "resnet50")
MANY, FEW = 40, 6
"""Batches of a timed pass: of PreAct-ResNet 18, and of the larger networks."""
ENGINES = ("eager", "graph", "compile")
DEVICE, WORKERS = "cuda", 8


def all_groups() -> dict[str, tuple[str, ...]]:
    """network/method/batch, cheapest information first, and the engines that stand side by side there."""
    table: dict[str, tuple[str, ...]] = {f"preact_resnet18/{m}/128": ("plain", *ENGINES) for m in STEPS}
    table |= {f"preact_resnet18/pgd-7/{size}": ("graph", "compile") for size in (64, 256, 512, 1024)}
    return table | {f"{net}/{m}/128": ("plain", "eager", "compile") for net in OTHERS for m in ("pgd-7", "m+deat")}


def main() -> None:
    """Measure the groups that are missing."""
    parser = argparse.ArgumentParser(description="Training speed on a GPU, cell by cell.")
    parser.add_argument("groups", nargs="*", metavar="GROUP", help="network/method/batch; all by default")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write or to add to")
    args = parser.parse_args()
    if unknown := set(args.groups) - set(all_groups()):
        parser.error(f"no such group: {', '.join(sorted(unknown))}; there are {', '.join(all_groups())}")
    result = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {"cells": {}}
    missing = [group for group in args.groups or all_groups() if not is_measured(group, result["cells"])]
    if not missing:
        sys.exit(f"{args.out} has all of it; remove it to measure anew")
    machine = {**gpu_machine(), "peak_tflops": peak()}
    if (made := without_peak(result.get("machine", machine))) != without_peak(machine):
        parser.error(f"{args.out} was made by {made}, not {without_peak(machine)}; write to another file")
    result["machine"] = machine
    call = {"peak_tflops": machine["peak_tflops"], "made": made_by()}
    for group in missing:
        for name in cells_of(group):
            result["cells"][name] = measure(name) | call
            print(name, result["cells"][name], flush=True)
        result["cells"] = in_order(result["cells"])
        write_result(result, args.out, render)


def cells_of(group: str) -> list[str]:
    """network/method/batch/engine."""
    return [f"{group}/{engine}" for engine in all_groups()[group]]


def in_order(cells: dict[str, Record]) -> dict[str, Record]:
    """Cells side by side as they were measured, whenever that was."""
    return {name: cells[name] for group in all_groups() for name in cells_of(group) if name in cells}


def is_measured(group: str, cells: dict[str, Record]) -> bool:
    """Whether every cell is there, and none failed."""
    return all(name in cells and "failed" not in cells[name] for name in cells_of(group))


def without_peak(machine: Record) -> Record:
    """What must be the same for cells of two calls to stand in one table."""
    return {name: value for name, value in machine.items() if name != "peak_tflops"}


def measure(name: str) -> Record:
    """One cell; one that fails says why."""
    network, method, size, engine = name.split("/")
    batches = FEW if network in OTHERS else MANY
    torch._dynamo.reset()
    gc.collect()  # else the memory of cells before would count
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    data = images(SIDES[network], int(size) * batches)
    try:
        side = plain_side if engine == "plain" else deat_side
        return side(network, method, int(size), engine, data)
    except (RuntimeError, deat.errors.DeatError) as error:
        torch.cuda.synchronize()  # ends the command where the device itself is lost
        return {"failed": str(error).split("\n")[0][:200]}


def deat_side(network: str, method: str, size: int, engine: str, data: ImageSet) -> Record:
    """deat's trainer, playing passes of a fixed budget."""
    trainer = trainer_of(net_of(network), data, method, size, engine, DEVICE)
    budget = fixed_budget(trainer, STEPS[method])
    first = engine == "compile" and not has_cached_kernels()

    def play() -> None:
        trainer.batches_done = 0
        trainer.train_epoch(budget)

    with trainer.session():
        warm = clocked(play)
        seconds = min(clocked(play) for _ in range(3))
    backprops = trainer.method.play.backprops(budget)
    flops = size * forward_flops(network) * forwards_worth(trainer.method, backprops)
    found = summary(seconds, warm, len(data) // size, backprops, size, flops)
    return found | {"ran": trainer.engine.name, "first": first}


def forwards_worth(method: deat.Method, backprops: int) -> int:
    """A batch's work in forwards: a joint backprop is three of each of its branches, an ascend two, a reference one."""
    joint, ascend = (1, backprops - 1) if method.play.crafts_first else (backprops, 0)
    return 3 * joint * method.objective.num_forwards + 2 * ascend + method.attack.needs_reference


def plain_side(network: str, method: str, size: int, engine: str, data: ImageSet) -> Record:
    """The loop of paper repositories, in torch's own precision."""
    backprops, (epoch, worth) = STEPS[method] + 1, PLAIN[method]
    net = net_of(network).to(DEVICE)
    loader = Images(data.images, data.labels, pad=4)
    script = Script(net, loader, size, 10, 0.01, 8 / 255, 2 / 255, workers=WORKERS, device=DEVICE)
    warm = clocked(lambda: epoch(script))
    seconds = min(clocked(lambda: epoch(script)) for _ in range(3))
    flops = size * forward_flops(network) * worth
    return summary(seconds, warm, len(data) // size, backprops, size, flops)


def summary(seconds: float, warm: float, batches: int, backprops: int, size: int, flops: float) -> Record:
    """What a cell says."""
    return {
        "ms_per_backprop": round(1000 * seconds / (batches * backprops), 3),
        "images_per_second": round(batches * size / seconds),
        "tflops": round(batches * flops / seconds / 1e12, 1),
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "warm_up_seconds": round(max(0.0, warm - seconds), 1),
        "backprops_per_batch": backprops,
    }


def forward_flops(network: str) -> int:
    """Multiplications and additions of one image's forward."""
    side = SIDES[network]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net_of(network).eval()(torch.zeros(1, 3, side, side))
    return int(counter.get_total_flops())


def peak() -> float:
    """TFLOP/s of a large bf16 matrix product."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    clocked(lambda: [a @ a for _ in range(5)])
    return round(20 * 2 * 8192**3 / clocked(lambda: [a @ a for _ in range(20)]) / 1e12, 1)


if __name__ == "__main__":
    main()
