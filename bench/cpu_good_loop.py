"""deat beside a good loop on a CPU: PGD-7 and FREE-8 as somebody who knows PyTorch writes them, in bf16.

    python bench/cpu_good_loop.py --out docs/results/cpu-good-loop.json

The good loop takes the gradient of the perturbation alone in attack steps (`torch.autograd.grad`), runs in autocast to
bf16 with channels last, steps with fused SGD, and has no loader: its batches are slices of a tensor. deat's side is
`Trainer.run_epoch`, with its default precision and its records. Each side is a process of its own, since how memory is
reused is a setting of the process. They take turns, with one thread each, and what is compared is CPU time.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch
from shared import Record, command_block, cpu_name, paragraph, write_result
from torch import Tensor, nn
from torch.nn import functional as F

import deat
from deat.version import get_versions

BATCH, BATCHES, EPS = 64, 2, 8 / 255
ALPHA = {"pgd-7": EPS / 4, "free-8": EPS}
SIDES = ("good loop", "deat")


class SmallViT(nn.Module):
    """A vision transformer of torch's own layers: patches of 4 x 4, 192 wide, 6 blocks of 3 heads."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 192, 4, stride=4)
        self.positions = nn.Parameter(torch.zeros(1, 64, 192))
        block = nn.TransformerEncoderLayer(192, 3, 768, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 6, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(192), nn.Linear(192, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        tokens = self.patches(x).flatten(2).mT + self.positions
        logits: Tensor = self.head(self.norm(self.blocks(tokens)).mean(1))
        return logits


def depthwise_net() -> nn.Module:
    """A small network of depthwise and pointwise convolutions, as MobileNets have them."""

    def block(width_in: int, width: int, stride: int) -> list[nn.Module]:
        depthwise = nn.Conv2d(width_in, width_in, 3, stride, 1, groups=width_in, bias=False)
        pointwise = nn.Conv2d(width_in, width, 1, bias=False)
        return [depthwise, nn.BatchNorm2d(width_in), nn.ReLU(), pointwise, nn.BatchNorm2d(width), nn.ReLU()]

    stem = [nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    blocks = [*block(32, 64, 1), *block(64, 128, 2), *block(128, 128, 1), *block(128, 256, 2)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


NETWORKS = {
    "PreAct-ResNet 18": lambda: deat.build_model("preact_resnet18"),
    "PreAct-ResNet 8": lambda: deat.build_model("preact_resnet8"),
    "small ViT": SmallViT,
    "depthwise": depthwise_net,
}


class GoodLoop:
    """The loop of somebody who knows PyTorch."""

    def __init__(self, net: nn.Module, x: Tensor, y: Tensor, method: str) -> None:
        last: Any = torch.channels_last
        self.net, self.x, self.y, self.method = (
            net.to(memory_format=last).train(),  # type: ignore[call-overload]
            x.contiguous(memory_format=last),
            y,
            method,
        )
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4, fused=True)

    def epoch(self) -> int:
        """Train on every batch, and return the backprops."""
        train = {"pgd-7": self.pgd, "free-8": self.free}[self.method]
        for start in range(0, len(self.x), BATCH):
            train(self.x[start : start + BATCH], self.y[start : start + BATCH])
        return 8 * (len(self.x) // BATCH)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss in bf16."""
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(self.net(x), y)

    def moved(self, x: Tensor, delta: Tensor, grad: Tensor) -> Tensor:
        """The next perturbation, in ball and box."""
        stepped = (delta.detach() + ALPHA[self.method] * grad.sign()).clamp_(-EPS, EPS)
        return (x + stepped).clamp_(0, 1).sub_(x)

    def pgd(self, x: Tensor, y: Tensor) -> None:
        """Seven attack steps, and an update."""
        delta = (x + torch.empty_like(x).uniform_(-EPS, EPS)).clamp_(0, 1).sub_(x)
        for _ in range(7):
            delta.requires_grad_()
            (grad,) = torch.autograd.grad(self.loss(x + delta, y), delta)
            delta = self.moved(x, delta, grad)
        self.optimizer.zero_grad()
        torch.autograd.backward(self.loss(x + delta, y))
        self.optimizer.step()

    def free(self, x: Tensor, y: Tensor) -> None:
        """Eight updates, each with a step of the perturbation."""
        delta = torch.zeros_like(x)
        for _ in range(8):
            delta.requires_grad_()
            self.optimizer.zero_grad()
            torch.autograd.backward(self.loss(x + delta, y))
            self.optimizer.step()
            assert delta.grad is not None
            delta = self.moved(x, delta, delta.grad)


def work(side: str, network: str, method: str) -> None:
    """One side: train an epoch for every line on standard input, and print its CPU seconds and backprops."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = NETWORKS[network]()
    x = torch.rand(BATCH * BATCHES, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    y = torch.arange(len(x)) % 10
    if side == "deat":
        config = deat.TrainConfig(epochs=10_000, batch_size=BATCH, lr=0.01, lr_schedule="flat", threads=1)
        trainer = deat.make_trainer(net, (x, y), method=method, config=config)
        with trainer.session():  # as `fit` does
            serve(lambda: run_epoch(trainer), trainer.engine.precision)
    else:
        serve(GoodLoop(net, x, y, method).epoch, "bf16")


def run_epoch(trainer: deat.Trainer) -> int:
    """An epoch of deat's, and its backprops."""
    before = trainer.game.cost.backprops
    trainer.run_epoch()
    return trainer.game.cost.backprops - before


def serve(epoch: Any, precision: str) -> None:
    """Train once to warm up, then once for each line."""
    epoch()
    for _ in sys.stdin:
        started = process_time()
        backprops = epoch()
        print(
            json.dumps({"seconds": process_time() - started, "backprops": backprops, "precision": precision}),
            flush=True,
        )


class Side:
    """The process of a side."""

    def __init__(self, side: str, network: str, method: str) -> None:
        command = [sys.executable, __file__, "--work", side, network, method]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=environment)

    def epoch(self) -> Record:
        """Train one epoch."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        found: Record = json.loads(self.process.stdout.readline())
        return found

    def end(self) -> None:
        """End the process."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def compare(network: str, method: str, rounds: int) -> Record:
    """Both sides in turns."""
    sides = {name: Side(name, network, method) for name in SIDES}
    laps = [{name: side.epoch() for name, side in sides.items()} for _ in range(rounds)]
    for side in sides.values():
        side.end()
    paces = {name: [1000 * lap[name]["seconds"] / lap[name]["backprops"] for lap in laps] for name in SIDES}
    ratios = sorted(good / ours for good, ours in zip(*paces.values(), strict=True))
    return {
        "network": network,
        "method": method,
        "precision": laps[0]["deat"]["precision"],
        "rounds": rounds,
        "ms": {name: median(values) for name, values in paces.items()},
        "ratio": [ratios[0], median(ratios), ratios[-1]],
    }


def main() -> None:
    """Compare every network and method that the file does not have."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the file of results, which is added to")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS)
    parser.add_argument("--work", nargs=3, metavar=("SIDE", "NETWORK", "METHOD"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(*args.work)
        return
    result = json.loads(args.out.read_text(encoding="utf-8")) if args.out and args.out.exists() else {"rows": []}
    result["machine"] = {"cpu": cpu_name(), **get_versions()}
    for network in args.networks:
        for method in ALPHA:
            if not any(row["network"] == network and row["method"] == method for row in result["rows"]):
                result["rows"].append(compare(network, method, args.rounds))
                print(json.dumps(result["rows"][-1]), flush=True)
                if args.out:
                    write_result(result, args.out, render)


def render(result: Record) -> str:
    """The page."""
    machine = result["machine"]
    about = (
        f"Machine: {machine['cpu']}, one thread, torch {machine['torch']}, while other processes used it. Images of 32 x 32 in "
        f"batches of {BATCH}, {BATCHES} batches an epoch. The good loop computes the gradient of the perturbation alone in "
        "attack steps, in autocast to bf16, with channels last and fused SGD, and has no loader. Numbers are CPU "
        "milliseconds a backprop, medians over the rounds; the ratio is the median of the rounds' ratios, with their range."
    )
    lines = ["| network | method | good loop | deat | good loop / deat | rounds |", "|---|---|---|---|---|---|"]
    for row in result["rows"]:
        low, middle, high = row["ratio"]
        lines.append(
            f"| {row['network']} | {row['method']} | {row['ms']['good loop']:.1f} | {row['ms']['deat']:.1f} "
            f"({row['precision']}) | {middle:.2f} ({low:.2f} to {high:.2f}) | {row['rounds']} |"
        )
    return "\n".join(
        [
            "# deat beside a good loop on a CPU",
            "",
            *command_block("python bench/cpu_good_loop.py --out docs/results/cpu-good-loop.json"),
            "",
            *paragraph(about),
            "",
            *lines,
            "",
        ]
    )


if __name__ == "__main__":
    main()
