"""Does a GPU wait for JPEG files? Training from files that workers decode, and the same from decoded images.

ResNet-50 at 224 x 224, batches of 128, bf16. The files are made here: smooth noise of 500 x 375 pixels, JPEG quality
85, about as large as photos. An epoch contains each file several times. `resident` trains on the same number of decoded
images, and crops and flips them on the GPU; `stream` reads, decodes, crops and flips the files in worker processes.
"Busy" is the time of a resident epoch divided by that of a streamed one: 1 means that the GPU never waits. Epochs follow
each other as in training, so that workers decode the next epoch's first images before this one ends. The first epoch is
not counted, because the workers decoded some of its images during the warm-up.

    python bench/gpu_stream.py --out docs/results/stream.json

It writes the JSON file and a table beside it, with every row.
"""

import argparse
import os
import tempfile
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from shared import (
    Record,
    clocked,
    command_block,
    fixed_budget,
    gpu_machine,
    images,
    net_of,
    paragraph,
    trainer_of,
    write_result,
)

from deat.data import LazyImages
from deat.data.folder_layout import infer_layout
from deat.data.image_archives import FolderFiles

BATCH, SIDE, WARM_UP, DEVICE = 128, 224, 8, "cuda"
STEPS = {"natural": 0, "m+deat": 2}
DEFAULTS = {"images": 4096, "times": 4, "workers": [8, 16]}


def main() -> None:
    """Measure every method, streamed and resident."""
    parser = argparse.ArgumentParser(description="Training from JPEG files, beside training from decoded images.")
    parser.add_argument("--images", type=int, help="how many files to make")
    parser.add_argument("--times", type=int, help="how often an epoch holds each")
    parser.add_argument("--workers", type=int, nargs="*", help="processes that decode")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.set_defaults(**DEFAULTS)
    args = parser.parse_args()
    machine = {**gpu_machine(), "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory() as folder:
        kilobytes, rows = make_files(Path(folder), args.images), list[Record]()
        files, held = lazy_images(Path(folder), args.times), images(SIDE, args.images * args.times)
        result = {"machine": machine, "images": len(files), "times": args.times, "mean_kilobytes": kilobytes}
        result |= {"workers": args.workers, "rows": rows}
        for method in STEPS:
            resident = seconds_of(method, held, None)
            for workers in args.workers:
                streamed = seconds_of(method, files, workers)
                row = {"method": method, "backprops": STEPS[method] + 1, "workers": workers}
                rows.append(row | {"resident": resident, "stream": streamed})
                print(rows[-1], flush=True)
                write_result(result, args.out, render)


def make_files(folder: Path, count: int) -> float:
    """Write the files, a tenth of them to each class; their mean size in kilobytes."""
    for label in range(10):
        (folder / str(label)).mkdir()
    with Pool() as pool:
        sizes = pool.starmap(make_file, [(str(folder / str(i % 10) / f"{i}.jpg"), i) for i in range(count)])
    return round(sum(sizes) / count / 1000, 1)


def make_file(path: str, seed: int) -> int:
    """Noise at two scales, as a JPEG; its bytes."""
    draw = np.random.default_rng(seed)
    grains = (draw.integers(0, 256, (*size, 3), dtype=np.uint8) for size in ((12, 16), (188, 250)))
    coarse, fine = (Image.fromarray(grain).resize((500, 375), Image.Resampling.BICUBIC) for grain in grains)
    Image.blend(coarse, fine, 0.3).save(path, quality=85)
    return os.path.getsize(path)


def lazy_images(folder: Path, times: int) -> LazyImages:
    """The files, each so many times, to be decoded when they are read."""
    names = tuple(sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*.jpg")))
    layout = infer_layout(names)
    files = LazyImages(FolderFiles(folder, names), *layout.splits["train"], layout.classes, SIDE)
    return files.subset(torch.arange(len(files)).repeat(times))


def seconds_of(method: str, data: Any, workers: int | None) -> float:
    """A pass over the data, after a part of one that warms up and a whole one."""
    trainer = trainer_of(net_of("resnet50"), data, method, BATCH, "compile", DEVICE, workers=workers)
    budget = fixed_budget(trainer, STEPS[method])

    def play(first: int) -> None:
        trainer.batches_done = first
        trainer.train_epoch(budget)
        trainer.epoch += 1

    with trainer.session():
        clocked(lambda: play(max(0, len(trainer.train) - WARM_UP)))
        _, *counted = (clocked(lambda: play(0)) for _ in range(3))
    assert trainer.engine.name == "compile", f"it ran {trainer.engine.name}"
    return round(min(counted), 3)


def command(result: Record) -> str:
    """What made a result, defaults left out; `images` there are those of an epoch."""
    given = {**DEFAULTS, **result, "images": result["images"] // result["times"]}
    words = [
        f"--{name} {' '.join(map(str, np.atleast_1d(given[name])))}"
        for name, usual in DEFAULTS.items()
        if given[name] != usual
    ]
    return " ".join(["python bench/gpu_stream.py", *words, "--out docs/results/stream.json"])


def render(result: Record) -> str:
    """The result as a page of Markdown."""
    machine = result["machine"]
    lines = [
        "# Training from JPEG files",
        "",
        *command_block(command(result)),
        "",
        *paragraph(
            f"Machine: {machine['device']} with {machine['cores']} CPU cores, torch {machine['torch']}. An epoch has "
            f"{result['images']:,} JPEG images of 500 x 375 pixels and about {result['mean_kilobytes']} kB each. The "
            'docstring of `bench/gpu_stream.py` describes the measurement. "Streamed" reads JPEG files in worker '
            'processes; "resident" has decoded images on the GPU. "Busy" is the streamed speed as a share of the '
            "resident one, where it is lower."
        ),
        "",
        "| method | backprops per batch | workers | streamed, images/s | resident, images/s | busy |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        paces = [f"{result['images'] / row[side]:,.0f}" for side in ("stream", "resident")]
        busy = min(1.0, row["resident"] / row["stream"])
        lines.append(
            f"| {row['method']} | {row['backprops']} | {row['workers']} | {paces[0]} | {paces[1]} | {busy:.0%} |"
        )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
