"""Training against three norms at once: the four rules that pick a ball beside training on single balls.

    python bench/union_results.py digits --work WORK
    python bench/union_results.py cifar10 --work WORK --data cifar10:FOLDER

First the radii of the L2 and the L1 ball are chosen on held-out training images: those at which PGD-AT on that ball alone
is as robust in it as PGD-AT on the Linf ball of the usual radius is in that. So the balls are equally hard. Then every
method trains on every ball and on their union by every rule, with three seeds, and the last epoch is evaluated on test
images in every ball. Each run is a file of WORK, and one that is there is not repeated.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from shared import cpu_name
from torch import nn

import deat
from deat.data import ImageSet
from deat.threat import UNION_RULES, parse_threat
from deat.utils.safe_write import write_json
from deat.version import get_versions

SEEDS, TRIAL_SEED = (0, 1, 2), 100
METHODS = ("pgd-7", "m+deat")
NORMS = ("linf", "l2", "l1")
TRIAL_ATTACK, ATTACKS = "cw-20", ("natural", "pgd-50", "cw-50")
AUTOATTACK_IMAGES = 200


@dataclass(frozen=True)
class Setup:
    """A data set, a network and how it is trained.

    Args:
        name: The name in files and commands.
        data: The data set's name; None to take it from the command.
        network: Builds the network.
        linf: The radius of the Linf ball.
        grids: The radii of the other balls that are tried.
        config: Fields of TrainConfig.
        train: The number of training images; None for all of them.
        held_out: The number of training images that trials leave out, to choose radii by.
        test: The number of test images; None for all of them.
    """

    name: str
    data: str | None
    network: Callable[[], nn.Module]
    linf: float
    grids: dict[str, tuple[float, ...]]
    config: dict[str, Any] = field(default_factory=dict)
    train: int | None = None
    held_out: int = 300
    test: int | None = None

    def fit(self, data: deat.DataSplits, images: Any, method: str, threat: deat.ThreatModel, seed: int) -> Any:
        """Train on some images."""
        torch.manual_seed(seed)
        return deat.fit(
            self.network(),
            images,
            method=method,
            threat=threat,
            augment=data.augment,
            normalize=(data.mean, data.std) if data.mean else None,
            seed=seed,
            precision="fp32",
            progress=False,
            **self.config,
        )


SETUPS = {
    setup.name: setup
    for setup in (
        Setup(
            "digits",
            "digits",
            lambda: deat.build_model("small", in_channels=1, image_size=8),
            0.15,
            {"l2": (0.5, 0.6, 0.7, 0.8, 0.9, 1.0), "l1": (1.0, 1.3, 1.6, 2.0, 2.5, 3.0)},
            {"epochs": 20, "batch_size": 64, "lr": 0.05, "peak": 0.3, "cycle_momentum": False, "threads": 1},
        ),
        Setup(
            "cifar10",
            None,
            lambda: deat.build_model("preact_resnet8", num_classes=10),
            8 / 255,
            {"l2": (0.5, 0.75, 1.0, 1.25), "l1": (4.0, 6.0, 9.0, 12.0)},
            {"epochs": 10, "batch_size": 128, "lr": 0.1, "threads": 1},
            train=5000,
            held_out=1000,
            test=1000,
        ),
    )
}


class Experiment:
    """The trials and runs of a setup, in a folder of records."""

    def __init__(self, setup: Setup, data: deat.DataSplits, folder: Path) -> None:
        self.setup, self.data, self.folder = setup, data, folder
        self.images: ImageSet = data.train.subset(range(setup.train or len(data.train)))

    def record(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The record of that name, made now if it is not there."""
        path = self.folder / f"{name}.json"
        if not path.is_file():
            machine = {"cpu": cpu_name(), "threads": torch.get_num_threads(), "versions": get_versions()}
            write_json(path, {**make(), "machine": machine})
            print(name, flush=True)
        result: dict[str, Any] = json.loads(path.read_text())
        return result

    def trial(self, threat: str) -> dict[str, Any]:
        """PGD-AT on one ball, and its robust accuracy there on held-out training images."""

        def make() -> dict[str, Any]:
            train, held_out = self.images.split(self.setup.held_out, TRIAL_SEED)
            result = self.setup.fit(self.data, train, "pgd-7", parse_threat(threat), TRIAL_SEED)
            scores = deat.evaluate(
                result.model, held_out, threat=threat, attacks=["natural", TRIAL_ATTACK], sanity=False, progress=False
            )
            return {"threat": threat, "accuracy": scores.accuracy, "images": scores.num_images}

        return self.record(f"trials/{threat.replace(':', '-')}", make)

    @cached_property
    def balls(self) -> tuple[str, ...]:
        """The Linf ball, and the balls of the other norms in which PGD-AT on them alone is nearest to as robust."""
        linf = f"linf:{self.setup.linf!r}"
        target = self.trial(linf)["accuracy"][TRIAL_ATTACK]
        others = [
            min(
                (f"{norm}:{eps!r}" for eps in self.setup.grids[norm]),
                key=lambda threat: abs(self.trial(threat)["accuracy"][TRIAL_ATTACK] - target),
            )
            for norm in NORMS[1:]
        ]
        return linf, *others

    def threats(self) -> dict[str, deat.ThreatModel]:
        """What is trained on, by its name in files and tables."""
        singles = {ball.partition(":")[0]: parse_threat(ball) for ball in self.balls}
        return singles | {rule: deat.Union(*self.balls, rule=rule) for rule in UNION_RULES}

    def run(self, method: str, name: str, threat: deat.ThreatModel, seed: int) -> dict[str, Any]:
        """One training on all training images, and the evaluation of its last epoch on test images in every ball."""

        def make() -> dict[str, Any]:
            result = self.setup.fit(self.data, self.images, method, threat, seed)
            test, union = self.data.test, deat.Union(*self.balls)
            count = self.setup.test or len(test)
            options = {"threat": union, "seed": seed, "progress": False}
            evaluation = deat.evaluate(
                result.model, test.subset(range(count)), attacks=ATTACKS, sanity=False, **options
            )
            strongest = deat.evaluate(
                result.model,
                test.subset(range(min(AUTOATTACK_IMAGES, count))),
                attacks=["aa"],
                sanity=False,
                **options,
            )
            return {
                "method": method,
                "trained_on": name,
                "threat": threat.describe(),
                "seed": seed,
                "backprops": result.history[-1].backprops,
                "passes": result.history[-1].passes,
                "k": [stats.k for stats in result.history],
                "record": result.record,
                "evaluation": evaluation.as_json(),
                "autoattack": strongest.as_json(),
            }

        return self.record(f"runs/{method}-{name}-{seed}", make)


def main() -> None:
    """Make what is missing of a setup's trials and runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setup", choices=SETUPS)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--data", help="the data set, such as cifar10:FOLDER")
    parser.add_argument("--trials", action="store_true", help="make the trials only, and print the radii")
    args = parser.parse_args()
    setup = SETUPS[args.setup]
    torch.set_num_threads(1)
    experiment = Experiment(setup, deat.load_data(args.data or setup.data), args.work / setup.name)
    print(setup.name, *experiment.balls, flush=True)
    if args.trials:
        return
    for seed in SEEDS:
        for method in METHODS:
            for name, threat in experiment.threats().items():
                experiment.run(method, name, threat, seed)


if __name__ == "__main__":
    main()
