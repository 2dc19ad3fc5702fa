"""Training against three norms at once: the four rules that pick a ball, beside training on single balls.

    python bench/union_results.py digits --work WORK
    python bench/union_results.py cifar10 --work WORK --data-root FOLDER
    python bench/union_results.py cifar10-apart --work WORK --data-root FOLDER

First the radii are chosen on held-out training images. `digits` and `cifar10` take those of L2 and L1 at which M+DEAT on
that ball alone is as robust in it as M+DEAT on the Linf ball is in that. `cifar10-apart` takes those at which no ball
dominates: M+DEAT on each ball alone falls short of the best of the others in some ball, and by as much as there is.
Then M+DEAT trains on every ball and on their union by every rule, with three seeds, and the last epoch is evaluated on
test images in every ball. Each run is a file of WORK, and one that is there is not repeated.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from shared import cpu_name
from torch import nn

import deat
from deat.threat import UNION_RULES, parse_threat
from deat.utils.safe_write import write_json
from deat.version import get_versions

SEEDS, TRIAL_SEED = (0, 1, 2), 100
METHOD = "m+deat"
TRIAL_ATTACK = "apgd-ce"


@dataclass(frozen=True)
class Setup:
    """A data set, a network and how it is trained.

    Args:
        network: Builds the network.
        radii: The radii of each norm that are tried.
        choose: Chooses one ball of each norm, by trials.
        config: Fields of TrainConfig.
        train: The number of training images; None for all of them.
        held_out: The number of training images that trials leave out, to choose radii by.
        test: The number of test images.
        trial_epochs: The epochs of trials, if not those of the runs.
        attacks: The attacks of the evaluation.
        data: The name of the data set, if it is not that of the setup.
    """

    network: Callable[[], nn.Module]
    radii: dict[str, tuple[float, ...]]
    choose: "Callable[[Experiment], tuple[str, ...]]"
    config: dict[str, Any] = field(default_factory=dict)
    train: int | None = None
    held_out: int = 300
    test: int = 400
    attacks: tuple[str, ...] = ("natural", "pgd-20", "cw-20", "apgd-ce")
    trial_epochs: int | None = None
    data: str = ""

    def fit(
        self, data: deat.DataSplits, images: Any, threat: deat.ThreatModel, seed: int, epochs: int | None = None
    ) -> Any:
        """Train on some images."""
        torch.manual_seed(seed)
        return deat.fit(
            self.network(),
            images,
            method=METHOD,
            threat=threat,
            augment=data.augment,
            normalize=(data.mean, data.std) if data.mean and data.std else None,
            seed=seed,
            threads=1,
            progress=False,
            **{"precision": "fp32", **self.config, **({"epochs": epochs} if epochs else {})},
        )


def choose_equally_hard(experiment: "Experiment") -> tuple[str, ...]:
    """The first ball, and of the others those in which training on them alone is nearest to as robust."""
    (first,), *others = experiment.candidates

    def distance(threat: str) -> float:
        target, accuracy = (experiment.trial(ball)["accuracy"][TRIAL_ATTACK] for ball in (first, threat))
        return abs(float(accuracy) - float(target))

    return first, *(min(balls, key=distance) for balls in others)


def choose_apart(experiment: "Experiment") -> tuple[str, ...]:
    """The balls at which training on one alone falls furthest short, for that single ball which does so least."""
    return max(product(*experiment.candidates), key=lambda balls: min(shortfalls(experiment.cross_trials, balls)))


def shortfalls(accuracies: dict[str, dict[str, float]], balls: tuple[str, ...]) -> list[float]:
    """How far training on each ball alone is behind the best of them, in the ball where that is most.

    Args:
        accuracies: By the ball that was trained on, the accuracy in every ball.
        balls: The balls.
    """
    best = {ball: max(accuracies[trained][ball] for trained in balls) for ball in balls}
    return [max(best[ball] - accuracies[trained][ball] for ball in balls) for trained in balls]


SETUPS = {
    "digits": Setup(
        lambda: deat.build_model("small", in_channels=1, image_size=8),
        {"linf": (0.15,), "l2": (0.4, 0.5, 0.6), "l1": (0.6, 0.8, 1.0, 1.3)},
        choose_equally_hard,
        {"epochs": 15, "batch_size": 64, "lr": 0.02, "peak": 0.3, "cycle_momentum": False},
    ),
    "cifar10": Setup(
        lambda: deat.build_model("preact_resnet8", num_classes=10),
        {"linf": (4 / 255,), "l2": (0.4, 0.55), "l1": (6.0, 9.0)},
        choose_equally_hard,
        {"epochs": 8, "batch_size": 64, "lr": 0.1, "precision": "bf16"},
        train=4000,
        held_out=500,
        test=400,
        attacks=("natural", "pgd-20", "apgd-ce"),
    ),
    "cifar10-apart": Setup(
        lambda: deat.build_model("preact_resnet8", num_classes=10),
        {"linf": (4 / 255, 8 / 255), "l2": (0.25,), "l1": (12.0,)},
        choose_apart,
        {"epochs": 6, "batch_size": 64, "lr": 0.1, "precision": "bf16"},
        train=4000,
        held_out=300,
        test=300,
        trial_epochs=8,
        attacks=("natural", "apgd-ce"),
        data="cifar10",
    ),
}


class Experiment:
    """The trials and runs of a setup, in a folder of records.

    Args:
        setup: The setup.
        data: Its data set.
        folder: The folder of records.
    """

    def __init__(self, setup: Setup, data: deat.DataSplits, folder: Path) -> None:
        self.setup, self.data, self.folder = setup, data, folder
        self.images: Any = data.train.subset(range(setup.train or len(data.train)))
        test: Any = data.test
        self.test = test.subset(range(min(setup.test, len(test))))

    def record(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The record of that name, made now if it is not there."""
        path = self.folder / f"{name}.json"
        if not path.is_file():
            result = {**make(), "machine": {"cpu": cpu_name(), "versions": get_versions()}}
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, result)
            print(name, flush=True)
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    @property
    def candidates(self) -> list[list[str]]:
        """The balls that are tried, by norm."""
        return [[f"{norm}:{eps!r}" for eps in radii] for norm, radii in self.setup.radii.items()]

    def trial(self, threat: str) -> dict[str, Any]:
        """Training on one ball, and its robust accuracy there on held-out training images."""

        def make() -> dict[str, Any]:
            scores = self._train_and_evaluate(threat, [threat])[threat]
            return {"threat": threat, "accuracy": scores.accuracy, "images": scores.num_images}

        return self.record(f"trials/{threat.replace(':', '-')}", make)

    @cached_property
    def cross_trials(self) -> dict[str, dict[str, float]]:
        """By each ball that was trained on alone, the robust accuracy in every one, on held-out training images."""
        balls = [ball for norm in self.candidates for ball in norm]
        trials = [self.record(f"trials/{ball.replace(':', '-')}", partial(self._cross_trial, ball)) for ball in balls]
        return {trial["threat"]: trial["in"] for trial in trials}

    def _cross_trial(self, threat: str) -> dict[str, Any]:
        scores = self._train_and_evaluate(threat, [ball for norm in self.candidates for ball in norm])
        accuracy = {ball: one.accuracy[TRIAL_ATTACK] for ball, one in scores.items()}
        own = scores[threat]
        return {"threat": threat, "accuracy": own.accuracy, "in": accuracy, "images": own.num_images}

    def _train_and_evaluate(self, threat: str, balls: list[str]) -> dict[str, deat.Evaluation]:
        train, held_out = self.images.split(self.setup.held_out, TRIAL_SEED)
        model = self.setup.fit(self.data, train, parse_threat(threat), TRIAL_SEED, self.setup.trial_epochs).model
        attacks = ["natural", TRIAL_ATTACK]
        return {
            ball: deat.evaluate(model, held_out, threat=ball, attacks=attacks, sanity=False, progress=False)
            for ball in balls
        }

    @cached_property
    def balls(self) -> tuple[str, ...]:
        """The balls of the union."""
        return self.setup.choose(self)

    @property
    def threats(self) -> dict[str, deat.ThreatModel]:
        """What is trained on, by its name in files and tables."""
        singles = {ball.partition(":")[0]: parse_threat(ball) for ball in self.balls}
        return singles | {rule: deat.Union(*self.balls, rule=rule) for rule in UNION_RULES}

    def run(self, name: str, threat: deat.ThreatModel, seed: int) -> dict[str, Any]:
        """One training on all training images, and the evaluation of its last epoch on test images in every ball."""

        def make() -> dict[str, Any]:
            result = self.setup.fit(self.data, self.images, threat, seed)
            union = deat.Union(*self.balls)
            evaluation = deat.evaluate(
                result.model,
                self.test,
                threat=union,
                attacks=self.setup.attacks,
                seed=seed,
                sanity=False,
                progress=False,
            )
            return {
                "trained_on": name,
                "seed": seed,
                "backprops": result.history[-1].backprops,
                "passes": result.history[-1].passes,
                "k": [stats.k for stats in result.history],
                "record": result.record,
                "evaluation": evaluation.as_json(),
            }

        return self.record(f"runs/{name}-{seed}", make)


def main() -> None:
    """Make what is missing of a setup's trials and runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setup", choices=SETUPS)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--data-root", help="the folder that CIFAR-10 is in")
    parser.add_argument("--trials", action="store_true", help="make the trials only, and print the balls")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="make these runs only")
    parser.add_argument("--only", nargs="+", help="train on these only: a norm, or a rule of the union")
    args = parser.parse_args()
    setup = SETUPS[args.setup]
    torch.set_num_threads(1)
    data = deat.load_data(setup.data or args.setup, root=args.data_root)
    experiment = Experiment(setup, data, args.work / args.setup)
    print(args.setup, *experiment.balls, flush=True)
    for seed in () if args.trials else args.seeds:
        for name, threat in experiment.threats.items():
            if args.only is None or name in args.only:
                experiment.run(name, threat, seed)


if __name__ == "__main__":
    main()
