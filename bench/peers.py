"""deat beside other people's code on this machine: training, evaluation, AutoAttack, little things, and growth.

It compares deat with a good loop in bf16 and in float32, with the loop of paper repositories, and with the packages that are
installed of adversarial-robustness-toolbox, torchattacks, foolbox and pyautoattack; the page names those that are not. Use
an environment of its own:

    python -m venv peers
    peers/bin/pip install -c constraints.txt torch .
    peers/bin/pip install adversarial-robustness-toolbox foolbox pyautoattack
    peers/bin/pip install --no-deps torchattacks
    peers/bin/python bench/peers.py --data cifar10:FOLDER

On two free cores it takes about 25 minutes, of which a few are for training the network that is evaluated. Each result is
written at once to docs/results/peers.json with its page, peers.md, and is not measured again: the same command resumes.
`--part` measures one part, `--cells` some of its rows, `--again` replaces what the file has. `--quick` shows in a few
minutes that everything works, and writes nothing unless --out names a file. Sides take turns, each in a process of its
own; rounds that other processes disturbed are repeated. On a machine that is not free, `--clock cpu --threads 1` compares
processor time.
"""

import argparse
import json
import os
import platform
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import peers_evaluation
import peers_growth
import peers_small
import peers_training
import torch
from peers_page import draw, render
from shared import Record, cpu_name, write_result
from side_process import play_rounds

from deat.engine.precision import has_native_cpu_bf16
from deat.version import get_versions

OUT = Path(__file__).resolve().parents[1] / "docs" / "results" / "peers.json"
PACKAGES = ("adversarial-robustness-toolbox", "torchattacks", "foolbox", "pyautoattack")
PARTS = ("training", "evaluation", "autoattack", "small", "growth")
QUICK_NETWORK = "depthwise"
TRADES_NETWORKS = ("PreAct-ResNet 18", "PreAct-ResNet 8")
SMALL_SIDES: dict[str, tuple[str, Record]] = {
    "plain loop": ("peers_small:make_plain", {}),
    "deat train": ("peers_small:make_train", {}),
}
Cell = Callable[[], Record]


def main() -> None:
    """Measure the cells that the file does not have, and write the page after each."""
    args = arguments()
    result = json.loads(args.out.read_text(encoding="utf-8")) if args.out and args.out.exists() else {}
    for part in args.part or PARTS:
        cells = result.setdefault(part, {}).setdefault("cells", {})
        for name, measure in CELLS[part](args):
            if (name in cells and not args.again) or (args.cells and not any(text in name for text in args.cells)):
                continue
            print(f"--- {part}, {name}", flush=True)
            cells[name] = measure()
            result[part] |= {"machine": machine(args), "command": command(part, args)}
            publish(result, args.out)
    print(render(result))
    publish(result, args.out)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=PARTS, help="what to measure; by default everything")
    parser.add_argument("--cells", nargs="+", help="only cells whose names have one of these texts, such as depthwise")
    parser.add_argument("--data", default="digits", help="the images to evaluate on: cifar10:FOLDER")
    parser.add_argument(
        "--weights", type=Path, help="weights to evaluate; trained and written if there is no such file"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count")
    parser.add_argument("--threads", type=int, default=2, help="threads of each side")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="what is compared")
    parser.add_argument("--images", type=int, default=256, help="images to attack; AutoAttack takes a quarter")
    parser.add_argument("--set-images", type=int, default=1_000_000, help="images of the large set")
    parser.add_argument("--out", type=Path, help="the JSON file; the page and the picture go beside it")
    parser.add_argument("--again", action="store_true", help="measure what the file has already")
    parser.add_argument("--quick", action="store_true", help="show that everything works; the numbers mean nothing")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.images, args.set_images = 1, 16, 2000
    if min(args.rounds, args.threads, args.images // 4, args.set_images) < 1:
        parser.error("--rounds, --threads and --set-images must be at least 1, and --images at least 4")
    args.out = args.out or (None if args.quick else OUT)
    args.weights = args.weights or (args.out.parent if args.out else Path()) / ".peers-weights.safetensors"
    return args


def publish(result: Record, out: Path | None) -> None:
    """Write the file, the picture and the page."""
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_result(result, out, render)
        picture = draw(result)
        if picture:
            out.with_suffix(".svg").write_text(picture, encoding="utf-8")


def command(part: str, args: argparse.Namespace) -> str:
    """The command that repeats a part."""
    options = [f"--part {part}", "--quick" if args.quick else f"--rounds {args.rounds}"]
    if part in ("evaluation", "autoattack"):
        options.append(f"--data {args.data.partition(':')[0]}{':FOLDER' * (':' in args.data)} --images {args.images}")
    if args.clock != "wall" or args.threads != 2:
        options.append(f"--clock {args.clock} --threads {args.threads}")
    return f"python bench/peers.py {' '.join(options)}"


def machine(args: argparse.Namespace) -> Record:
    """What the numbers depend on besides the code."""
    versions = {name: installed_version(name) for name in PACKAGES}
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": args.threads,
        "clock": args.clock,
        "bf16_in_hardware": has_native_cpu_bf16(),
        "python": platform.python_version(),
        **get_versions(),
        "packages": {name: version for name, version in versions.items() if version},
        "missing": [name for name, version in versions.items() if not version],
    }


def installed_version(package: str) -> str | None:
    """The version of a package, None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def training_cells(args: argparse.Namespace) -> Iterator[tuple[str, Cell]]:
    """Every network and method."""
    for network, batches in peers_training.BATCHES.items():
        if args.quick and network != QUICK_NETWORK:
            continue
        for method in peers_training.METHODS:
            if method == "trades" and network not in (*TRADES_NETWORKS, *([QUICK_NETWORK] if args.quick else [])):
                continue
            name = f"{network}, {method}"
            count = 1 if args.quick else batches

            def cell(network: str = network, method: str = method, name: str = name, count: int = count) -> Record:
                shape = {"network": network, "method": method, "batches": count}
                sides = {
                    side: ("peers_training:make", {"side": side, **shape}) for side in peers_training.list_sides(method)
                }
                return shape | play_rounds(sides, args.rounds, args.threads, args.clock, name)

            yield name, cell


def evaluation_cells(args: argparse.Namespace) -> Iterator[tuple[str, Cell]]:
    """FGSM, PGD-20, PGD-100 and CW-20."""
    yield "attacks", lambda: evaluate(args, list(peers_evaluation.ATTACKS), args.images, args.rounds)


def autoattack_cells(args: argparse.Namespace) -> Iterator[tuple[str, Cell]]:
    """Standard AutoAttack, on a quarter of the images."""
    yield "aa", lambda: evaluate(args, ["aa"], args.images // 4, max(1, args.rounds - 1))


def evaluate(args: argparse.Namespace, attacks: list[str], num_images: int, rounds: int) -> Record:
    """All sides that have these attacks, on the same network and images."""
    if not args.weights.exists():
        torch.set_num_threads(args.threads)
        num_train, epochs = (640, 1) if args.quick else (12_800, 8)
        peers_evaluation.train_network(args.data, args.weights, num_train, epochs)
    about = {"data": args.data, "weights": str(args.weights), "num_images": num_images, "attacks": attacks}
    names = peers_evaluation.list_sides(is_autoattack=attacks == ["aa"])
    sides = {name: ("peers_evaluation:make", {"side": name, **about}) for name in names}
    played = play_rounds(sides, rounds, args.threads, args.clock, "+".join(attacks))
    return {"images": num_images, "attacks": attacks, "data": args.data.partition(":")[0]} | played


def small_cells(args: argparse.Namespace) -> Iterator[tuple[str, Cell]]:
    """A run on digits, commands and the demo."""
    yield "digits", lambda: play_rounds(SMALL_SIDES, args.rounds, 1, args.clock, "digits")
    yield "commands", lambda: peers_small.measure_commands(1 if args.quick else args.rounds + 2)
    yield "demo", lambda: peers_small.measure_demo(1 if args.quick else 2)


def growth_cells(args: argparse.Namespace) -> Iterator[tuple[str, Cell]]:
    """Cost and memory along each axis, two processes, and a large set."""
    for axis in peers_growth.AXES:
        yield axis, lambda axis=axis: peers_growth.measure_axis(axis, args.rounds, args.threads, args.clock)  # type: ignore[misc]
    if (os.cpu_count() or 1) > 1:
        yield "processes", lambda: peers_growth.measure_processes(args.rounds)
    yield "large set", lambda: peers_growth.measure_large_set(args.set_images)


CELLS: dict[str, Callable[[argparse.Namespace], Iterator[tuple[str, Cell]]]] = {
    "training": training_cells,
    "evaluation": evaluation_cells,
    "autoattack": autoattack_cells,
    "small": small_cells,
    "growth": growth_cells,
}


if __name__ == "__main__":
    main()
