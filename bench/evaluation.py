"""Evaluation speed on a GPU: a plain script, the AutoAttack library as it is, and deat, on one robust network.

PreAct-ResNet-18 and CIFAR-10's 10,000 test images. `plain` does what paper repositories do: batches of 200, every image
in every step, a full backward pass, in torch's default precision (float32, in which convolutions, but not matrix
products, may use TF32). The other rows are deat.evaluate with a precision, recorded or compiled, with all images in one
block or in blocks of 2,500 or 500; `default` has the command's default options. `fp32` is float32 without TF32, and the
reference for accuracies and verdicts. Verdicts are compared only if the block size, and so the starts, are the same.
AutoAttack: the library as it is on every tenth image, and deat on the same images and on all. Before a cell is timed,
PGD-20 on its images loads and builds what a process needs once; the page reports the time of this run. Cells that are in
the file are not repeated, so the command can be given again, with other cells:

    deat train --data folder:cifar10-jpeg.tar.xz --epochs 11 --gamma 1.0 --alpha 10/255 --lr 0.1 --held-out 0 \\
        --val-attack none --out RUN
    python bench/evaluation.py --data folder:cifar10-jpeg.tar.xz --weights RUN/last/model.safetensors \\
        --out docs/results/evaluation.json

It writes the JSON file and a table beside it.
"""

import argparse
import gc
import json
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from evaluation_page import ATTACKS, DEAT, render
from plain import attack_images
from shared import Record, clocked, gpu_machine, write_result
from torch import Tensor, nn

import deat
from deat.models import load_weights
from deat.models.weights import read_weights

THREAT = deat.Linf(8 / 255)
TENTH = 10
"""Every tenth image, since a data set may be sorted by class."""
FIRST = ["pgd-20"]
"""What goes before a measured run: it loads and builds whatever a process needs once."""
Cell = Callable[[nn.Module, Tensor, Tensor], Record]


def main() -> None:
    """Measure the cells that are missing."""
    args = arguments()
    model, x, y = load(args.data, args.weights)
    result = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    result["machine"] = gpu_machine()
    cells = result.setdefault("cells", {})
    for name in args.cells or CELLS:
        if name not in cells:
            free()
            cells[name] = CELLS[name](model, x, y)
            print(name, {key: value for key, value in cells[name].items() if key != "verdicts"}, flush=True)
            write_result(result, args.out, render, indent=None)


def free() -> None:
    """Give back what the cell before held: recordings lie in cycles, and their memory with them."""
    gc.collect()
    torch.cuda.empty_cache()


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="A plain script, the AutoAttack library and deat, on one network.")
    parser.add_argument("cells", nargs="*", metavar="CELL", help=f"what to measure; all of {', '.join(CELLS)}")
    parser.add_argument("--data", required=True, help="CIFAR-10, as deat train takes it")
    parser.add_argument("--weights", type=Path, required=True, help="a robust PreAct-ResNet-18")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write or to add to")
    args = parser.parse_args()
    if unknown := set(args.cells) - set(CELLS):
        parser.error(f"no such cell: {', '.join(unknown)}; there are {', '.join(CELLS)}")
    return args


def load(data: str, weights: Path) -> tuple[nn.Module, Tensor, Tensor]:
    """The network and the test images, on the device."""
    corpus = deat.load_data(data)
    model = deat.add_normalization(deat.build_model("preact_resnet18"), **read_weights(weights).normalization)
    load_weights(model, weights)
    images: Any = corpus.test
    return model.cuda().eval(), images.images.cuda().float() / 255, images.labels.cuda()


def timed(work: Callable[[], Record]) -> Record:
    """A cell's result with the seconds that it took."""
    found: Record = {}
    seconds = clocked(lambda: found.update(work()))
    return {"seconds": round(seconds, 2), **found}


def plain(model: nn.Module, x: Tensor, y: Tensor) -> Record:
    """A plain script in torch's default precision: float32 whose convolutions may use TF32."""
    attack_images(model, x[:200], y[:200], THREAT.eps, "pgd-20")

    def work() -> Record:
        seconds, verdicts = {}, {}
        for name in ATTACKS:
            started = perf_counter()
            verdicts[name] = attack_images(model, x, y, THREAT.eps, name)
            seconds[name] = round(perf_counter() - started, 2)
        return {"each": seconds, "verdicts": {name: pack(hits) for name, hits in verdicts.items()}}

    return timed(work)


def ours(precision: str, block: int, engine: str, attacks: Any = ATTACKS, every: int = 1) -> Cell:
    """deat.evaluate, sanity checks left out, which the plain script does not make."""

    def cell(model: nn.Module, x: Tensor, y: Tensor) -> Record:
        options: Any = {"threat": THREAT, "sanity": False, "precision": precision, "block": block, "engine": engine}
        data = x[::every].contiguous(), y[::every].contiguous()
        first = timed(lambda: summary(deat.evaluate(model, data, attacks=FIRST, **options)))
        found = timed(lambda: summary(deat.evaluate(model, data, attacks=attacks, **options)))
        return {**found, "first_before": first["seconds"], "first_images": len(data[0])}

    return cell


def library(model: nn.Module, x: Tensor, y: Tensor) -> Record:
    """pyautoattack by hand, in batches of 500, after the plain script's PGD-20."""
    from pyautoattack import AutoAttack

    images, labels = x[::TENTH].contiguous(), y[::TENTH].contiguous()

    def work() -> Record:
        adversary = AutoAttack(model, eps=THREAT.eps, norm="Linf", seed=0, device="cuda")
        found = adversary.run_standard_evaluation(images, labels, batch_size=500)[0]
        with torch.no_grad():
            return {"verdicts": {"aa": pack((model(found).argmax(1) == labels).tolist())}}

    attack_images(model, images, labels, THREAT.eps, "pgd-20")
    return timed(work)


def summary(found: deat.Evaluation) -> Record:
    """Seconds and passes by attack, and the verdicts."""
    return {
        "each": {r.name: round(r.seconds, 2) for r in found.results},
        "forwards": {r.name: r.forwards for r in found.results},
        "backwards": {r.name: r.backwards for r in found.results},
        "verdicts": {r.name: pack(r.correct) for r in found.results},
    }


def pack(hits: list[bool]) -> str:
    """Verdicts as hexadecimal digits, four images each, after their number."""
    text = "".join("1" if hit else "0" for hit in hits)
    return f"{len(hits)}:{int('1' + text, 2):x}"


CELLS: dict[str, Cell] = {
    **{name: ours(*how) for name, how in DEAT.items()},
    "plain": plain,
    "aa-library-tenth": library,
    "aa-fp16-compiled-tenth": ours("fp16", 1000, "compile", ["aa"], TENTH),
    "aa-fp16-compiled": ours("fp16", 10000, "compile", ["aa"]),
}


if __name__ == "__main__":
    main()
