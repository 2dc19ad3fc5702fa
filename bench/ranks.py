"""What a second process brings: `torchrun --standalone --nproc-per-node=2 bench/ranks.py`.

Both sides train on the same batches with the same network in the same run, in turns: first one process with one thread,
while the other process waits; then two processes with one thread each. Without torchrun, only the page is written again.
"""

import argparse
import json
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from clock import Lap, lap, own_seconds
from ranks_page import render
from shared import Record, cpu_name
from torch import nn

import deat
from deat.cli.exit_handling import exit_if_distributed
from deat.data import ImageSet
from deat.utils.distributed import Distributed

RESULTS = Path(__file__).parents[1] / "docs/results"
BATCH = 64


@dataclass(frozen=True)
class Case:
    """A network and a method, on noise of its data's shape."""

    network: str
    shape: tuple[int, int, int]
    method: str
    batches: int


CASES = [
    Case("preact_resnet18", (3, 32, 32), "pgd-7", 1),
    Case("preact_resnet18", (3, 32, 32), "free-8", 1),
    Case("small", (1, 8, 8), "pgd-7", 50),
    Case("small", (1, 8, 8), "free-8", 50),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "ranks.json", help="the JSON file; its page goes beside it"
    )
    parser.add_argument("--networks", nargs="+", default=[case.network for case in CASES])
    args = parser.parse_args()
    rounds, cases = args.rounds, [case for case in CASES if case.network in args.networks]
    ranks = Distributed.initialize("cpu")
    if ranks.is_multiprocess:
        found = [measure(case, ranks, rounds) for case in cases]
        if ranks.is_main:
            record = {**about(ranks, rounds), "cases": found}
            args.out.write_text(json.dumps(record, indent=2) + "\n")
    if ranks.is_main:
        record = json.loads(args.out.read_text())
        args.out.with_suffix(".md").write_text(render(record))
    exit_if_distributed()


def about(ranks: Distributed, rounds: int) -> Record:
    """What was run, and on what."""
    return {
        "command": f"torchrun --standalone --nproc-per-node={ranks.size} bench/ranks.py --rounds {rounds}",
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "batch_size": BATCH,
    }


def measure(case: Case, ranks: Distributed, rounds: int) -> Record:
    """One process and all of them in turns, after a round that warms both up."""
    alone, shared = player(case, Distributed()), player(case, ranks)
    pairs = []
    for _ in range(rounds + 1):
        one = timed(alone if ranks.is_main else waiting, ranks)
        pairs.append((one, timed(shared, ranks)))
    laps = pairs[1:]
    return {
        **vars(case),
        "one_process": side([one for one, _ in laps]),
        "two_processes": side([two for _, two in laps]),
        "efficiency": [round(one.seconds / (ranks.size * two.seconds), 3) for one, two in laps],
        "median_efficiency": round(median(one.seconds / (ranks.size * two.seconds) for one, two in laps), 3),
    }


def player(case: Case, ranks: Distributed) -> Callable[[], object]:
    """A few batches of a case, played by these processes."""
    torch.manual_seed(0)
    trainer = deat.make_trainer(
        network(case),
        noise(case),
        method=case.method,
        threat="linf:8/255",
        config=deat.TrainConfig(epochs=1, batch_size=BATCH, threads=1, device="cpu"),
        distributed=ranks,
    )
    budget = trainer.schedule.budget(trainer.schedule.init(), 0)

    def play() -> None:
        trainer.batches_done = 0
        trainer.train_epoch(budget)

    return play


def timed(work: Callable[[], object], ranks: Distributed) -> Lap:
    """A piece of work by the first process's clock, begun and ended by all together."""
    torch.set_num_threads(1)

    def together() -> None:
        work()
        dist.barrier()

    dist.barrier()
    return lap(together, own=lambda: ranks.all_reduce_sum([own_seconds()])[0])


def waiting() -> None:
    """Leave the cores to the other process."""


def side(laps: list[Lap]) -> Record:
    """One side's rounds."""
    return {
        "seconds": [round(one.seconds, 4) for one in laps],
        "median": round(median(one.seconds for one in laps), 4),
        "others": round(max(one.others for one in laps), 3),
    }


def network(case: Case) -> nn.Module:
    return deat.build_model(case.network, 10, case.shape[0], case.shape[1])


def noise(case: Case) -> ImageSet:
    """How long a step takes does not depend on what is on the images."""
    images = torch.randint(0, 256, (case.batches * BATCH, *case.shape), dtype=torch.uint8)
    return ImageSet(images, torch.arange(len(images)) % 10, tuple("0123456789"))


if __name__ == "__main__":
    main()
