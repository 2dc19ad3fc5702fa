"""Training speed on a GPU: a plain loop, deat eager, recorded and compiled, by method, network and batch size.

Every cell trains a fresh network on random images for a few batches with a fixed number of attack steps: its first
pass is the warm-up, whose seconds are reported apart; then whole passes are timed, data and augmentation included.
`plain` is the loop of paper repositories: torch's default precision (float32 whose convolutions may use TF32), a
DataLoader with workers, a full backward in every attack step.
Cells that are in the file already are kept, so that the command may be given again:

    python bench/gpu.py --out docs/results/speed.json
    python bench/gpu.py --out docs/results/speed.json preact_resnet18/pgd-7/128/compile

It writes the JSON file and a table beside it. TFLOP/s count multiplications and additions of convolutions and matrix
products; the share is of what this device reached on a large bf16 matrix product in the same call.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from gpu_page import render
from plain import EPOCHS, Images, Script
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import deat
from deat.data import Augment, ImageSet
from deat.versions import versions

STEPS = {"pgd-7": 7, "m+deat": 2, "trades": 10, "m+mart": 2, "fat-5": 5, "yopo-5-3": 4}
"""The k that a cell plays with; for methods whose k changes, one they spend most of a run at."""
SIDES = {"preact_resnet18": 32, "wide_resnet34_10": 32, "densenet121_12": 32, "resnet50": 224}
PLAIN = {"pgd-7": ("pgd-7", 8), "m+deat": ("free-8", 8)}
"""The plain loop that makes the same moves, and its backprops a batch."""
OTHERS = ("wide_resnet34_10", "densenet121_12", "resnet50")
MANY, FEW = 20, 6
"""Batches of a timed pass: of PreAct-ResNet 18, and of the larger networks."""
ENGINES = ("eager", "graph", "compile")
Record = dict[str, Any]


def all_cells() -> list[str]:
    """network/method/batch/engine, cheapest information first."""
    table = [f"preact_resnet18/{m}/128/{e}" for m in STEPS for e in (*(("plain",) if m in PLAIN else ()), *ENGINES)]
    sizes = [f"preact_resnet18/pgd-7/{b}/{e}" for b in (64, 256, 512, 1024) for e in ("graph", "compile")]
    others = [f"{n}/{m}/128/{e}" for n in OTHERS for m in PLAIN for e in ("plain", "eager", "compile")]
    return [*table, *sizes, *others]


def main() -> None:
    """Measure the cells that are missing."""
    parser = argparse.ArgumentParser(description="Training speed on a GPU, cell by cell.")
    parser.add_argument("cells", nargs="*", metavar="CELL", help="network/method/batch/engine; all by default")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write or to add to")
    args = parser.parse_args()
    if unknown := set(args.cells) - set(all_cells()):
        parser.error(f"no such cell: {', '.join(sorted(unknown))}")
    result = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {"cells": {}}
    result["machine"] = {"device": torch.cuda.get_device_name(), **versions(), "peak_tflops": round(peak(), 1)}
    for name in args.cells or all_cells():
        if name not in result["cells"]:
            result["cells"][name] = measure(name)
            print(name, result["cells"][name], flush=True)
            args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            args.out.with_suffix(".md").write_text(render(result), encoding="utf-8")


def measure(name: str) -> Record:
    """One cell; one that fails says why."""
    network, method, size, engine = name.split("/")
    batches = FEW if network in OTHERS else MANY
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch._dynamo.reset()
    data = images(SIDES[network], int(size) * batches)
    try:
        side = plain_side if engine == "plain" else deat_side
        return side(network, method, int(size), engine, data)
    except (RuntimeError, deat.errors.DeatError) as error:
        return {"failed": str(error).split("\n")[0][:200]}


def deat_side(network: str, method: str, size: int, engine: str, data: ImageSet) -> Record:
    """deat's trainer, playing passes of a fixed budget."""
    settings = deat.Settings(epochs=10, batch_size=size, lr=0.01, rate="flat", device="cuda", engine=engine)
    pad = Augment(4) if data.shape[-1] == 32 else None
    trainer = deat.make_trainer(net_of(network), data, method=method, settings=settings, augment=pad)
    budget = replace(trainer.schedule.budget(trainer.state, 0), k=STEPS[method], alpha=2 / 255)

    def play() -> None:
        trainer.step = 0
        trainer.play_epoch(budget)

    with trainer.session():
        warm = clocked(play)
        seconds = min(clocked(play) for _ in range(3))
    backprops = trainer.method.play.backprops(budget)
    joint, ascend = (backprops, 0) if not trainer.method.play.crafts else (1, backprops - 1)
    branches = int(getattr(trainer.method.objective, "branches", 1))
    flops = size * forward_flops(network) * (3 * joint * branches + 2 * ascend)
    return summary(seconds, warm, len(data) // size, backprops, size, flops) | {"ran": trainer.engine.name}


def plain_side(network: str, method: str, size: int, engine: str, data: ImageSet) -> Record:
    """The loop of paper repositories, in torch's own precision."""
    name, backprops = PLAIN[method]
    net = net_of(network).cuda()
    loader = Images(data.images, data.labels, pad=4 if data.shape[-1] == 32 else 0)
    script = Script(net, loader, size, 10, 0.01, 8 / 255, 2 / 255, workers=8, device="cuda")
    warm = clocked(lambda: EPOCHS[name](script))
    seconds = min(clocked(lambda: EPOCHS[name](script)) for _ in range(2))
    flops = size * forward_flops(network) * 3 * backprops
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


def clocked(work: Any) -> float:
    """Seconds until the device has done a piece of work."""
    torch.cuda.synchronize()
    started = perf_counter()
    work()
    torch.cuda.synchronize()
    return perf_counter() - started


def net_of(network: str) -> nn.Module:
    """A fresh network, normalisation included."""
    torch.manual_seed(0)
    return deat.build_model(network, normalize=((0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)))


def forward_flops(network: str) -> int:
    """Multiplications and additions of one image's forward."""
    side = SIDES[network]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net_of(network).eval()(torch.zeros(1, 3, side, side))
    return counter.get_total_flops()


def images(side: int, count: int) -> ImageSet:
    """Noise: how long a step takes does not depend on what is on the images."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=generator)
    return ImageSet(pixels, torch.randint(0, 10, (count,), generator=generator), tuple("0123456789"))


def peak() -> float:
    """TFLOP/s of a large bf16 matrix product."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    clocked(lambda: [a @ a for _ in range(5)])
    return 20 * 2 * 8192**3 / clocked(lambda: [a @ a for _ in range(20)]) / 1e12


if __name__ == "__main__":
    main()
