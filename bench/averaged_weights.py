"""Averaged weights beside the last ones, with batch-norm statistics that are averaged or estimated again.

    python bench/averaged_weights.py --data-root FOLDER --work docs/results/averaged-weights

The runs are two of those of bench/controller_results.py on a part of CIFAR-10, with an average of the weights: from scratch
and fine-tuned, with a learning rate that falls to zero and with one that does not. The averaged network is evaluated with
the averaged statistics of its batch norms (what deat has), and with those of one pass over the training images, as they
are or under attack. Each run is a file of WORK, and one that is there is not repeated. The page is written beside WORK.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from controller_results import ATTACKS, SETUPS, Experiment
from controller_results_page import Difference
from shared import Record, command_block, cpu_name, paragraph
from torch import Tensor, nn

import deat
from deat.utils.safe_write import write_json
from deat.version import get_versions

SETUP = SETUPS["cifar10"]
METHODS = {"scratch": "deat-2", "fine-tuned": "free-4"}
"""The method of each start."""
LR_SCHEDULES = {"cyclic": "falls to 0", "flat": "constant"}
DECAY, SEEDS = 0.99, range(5)
LAST, AVERAGED, CLEAN, ATTACKED = "last", "averaged", "estimated on clean images", "estimated under attack"
KINDS = (LAST, AVERAGED, CLEAN, ATTACKED)
PAIRS = ((AVERAGED, LAST), (CLEAN, AVERAGED), (ATTACKED, AVERAGED))
"""What the page compares with what."""


def estimate_statistics(net: nn.Module, batches: Iterator[Tensor]) -> None:
    """Replace the running statistics of all batch norms by the means over these batches."""
    norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain mean of all batches
    for images in batches:
        net.train()
        with torch.no_grad():
            net(images)
        net.eval()
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


def train_batches(images: Any, batch_size: int = 128) -> Iterator[tuple[Tensor, Tensor]]:
    """The training images and labels in shuffled batches."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    for first in range(0, len(order), batch_size):
        index = order[first : first + batch_size]
        yield images.images[index].float() / 255, images.labels[index]


def attack_in_steps(net: nn.Module, x: Tensor, y: Tensor, threat: deat.Linf, steps: int = 4) -> Tensor:
    """Images after a few steps of PGD, with the network in train mode as in training, its statistics left alone."""
    stored = {name: buffer.clone() for name, buffer in net.named_buffers()}
    net.train()
    delta = torch.zeros_like(x)
    for _ in range(steps):
        delta.requires_grad_()
        (grad,) = torch.autograd.grad(nn.functional.cross_entropy(net(x + delta), y), delta)
        delta = threat.pgd_step(x, delta.detach(), grad, threat.eps / 2)
    net.eval()
    for name, buffer in net.named_buffers():
        buffer.copy_(stored[name])
    return x + delta


def run(experiment: Experiment, start_name: str, lr_schedule: str, seed: int) -> Record:
    """Train once, and evaluate the last and the averaged weights."""
    start, threat = SETUP.starts[start_name], deat.Linf(SETUP.eps)
    net = experiment.network(seed)
    if start.epochs_before:
        net.load_state_dict(experiment.natural_weights(start, seed))
    result = experiment.fit(net, start, METHODS[start_name], seed, ema=DECAY, lr_schedule=lr_schedule)
    images = experiment.train.subset(range(start.images or len(experiment.train)))

    def scores() -> dict[str, float]:
        net.eval()
        options: dict[str, Any] = {"attacks": ATTACKS, "seed": seed, "sanity": False, "progress": False}
        return dict(deat.evaluate(net, experiment.test, threat=threat, **options).accuracy)

    accuracy = {LAST: scores()}
    result.load_averaged()
    accuracy[AVERAGED] = scores()
    estimate_statistics(net, (x for x, _ in train_batches(images)))
    accuracy[CLEAN] = scores()
    result.load_averaged()
    attacked = [attack_in_steps(net, x, y, threat) for x, y in train_batches(images)]
    estimate_statistics(net, iter(attacked))
    accuracy[ATTACKED] = scores()
    return {
        "start": start_name,
        "lr_schedule": lr_schedule,
        "seed": seed,
        "backprops": result.history[-1].backprops,
        "accuracy": accuracy,
        "record": result.record,
        "machine": {"cpu": cpu_name(), "versions": get_versions()},
    }


def render(folder: Path) -> str:
    """The page of the records in a folder."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    about = (
        f"A small network with batch norm on 2,500 CIFAR-10 images, as in [controller](controller/README.md), with an average "
        f"of its weights (decay {DECAY:g}): DEAT-2 for 10 epochs from scratch, FREE-4 for 6 epochs from natural weights. Means "
        "over seeds of the accuracy on 4,000 held-out images, in percent. `averaged` has averaged batch-norm statistics, "
        "as in deat. Estimated statistics are means over one more pass over the training images with the averaged "
        "weights."
    )
    lines = [
        "# Averaged weights",
        "",
        *command_block("python bench/averaged_weights.py --data-root FOLDER --work docs/results/averaged-weights"),
        "",
        *paragraph(about),
    ]
    for attack in ATTACKS:
        lines += ["", f"## {attack.upper() if attack != 'natural' else 'Natural images'}", ""]
        lines += [f"| start | learning rate | {' | '.join(KINDS)} | seeds |", "|---" * (len(KINDS) + 3) + "|"]
        compared = [f"| start | learning rate | {' | '.join(f'{a} - {b}' for a, b in PAIRS)} |"]
        compared += ["|---" * (len(PAIRS) + 2) + "|"]
        for start in METHODS:
            for lr_schedule, shown in LR_SCHEDULES.items():
                found = [r["accuracy"] for r in records if (r["start"], r["lr_schedule"]) == (start, lr_schedule)]
                if not found:
                    continue
                values = {kind: [100 * accuracy[kind][attack] for accuracy in found] for kind in KINDS}
                cells = [start, shown, *(f"{mean(values[kind]):.1f}" for kind in KINDS), str(len(found))]
                lines.append(f"| {' | '.join(cells)} |")
                differences = [[x - y for x, y in zip(values[a], values[b], strict=True)] for a, b in PAIRS]
                cells = [Difference.of(d).show() if len(d) > 1 else f"{d[0]:+.2f}" for d in differences]
                compared.append(f"| {' | '.join([start, shown, *cells])} |")
        text = "Differences, paired by seed, with 95 % intervals for another seed and the p-value of the paired t test:"
        lines += ["", *paragraph(text), "", *compared]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Make the runs that are missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", required=True, help="the folder that CIFAR-10 is in")
    parser.add_argument("--work", type=Path, required=True, help="the folder of records")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    experiment = Experiment(SETUP, deat.load_data("cifar10", root=args.data_root), args.work)
    for seed in args.seeds:
        for start in METHODS:
            for lr_schedule in LR_SCHEDULES:
                path = args.work / f"{start}-{lr_schedule}-{seed}.json"
                if not path.is_file():
                    args.work.mkdir(parents=True, exist_ok=True)
                    write_json(path, run(experiment, start, lr_schedule, seed))
                    print(path.name, flush=True)
    args.work.with_suffix(".md").write_text(render(args.work), encoding="utf-8")


if __name__ == "__main__":
    main()
