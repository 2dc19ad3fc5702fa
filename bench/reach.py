"""TRADES' first gradient in half precision compared with float32, with and without an enlarged delta.

TRADES starts very near the clean image. In half precision deat takes the first gradient at an enlarged delta
(`DeltaScale` in core/inner_attack.py). Here a network is trained by TRADES-2 in float32 on a part of the
training images. Then TRADES' adversary attacks training images that the network has not seen, from the same noise: in
float32, in bf16, and in bf16 with every gradient taken at delta itself. Compared with float32 are the signs of the first
gradient, its magnitude l_X, and the divergence (KL, in float32) after one step of eps, the first one of M+TRADES, and
after ten steps of eps / 4. It runs on a CPU, in about five minutes:

    python bench/reach.py --data folder:cifar10-jpeg.tar.xz --out docs/results/reach.json
"""

import argparse
import copy
from pathlib import Path

import torch
from shared import Record, command_block, cpu_name, net_of, paragraph, write_result
from torch import Tensor, nn

import deat
from deat.core.batch_buffers import Budget
from deat.core.inner_attack import FIRST_GRADIENT_SCALE, DeltaScale
from deat.data import Augment
from deat.data.streaming import AnyImageSet
from deat.tasks.per_example_losses import kl_divergence
from deat.version import get_versions

NETWORK, EPOCHS, TRAINED, ASKED, BATCH = "preact_resnet8", 4, 14_000, 1_024, 128
SIDES = {"float32": ("fp32", True), "bf16": ("bf16", True), "bf16, where delta is": ("bf16", False)}
"""Each side's precision, and whether its first gradient may be taken at an enlarged delta."""
WORDS = {"one step of eps": (1, 1.0), "ten of eps / 4": (10, 0.25)}
"""The number of steps, and their length in units of eps."""


def main() -> None:
    """Train, ask every side, and write the page."""
    parser = argparse.ArgumentParser(description="TRADES' first gradient in half precision, beside float32's.")
    parser.add_argument("--data", required=True, help="CIFAR-10, as deat train takes it")
    parser.add_argument("--images", type=int, default=TRAINED, help="how many are trained on, fewer to try it out")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write; a page goes beside it")
    args = parser.parse_args()
    corpus = deat.load_data(args.data)
    threat = deat.Linf(8 / 255)
    order = torch.randperm(len(corpus.train), generator=torch.Generator().manual_seed(0))
    seen, unseen = (corpus.train.subset(part) for part in (order[: args.images], order[-ASKED:]))
    model = trained(seen, threat)
    found = {word: {side: asked(model, unseen, threat, *SIDES[side], *WORDS[word]) for side in SIDES} for word in WORDS}
    about = {"cpu": cpu_name(), **get_versions(), "network": NETWORK, "epochs": EPOCHS, "trained": args.images}
    write_result({**about, "sides": {side: compared(found, side) for side in SIDES}}, args.out, render)
    print(args.out.with_suffix(".md").read_text(encoding="utf-8"))


def trained(seen: AnyImageSet, threat: deat.ThreatModel) -> nn.Module:
    """A network that has met TRADES' adversary, in float32."""
    settings = deat.TrainConfig(epochs=EPOCHS, batch_size=BATCH, lr=0.05, precision="fp32", device="cpu")
    trainer = deat.make_trainer(
        net_of(NETWORK), seen, method="trades-2", threat=threat, config=settings, augment=Augment(4)
    )
    return trainer.fit().model


def asked(
    model: nn.Module,
    unseen: AnyImageSet,
    threat: deat.ThreatModel,
    precision: str,
    far: bool,
    k: int,
    length: float,
) -> list[tuple[Tensor, Tensor]]:
    """For each batch the first gradient, and the divergence of each image after k steps."""
    settings = deat.TrainConfig(epochs=1, batch_size=BATCH, lr=0.05, precision=precision, device="cpu")
    trainer = deat.make_trainer(copy.deepcopy(model), unseen, method=f"trades-{k}", threat=threat, config=settings)
    trainer.game.delta_scale = trainer.game.delta_scale if far else DeltaScale(torch.device("cpu"), enabled=False)
    trainer.model.train()
    budget, found = Budget(k, length * threat.eps), []
    for step, (x, y) in enumerate(trainer.train.epoch(0)):
        trainer.prepare_step(0, step)
        r = trainer.game.begin_batch(x, y, budget)
        trainer.game.ascend(r)
        first = r.grad.clone()
        for _ in range(k - 1):
            trainer.game.ascend(r)
        found.append((first, divergence(model, r.x, r.delta)))
    return found


def divergence(model: nn.Module, x: Tensor, delta: Tensor) -> Tensor:
    """Of each image, in float32, with the batch's own statistics as the adversary meets them."""
    with torch.no_grad():
        net = copy.deepcopy(model).train()
        return kl_divergence(net(x), net(x + delta))


def compared(found: dict[str, dict[str, list[tuple[Tensor, Tensor]]]], side: str) -> Record:
    """One side beside float32's."""
    first, *_ = found.values()
    mine, exact = (torch.cat([grad for grad, _ in first[name]]) for name in (side, "float32"))
    reached = {
        word: float(torch.cat([kl for _, kl in held[side]]).sum() / torch.cat([kl for _, kl in held["float32"]]).sum())
        for word, held in found.items()
    }
    signs = float((mine.sign() != exact.sign()).float().mean())
    magnitude = float(mine.abs().sum() / exact.abs().sum())
    return {"signs": round(signs, 4), "l_X": round(magnitude, 3), "kl": {w: round(v, 4) for w, v in reached.items()}}


def render(result: Record) -> str:
    """The result as a page of Markdown."""
    where = f"{result['cpu']}, torch {result['torch']}, Python {result['python']}"
    lines = [
        "# TRADES' first gradient in half precision",
        "",
        *command_block("python bench/reach.py --data folder:cifar10-jpeg.tar.xz --out docs/results/reach.json"),
        "",
        *paragraph(
            f"Machine: {where}. The docstring of `bench/reach.py` describes the measurement. Network: "
            f"{result['network']}, trained by TRADES-2 for {result['epochs']} epochs on {result['trained']:,} images, and "
            f"attacked on {ASKED:,} other images. In half precision the first gradient is taken at "
            f"{FIRST_GRADIENT_SCALE:g} times the start (`DeltaScale` in `core/inner_attack.py`); in the "
            "last row it is taken at the start itself."
        ),
        "",
        "| | signs that differ from float32's | l_X relative to float32's | "
        + " | ".join(f"KL after {w}" for w in WORDS)
        + " |",
        "|---" * (3 + len(WORDS)) + "|",
    ]
    for side, numbers in result["sides"].items():
        reached = " | ".join(f"{numbers['kl'][word]:.1%}" for word in WORDS)
        lines.append(f"| {side} | {numbers['signs']:.1%} | {numbers['l_X']:.2f} | {reached} |")
    return "\n".join([*lines, "", "KL divergences are in % of those in float32.", ""])


if __name__ == "__main__":
    main()
