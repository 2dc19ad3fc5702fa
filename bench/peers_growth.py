"""How cost and memory grow, for bench/peers.py: with k, batch, side, classes, images, processes, and a large set."""

import io
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from PIL import Image
from shared import Record
from side_process import Work, seconds_key, started

import deat
from deat.data import ImageSet

NETWORK, BATCH, EPS = "preact_resnet8", 64, 8 / 255
START = {"k": 7, "batch": BATCH, "side": 32, "classes": 10, "images": 4 * BATCH}
AXES: dict[str, tuple[int, ...]] = {
    "k": (0, 1, 3, 7, 15),
    "batch": (16, 32, 64, 128, 256),
    "side": (16, 32, 64),
    "classes": (10, 100, 1000),
    "images": (256, 512, 1024),
}
"""The values of each axis; the others have their values of `START`."""
UNITS = {
    "k": lambda v: v + 1,
    "batch": lambda v: v,
    "side": lambda v: v * v,
    "classes": lambda v: v,
    "images": lambda v: v,
}
"""What cost should be proportional to at most."""
SET_SIDE, SET_CLASSES, SET_BLOBS = 16, 10, 1000
PNG_TIME = (2020, 1, 1, 0, 0, 0)


def make(**shape: int) -> Work:
    """Return an epoch of training, warm.

    Args:
        shape: Values of the axes; `START` has the others.
    """
    at = {**START, **shape}
    if "batch" in shape:
        at["images"] = max(at["batch"], 256)
    torch.manual_seed(0)
    net = deat.build_model(NETWORK, at["classes"])
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (at["images"], 3, at["side"], at["side"]), dtype=torch.uint8, generator=generator)
    names = tuple(map(str, range(at["classes"])))
    data = ImageSet(pixels, torch.arange(at["images"]) % at["classes"], names)
    config = deat.TrainConfig(
        epochs=10_000, batch_size=at["batch"], lr=0.01, lr_schedule="flat", threads=torch.get_num_threads()
    )
    method = f"pgd-{at['k']}" if at["k"] else "natural"
    before = resident_bytes()
    trainer = deat.make_trainer(net, data, method=method, threat=deat.Linf(EPS), config=config)
    session = trainer.session()  # as `fit` has it; the side ends with its process

    def work() -> Record:
        if trainer.epoch == 0:
            session.__enter__()
        trainer.run_epoch()
        return {"images": at["images"], "run_bytes": peak_bytes() - before, "data_bytes": pixels.numel()}

    work()
    return work


def measure_axis(axis: str, rounds: int, threads: int, clock: str) -> Record:
    """Milliseconds a batch for each value of an axis, the values in turns.

    Args:
        axis: A name of `AXES`.
        rounds: How many laps each value has.
        threads: Threads of a process.
        clock: "wall" or "cpu".

    Returns:
        For each value: milliseconds (a batch; for images: an epoch) of each lap, and the memory of the run.
    """
    points = []
    sides = {str(value): ("peers_growth:make", {axis: value}) for value in AXES[axis]}
    with started(sides, threads) as (processes, errors):
        laps = [{name: process.lap() for name, process in processes.items()} for _ in range(rounds)]
    for name in processes:
        mine = [lap[name] for lap in laps]
        count = mine[0]["images"]
        batch = int(name) if axis == "batch" else BATCH
        share = 1 if axis == "images" else count / batch
        points.append(
            {
                "value": int(name),
                "ms": [1000 * lap[seconds_key(clock)] / share for lap in mine],
                "others": max(lap["others"] for lap in mine),
                "run_mb": mine[-1]["run_bytes"] / 2**20,
                "data_mb": mine[-1]["data_bytes"] / 2**20,
            }
        )
    return {"points": points, "errors": errors}


def exponent(axis: str, points: list[Record]) -> float:
    """The slope of the logarithm of cost by that of what it should be proportional to, between the ends; 1 is linear."""
    ends = points[0], points[-1]
    units = [UNITS[axis](point["value"]) for point in ends]
    costs = [median(point["ms"]) for point in ends]
    return math.log(costs[1] / costs[0]) / math.log(units[1] / units[0])


def resident_bytes() -> int:
    """The memory that this process has now."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def own_bytes() -> int:
    """The memory of this process that the system cannot take back: without pages of files."""
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="ascii").splitlines() if status.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)


def peak_bytes() -> int:
    """The most memory that this process had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure_processes(rounds: int) -> Record:
    """One process against two, by bench/ranks.py.

    Args:
        rounds: Rounds of each.

    Returns:
        Its record.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "ranks.json"
        script = Path(__file__).parent / "ranks.py"
        run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
        options = ["--rounds", str(rounds), "--out", str(out), "--networks", "preact_resnet18"]
        subprocess.run([sys.executable, *run, *options], check=True, capture_output=True)
        record: Record = json.loads(out.read_text(encoding="utf-8"))
    return record


def measure_large_set(count: int) -> Record:
    """Start training on many small images, twice, each in a process of its own.

    Args:
        count: Images in the set, a zip archive of class folders.

    Returns:
        Seconds until the first batch was trained on, and memory, the first and the second time.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "set.zip"
        began = perf_counter()
        write_set(path, count)
        found: Record = {"images": count, "side": SET_SIDE, "bytes": 3 * SET_SIDE * SET_SIDE * count}
        found["archive_seconds"] = perf_counter() - began
        for name in ("first", "second"):
            command = [sys.executable, __file__, str(path), folder]
            run = subprocess.run(command, capture_output=True, text=True, check=True)
            found[name] = json.loads(run.stdout.splitlines()[-1])
        shutil.rmtree(folder, ignore_errors=True)
        Path(folder).mkdir()
    return found


def write_set(path: Path, count: int) -> None:
    """Write class folders of small PNG images into a zip archive; a thousand different ones take turns."""
    blobs = []
    generator = np.random.default_rng(0)
    for _ in range(SET_BLOBS):
        file = io.BytesIO()
        corners = generator.integers(0, 256, (2, 2, 3), dtype=np.uint8)
        Image.fromarray(corners).resize((SET_SIDE, SET_SIDE)).save(file, "png")
        blobs.append(file.getvalue())
    with zipfile.ZipFile(path, "w") as archive:
        for i in range(count):
            archive.writestr(
                zipfile.ZipInfo(f"train/class{i % SET_CLASSES}/{i:07d}.png", PNG_TIME), blobs[i % SET_BLOBS]
            )


def start_on_set(path: str, root: str) -> None:
    """Load a set and train; at the end of the first batch print the seconds, and memory above what imports take."""
    import deat.cli.main
    import deat.runs.fit

    before, own_before, began = resident_bytes(), own_bytes(), perf_counter()
    data: Any = deat.load_data(f"folder:{path}", root=root)
    loaded = perf_counter() - began

    class StopAfterOneBatch(deat.Callback):
        def on_batch(self, trainer: deat.Trainer, batch: Any) -> None:
            found = {"load_seconds": loaded, "seconds": perf_counter() - began, "peak_bytes": peak_bytes() - before}
            print(json.dumps(found | {"own_bytes": own_bytes() - own_before}), flush=True)
            os._exit(0)

    net = deat.build_model("small", SET_CLASSES, 3, SET_SIDE)
    options: Any = {"method": "pgd-1", "epochs": 1, "val": 0.001, "progress": False, "callbacks": [StopAfterOneBatch()]}
    deat.fit(net, data, **options)


if __name__ == "__main__":
    start_on_set(*sys.argv[1:])
