"""auto, which chooses k by what training measures, beside M+DEAT, plain ramps and FREE, from three starts.

    python bench/controller_results.py cifar10 --work WORK --data-root FOLDER
    python bench/controller_results.py digits --work WORK

The starts are training from scratch, fine-tuning a network that was trained naturally on the same images, and a few
hundred images. auto was chosen on a part of CIFAR-10, on held-out training images, and is tried on another data set, on
test images. Other rules (bench/controller_rules.py), and sequences of k that are given, are compared with it on the first
one. Every method trains with every seed, and the last epoch is evaluated. Each run is a file of WORK, and one that is there
is not repeated; bench/controller_results_page.py makes the page of them.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from controller_rules import get_method, name_sequence
from shared import cpu_name
from torch import Tensor, nn

import deat
from deat.utils.safe_write import write_json
from deat.version import get_versions

SEEDS = (0, 1, 2, 3, 4)
OURS = "auto+deat"
"""The rule that is tried on all data sets."""
CANDIDATES = ("gap", "least l_X")
"""Those that are compared with it on the first one, beside sequences."""
ATTACKS = ("natural", "pgd-20")


def batch_norm_net() -> nn.Module:
    """Half the resolution, three strided convolutions of 16, 32 and 64 channels with batch norm, and a linear layer."""
    layers: list[nn.Module] = [nn.AvgPool2d(2)]
    for before, after in pairwise((3, 16, 32, 64)):
        layers += [nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 64, 10))


def digits_net() -> nn.Module:
    """The small network for digits, without batch norm."""
    return deat.build_model("small", in_channels=1, image_size=8)


@dataclass(frozen=True)
class Start:
    """What training begins with.

    Args:
        images: The number of training images; None for all of them.
        epochs: The number of epochs.
        lr: The highest learning rate.
        batch_size: Images in a batch.
        ramps: The d of each DEAT-d that it is compared with, so that their backprops bracket those of the rule.
        frees: The m of each FREE-m.
        epochs_before: The epochs of natural training before; 0 for a network with random weights.
        lr_before: Their learning rate.
        sequences: The k of each epoch of methods that spend about as many backprops as the rule, in another order.
    """

    images: int | None
    epochs: int
    lr: float
    batch_size: int
    ramps: tuple[int, ...]
    frees: tuple[int, ...] = ()
    epochs_before: int = 0
    lr_before: float = 0.1
    sequences: tuple[tuple[int, ...], ...] = ()

    @property
    def candidates(self) -> tuple[str, ...]:
        """The other rules, and the sequences."""
        return *CANDIDATES, *map(name_sequence, self.sequences)

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that are trained from this start."""
        return OURS, "m+deat", *(f"deat-{d}" for d in self.ramps), *(f"free-{m}" for m in self.frees)


@dataclass(frozen=True)
class Setup:
    """A data set, a network and its starts.

    Args:
        network: Builds the network.
        eps: The radius of the Linf ball.
        starts: The starts by name.
        test: The first and the last of the images to evaluate on.
        on_held_out: Whether these are training images that no run trains on.
        config: Fields of TrainConfig.
    """

    network: Callable[[], nn.Module]
    eps: float
    starts: dict[str, Start]
    test: tuple[int, int]
    on_held_out: bool = False
    config: dict[str, Any] = field(default_factory=dict)


SETUPS = {
    "cifar10": Setup(
        batch_norm_net,
        8 / 255,
        {
            "scratch": Start(
                2500,
                10,
                0.1,
                128,
                ramps=(2, 3),
                frees=(2, 3),
                sequences=((0,) * 6 + (5,) * 4, (0,) * 7 + (6,) * 3, (1,) * 5 + (3,) * 5, (3,) * 5 + (1,) * 5),
            ),
            "fine-tuned": Start(
                2500,
                6,
                0.03,
                128,
                ramps=(1, 2),
                frees=(3, 4),
                epochs_before=12,
                sequences=((1, 1, 2, 3, 3, 4), (0, 0, 3, 3, 4, 4), (4, 4, 3, 3, 0, 0)),
            ),
            "500 images": Start(500, 20, 0.1, 64, ramps=(3, 4), frees=(3, 4)),
        },
        test=(40_000, 44_000),
        on_held_out=True,
        config={"precision": "bf16"},
    ),
    "digits": Setup(
        digits_net,
        0.15,
        {
            "scratch": Start(None, 20, 0.05, 64, ramps=(2, 3), frees=(4, 5)),
            "fine-tuned": Start(None, 10, 0.02, 64, ramps=(1, 2), frees=(3, 4), epochs_before=15, lr_before=0.05),
            "500 images": Start(500, 30, 0.05, 64, ramps=(4, 6), frees=(3, 4)),
        },
        test=(0, 400),
        config={"precision": "fp32", "cycle_momentum": False},
    ),
}


class Experiment:
    """The runs of a setup, in a folder of records.

    Args:
        setup: The setup.
        data: Its data set.
        folder: The folder of records.
    """

    def __init__(self, setup: Setup, data: deat.DataSplits, folder: Path) -> None:
        self.setup, self.data, self.folder = setup, data, folder
        self.train: Any = data.train

    @cached_property
    def test(self) -> Any:
        """The images to evaluate on."""
        images: Any = self.train if self.setup.on_held_out else self.data.test
        first, last = self.setup.test
        return images.subset(range(len(images))[first:last])

    def fit(self, net: nn.Module, start: Start, method: str, seed: int, **changes: Any) -> Any:
        """Train a network on the images of a start."""
        images = self.train.subset(range(start.images or len(self.train)))
        options = {"epochs": start.epochs, "lr": start.lr, "batch_size": start.batch_size, **self.setup.config}
        return deat.fit(
            net,
            images,
            method=get_method(method),
            threat=deat.Linf(self.setup.eps),
            augment=self.data.augment,
            seed=seed,
            threads=1,
            val_attack="none",
            progress=False,
            **{**options, **changes},
        )

    def natural_weights(self, start: Start, seed: int) -> dict[str, Tensor]:
        """The weights of natural training on the images of a start, made once for each seed."""
        path = self.folder / "natural" / f"{seed}.pt"
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            net = self.network(seed)
            self.fit(net, start, "natural", seed, epochs=start.epochs_before, lr=start.lr_before)
            torch.save(net.state_dict(), path)
        weights: dict[str, Tensor] = torch.load(path, weights_only=True)
        return weights

    def network(self, seed: int) -> nn.Module:
        """A network with random weights, which normalises its input."""
        torch.manual_seed(seed)
        net, data = self.setup.network(), self.data
        return deat.models.add_normalization(net, data.mean, data.std) if data.mean and data.std else net

    def run(self, start_name: str, method: str, seed: int) -> None:
        """Make the record of one training, if it is not there."""
        path = self.folder / "runs" / f"{start_name}-{method}-seed{seed}.json".replace(" ", "-")
        if path.is_file():
            return
        start = self.setup.starts[start_name]
        net = self.network(seed)
        if start.epochs_before:
            net.load_state_dict(self.natural_weights(start, seed))
        result = self.fit(net, start, method, seed)
        evaluation = deat.evaluate(
            result.model,
            self.test,
            threat=deat.Linf(self.setup.eps),
            attacks=ATTACKS,
            seed=seed,
            sanity=False,
            progress=False,
        )
        last = result.history[-1]
        batches = -(-last.examples // start.batch_size)
        record = {
            "start": start_name,
            "method": method,
            "seed": seed,
            "backprops a batch": last.backprops / batches,
            "passes": last.passes,
            "backprops": last.backprops,
            "k": [stats.k for stats in result.history],
            "magnitude": [stats.magnitude for stats in result.history],
            "loss": [stats.loss for stats in result.history],
            "measured": [stats.measured for stats in result.history],
            "accuracy": evaluation.accuracy,
            "images": evaluation.num_images,
            "record": result.record,
            "machine": {"cpu": cpu_name(), "versions": get_versions()},
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, record)
        scores = ", ".join(f"{name} {100 * evaluation.accuracy[name]:.1f}" for name in ATTACKS)
        print(f"{path.stem}: k {record['k']}, {record['backprops a batch']:g} backprops a batch, {scores}", flush=True)


def main() -> None:
    """Make what is missing of a setup's runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setup", choices=SETUPS)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--data-root", help="the folder that the data set is in")
    parser.add_argument("--starts", nargs="+", help="make these starts only")
    parser.add_argument(
        "--candidates", action="store_true", help="make the runs of the other rules and the sequences instead"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="make these seeds only")
    args = parser.parse_args()
    setup = SETUPS[args.setup]
    torch.set_num_threads(1)
    experiment = Experiment(setup, deat.load_data(args.setup, root=args.data_root), args.work / args.setup)
    for seed in args.seeds:
        for name, start in setup.starts.items():
            methods = start.candidates if args.candidates else start.methods
            for method in methods if not args.starts or name in args.starts else ():
                experiment.run(name, method, seed)


if __name__ == "__main__":
    main()
