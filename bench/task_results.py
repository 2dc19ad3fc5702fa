"""Adversarial training on five tasks with real data: spoken digits, street scenes (masks, and labels), two tables.

    python bench/task_results.py --data-root DATA --work WORK

DATA has fsdd/, camvid96/, breast_cancer.csv and diabetes.csv; `--write-tables` writes the two tables, from scikit-learn.
Learning rates and radii are chosen by trials on validation data. Then every method trains with three seeds on all
training examples, and the last epoch is evaluated on the test examples. Each run is a file of the output folder, and one
that is there is not repeated. A run that was interrupted resumes from its last epoch.
"""

import argparse
import csv
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from time import perf_counter

import torch
from shared import Record, cpu_name
from task_results_page import Rows, draw, render
from torch import Tensor, nn

import deat
from deat.data import ImageSet
from deat.evaluation.evaluator import DEFAULT_BLOCK_SIZE
from deat.models.small_networks import UNet
from deat.tasks import Classification, MultiLabel, Regression, Segmentation, Task
from deat.training.training_cost import backprop_bounds
from deat.utils.safe_write import write_json
from deat.version import get_versions

SEEDS, TRIAL_SEED = (0, 1, 2), 100
METHODS = ("natural", "pgd-7", "m+deat", "m+trades")
COMMAND = """python bench/task_results.py --data-root DATA --write-tables
python bench/task_results.py --data-root DATA
python bench/task_results.py --data-root DATA --penalties"""
SHORT = "pgd-7 short"
"""PGD-AT with as many epochs as the backprops of M+DEAT with the same seed pay for."""
PENALISED = {"natural": "natural", "deat-3": "m+deat"}
"""Methods that are trained with and without g+, and the method whose learning rate they take."""
HELD_OUT = 0.2
PRESENT, RARE, COMMON = 0.01, 0.05, 0.95
"""A class is present if it covers this part of an image; classes that fewer or more of the images have are left out."""
VOID = 11
CLASSES = ("sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist")
SAMPLES = 3072


@dataclass(frozen=True)
class Setup:
    """A task on one data set.

    Args:
        name: The name in files and commands.
        read: Reads the data below a folder.
        network: Builds the network.
        metric: The metric that trials choose by.
        epochs: Number of epochs.
        batch_size: Examples in a batch.
        lrs: Learning rates that are tried.
        radii: Radii that are tried; learning rates are tried at the second one.
        attacks: Attacks on the test examples.
        trial_share: The part of the epochs that a trial trains for.
        precision: What training computes in.
        sanity: Whether the runs are evaluated with sanity checks.
    """

    name: str
    read: Callable[[Path], deat.DataSplits]
    network: Callable[[int, int], nn.Module]
    metric: str
    epochs: int
    batch_size: int
    lrs: tuple[float, ...]
    radii: tuple[float, ...]
    attacks: tuple[str, ...] = ("natural", "pgd-20")
    trial_share: float = 0.5
    precision: str = "fp32"
    sanity: bool = True

    @property
    def is_quick(self) -> bool:
        """Whether a run takes seconds, so that it is repeated rather than resumed."""
        return self.trial_share == 1


def wave_net(num_classes: int, in_channels: int) -> nn.Module:
    """A 1D CNN of four strided convolutions and 46,000 weights, for waveforms."""
    layers: list[nn.Module] = []
    sizes = ((64, 8), (5, 2), (5, 2), (3, 2))
    for (before, after), (kernel, stride) in zip(pairwise((in_channels, 32, 64, 64, 64)), sizes, strict=True):
        conv = nn.Conv1d(before, after, kernel, stride, kernel // 2, bias=False)
        layers += [conv, nn.BatchNorm1d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(64, num_classes))


def street_net(num_classes: int, in_channels: int) -> nn.Module:
    """A U-Net of 120,000 weights at half the resolution, whose logits are enlarged to that of the image."""
    unet = UNet(num_classes, 4 * in_channels, (16, 32, 64))
    return nn.Sequential(nn.PixelUnshuffle(2), unet, nn.Upsample(scale_factor=2, mode="bilinear"))


def presence_net(num_labels: int, in_channels: int) -> nn.Module:
    """A CNN of four strided convolutions and 61,000 weights, at half the resolution."""
    layers: list[nn.Module] = [nn.AvgPool2d(2)]
    for before, after in pairwise((in_channels, 16, 32, 64, 64)):
        layers += [nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, num_labels))


def read_streets(root: Path) -> deat.DataSplits:
    """CamVid at 128x96 with masks."""
    return deat.load_data(f"segmentation:{root / 'camvid96'}", task=Segmentation(ignore_index=VOID))


def read_presence(root: Path) -> deat.DataSplits:
    """CamVid's images with a label for each class: whether it covers 1 % of the image.

    The data's own validation part is a single drive, on which half of the classes are in every image. So it is left out.
    """
    streets = read_streets(root)
    parts = {name: _in_memory(getattr(streets, name)) for name in ("train", "test")}
    present = {
        name: torch.stack([(part.labels == c).double().mean((1, 2)) >= PRESENT for c in range(VOID)], 1).long()
        for name, part in parts.items()
    }
    share = present["train"].double().mean(0)
    kept = [c for c in range(VOID) if RARE <= share[c] <= COMMON]
    names = tuple(CLASSES[c] for c in kept)
    sets = {name: ImageSet(part.images, present[name][:, kept], names, MultiLabel()) for name, part in parts.items()}
    return replace(streets, train=sets["train"], val=None, test=sets["test"])


SETUPS = {
    setup.name: setup
    for setup in (
        Setup(
            "breast-cancer",
            lambda root: deat.load_data(f"csv:{root / 'breast_cancer.csv'}", target="diagnosis"),
            lambda outputs, features: deat.build_model("mlp", outputs, features),
            "accuracy",
            60,
            32,
            (0.003, 0.01, 0.03, 0.1),
            (0.1, 0.2, 0.4),
            trial_share=1,
        ),
        Setup(
            "diabetes",
            lambda root: deat.load_data(f"csv:{root / 'diabetes.csv'}", target="progression"),
            lambda outputs, features: deat.build_model("mlp", outputs, features),
            "R2",
            30,
            32,
            (0.001, 0.003, 0.01, 0.03),
            (0.05, 0.1, 0.2),
            trial_share=1,
        ),
        Setup(
            "spoken-digits",
            lambda root: deat.load_data(f"audio:{root / 'fsdd'}", size=SAMPLES),
            wave_net,
            "accuracy",
            12,
            64,
            (0.05, 0.2),
            (0.001, 0.002, 0.005),
            precision="bf16",
        ),
        Setup(
            "street-presence",
            read_presence,
            presence_net,
            "mAP",
            12,
            8,
            (0.02, 0.1),
            (1 / 255, 2 / 255, 4 / 255),
            sanity=False,
        ),
        Setup(
            "street-masks",
            read_streets,
            street_net,
            "mIoU",
            5,
            8,
            (0.05, 0.2),
            (1 / 255, 2 / 255, 4 / 255),
            trial_share=4 / 5,
            precision="bf16",
            sanity=False,
        ),
    )
}


@dataclass(frozen=True)
class Job:
    """One training and its evaluation."""

    setup: Setup
    method: str
    seed: int
    lr: float
    eps: float
    epochs: int
    label: str
    is_trial: bool = False

    @property
    def file_name(self) -> str:
        """Where its record is, below the output folder."""
        label = self.label.replace(" ", "-")
        if self.is_trial:
            return f"trials/{self.setup.name}-{label}-lr{self.lr:g}-eps{self.eps:.4g}.json"
        return f"runs/{self.setup.name}-{label}-seed{self.seed}.json"


class Study:
    """The jobs of a task, and the folders for its records and for unfinished runs."""

    def __init__(self, setup: Setup, root: Path, out: Path, work: Path) -> None:
        self.setup, self.root, self.out, self.work = setup, root, out, work

    @cached_property
    def splits(self) -> deat.DataSplits:
        """The data."""
        return self.setup.read(self.root)

    @cached_property
    def trial_parts(self) -> tuple[ImageSet, ImageSet]:
        """Training and validation examples of the trials: the data's own validation part, or a fifth held out."""
        train = _in_memory(self.splits.train)
        if self.splits.val is not None:
            return train, _in_memory(self.splits.val)
        return train.split(round(HELD_OUT * len(train)), TRIAL_SEED)

    @cached_property
    def final_parts(self) -> tuple[ImageSet, ImageSet]:
        """All training examples, and the test examples."""
        return _in_memory(self.splits.train), _in_memory(self.splits.test)

    def run(self, seeds: Sequence[int]) -> None:
        """Run what is not there yet."""
        chosen = self.choose()
        for seed in seeds:
            for method in METHODS:
                self.record(
                    Job(self.setup, method, seed, chosen["lr"][method], chosen["eps"], self.setup.epochs, method)
                )
            self.record(self.short_job(seed, chosen))

    def run_penalties(self, seeds: Sequence[int]) -> None:
        """Run g+ on and off at equal backprops, at the learning rates of natural training and of M+DEAT."""
        chosen, epochs = self.choose(), self.setup.epochs
        for seed in seeds:
            for base, tuned_as in PENALISED.items():
                for method, length in ((base, epochs), (f"g+{base}", self.epochs_at_equal_cost(base, epochs))):
                    self.record(Job(self.setup, method, seed, chosen["lr"][tuned_as], chosen["eps"], length, method))

    def epochs_at_equal_cost(self, base: str, epochs: int) -> int:
        """The number of epochs of g+ whose backprops are closest to those of the method without it."""

        def cost(method: str, epochs: int) -> int:
            found = deat.get_method(method)
            return backprop_bounds(found, found.bind(deat.Linf(1.0), epochs), epochs)[1]

        return min(range(1, epochs + 1), key=lambda length: abs(cost(f"g+{base}", length) - cost(base, epochs)))

    def short_job(self, seed: int, chosen: Record) -> Job:
        """PGD-AT at the backprops of M+DEAT."""
        full, ours = (
            read_record(self.out / f"runs/{self.setup.name}-{m}-seed{seed}.json") for m in ("pgd-7", "m+deat")
        )
        epochs = max(1, round(ours["backprops"] / (full["backprops"] / full["epochs"])))
        return Job(self.setup, "pgd-7", seed, chosen["lr"]["pgd-7"], chosen["eps"], epochs, SHORT)

    def choose(self) -> Record:
        """Choose each method's learning rate by trials at the second radius, then the radius by PGD-AT."""
        setup = self.setup
        epochs = max(1, round(setup.trial_share * setup.epochs))

        def score(method: str, lr: float, eps: float, attack: str) -> float:
            found = self.record(Job(setup, method, TRIAL_SEED, lr, eps, epochs, method, is_trial=True))
            return float(found["metrics"][attack][setup.metric])

        middle = setup.radii[1]
        lrs = {
            method: max(setup.lrs, key=partial(score, method, eps=middle, attack=attack))
            for method, attack in zip(METHODS, ("natural", "pgd-10", "pgd-10", "pgd-10"), strict=True)
        }
        natural = score("natural", lrs["natural"], middle, "natural")
        constant = constant_answer(*self.trial_parts)[setup.metric]
        least = constant + (natural - constant) / 2
        robust = {middle: score("pgd-7", lrs["pgd-7"], middle, "pgd-10")}
        for eps in sorted(setup.radii, reverse=True):
            robust[eps] = score("pgd-7", lrs["pgd-7"], eps, "pgd-10")
            if robust[eps] >= least:
                break
        chosen = {
            "task": setup.name,
            "metric": setup.metric,
            "lr": lrs,
            "lrs": setup.lrs,
            "eps": eps,
            "radii": setup.radii,
            "natural": natural,
            "constant": constant,
            "least": least,
            "robust": {f"{eps:.4g}": value for eps, value in robust.items()},
            "trial_epochs": epochs,
            "trained_on": len(self.trial_parts[0]),
            "validated_on": len(self.trial_parts[1]),
            "test_constant": constant_answer(*self.final_parts),
            "eps_over_scale": self.splits.scale is not None,
        }
        self.out.mkdir(parents=True, exist_ok=True)
        write_json(self.out / f"trials/{setup.name}.json", chosen)
        return chosen

    def record(self, job: Job) -> Record:
        """The record of a job: that of an earlier run, or of one made now."""
        path = self.out / job.file_name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            print(f"{job.file_name}: {job.epochs} epochs", flush=True)
            found = self.play(job)
            write_json(path, found)
            shown = {attack: {m: round(v, 4) for m, v in values.items()} for attack, values in found["metrics"].items()}
            print(f"  {found['backprops']} backprops, {found['train_seconds']:.0f} s, {shown}", flush=True)
        return read_record(path)

    def play(self, job: Job) -> Record:
        """Train and evaluate."""
        setup, (train, test) = self.setup, self.trial_parts if job.is_trial else self.final_parts
        folder = self.work / Path(job.file_name).with_suffix("")
        features = {name: getattr(self.splits, name) for name in ("box", "scale", "mutable")}
        threat = deat.Linf(job.eps, **features)
        torch.manual_seed(job.seed)
        net = setup.network(train.num_classes, train.shape[0])
        weights = sum(p.numel() for p in net.parameters())
        result = deat.fit(
            net,
            train,
            method=job.method,
            threat=threat,
            epochs=job.epochs,
            batch_size=setup.batch_size,
            lr=job.lr,
            seed=job.seed,
            normalize="data",
            precision=setup.precision,
            val_attack="none",
            threads=1,
            checkpoints=None if setup.is_quick else folder,
            progress=False,
        )
        started = perf_counter()
        evaluation = deat.evaluate(
            result.model,
            test,
            threat=threat,
            attacks=("natural", "pgd-10") if job.is_trial else setup.attacks,
            block=min(DEFAULT_BLOCK_SIZE, 64 if train.task.name == "segmentation" else DEFAULT_BLOCK_SIZE),
            resume_log=None if setup.is_quick else folder / ".evaluation.jsonl",
            sanity=setup.sanity and not job.is_trial,
            threads=1,
            progress=False,
        )
        columns = ("k", "backprops", "loss", "train_accuracy", "magnitude")
        return {
            "task": setup.name,
            "label": job.label,
            "method": job.method,
            "seed": job.seed,
            "threat": f"linf:{job.eps!r}",
            "eps": job.eps,
            "snr_db": signal_to_noise(test.images, job.eps) if setup.name == "spoken-digits" else None,
            "lr": job.lr,
            "epochs": job.epochs,
            "batch_size": setup.batch_size,
            "weights": weights,
            "train_examples": len(train),
            "test_examples": len(test),
            "backprops": result.history[-1].backprops,
            "metrics": evaluation.metrics,
            "intervals": evaluation.metric_intervals,
            "sanity": evaluation.sanity_checked,
            "flags": [flag.line for flag in evaluation.flags],
            "notes": list(result.notes),
            "history": {name: [_rounded(getattr(stats, name)) for stats in result.history] for name in columns},
            "train_seconds": round(result.seconds, 1),
            "evaluation_seconds": round(perf_counter() - started, 1),
            "precision": result.record["settings"]["precision"],
            "cpu": cpu_name(),
            **get_versions(),
        }


def constant_answer(train: ImageSet, test: ImageSet) -> dict[str, float]:
    """The metrics of the best answer that does not look at the input: the most common class, the mean."""
    task: Task = train.task
    labels = train.labels
    if isinstance(task, Regression):
        answer = torch.zeros(1)
    elif isinstance(task, MultiLabel):
        answer = labels.double().mean(0) - 0.5
    else:
        counted = labels[labels != VOID] if isinstance(task, Segmentation) else labels
        answer = counted.bincount(minlength=train.num_classes).double()
    shape = (
        (len(test), len(answer), *test.labels.shape[1:]) if isinstance(task, Segmentation) else (len(test), len(answer))
    )
    outputs = answer.view(1, -1, *[1] * (len(shape) - 2)).expand(shape)
    if isinstance(task, Classification):
        return {"accuracy": float(task.is_right(outputs, test.labels).double().mean())}
    return task.summarize(task.statistics(outputs, test.labels))


def signal_to_noise(waves: Tensor, eps: float) -> float:
    """The mean over recordings of 20 log10(rms of the recording / rms of the largest perturbation, which is eps)."""
    rms = waves.double().pow(2).flatten(1).mean(1).sqrt()
    return float((20 * torch.log10(rms / eps)).mean())


def write_page(out: Path) -> None:
    """Write the page and its figure from the records of the tasks and seeds that all methods have."""
    tasks, trials = [], []
    for name, setup in SETUPS.items():
        records = [read_record(file) for file in sorted((out / "runs").glob(f"{name}-*.json"))]
        done = {(record["seed"], record["label"]) for record in records}
        seeds = [seed for seed in SEEDS if all((seed, label) in done for label in METHODS)]
        if seeds:
            shown = [record for record in records if record["seed"] in seeds]
            tasks.append(Rows(name, shown, read_record(out / f"trials/{name}.json")))
        elif (chosen := out / f"trials/{name}.json").exists():
            tried = [
                read_record(file) for file in sorted((out / "trials").glob(f"{name}-*-eps{setup.radii[1]:.4g}.json"))
            ]
            trials.append(Rows(name, tried, read_record(chosen)))
    draw(tasks, out / "robustness.svg")
    (out / "README.md").write_text(render(tasks, COMMAND, trials), encoding="utf-8")


def read_record(file: Path) -> Record:
    """A record from its file."""
    record: Record = json.loads(file.read_text(encoding="utf-8"))
    return record


def write_tables(root: Path) -> None:
    """Write the tables of scikit-learn as CSV files. The sex of a patient becomes a category, which cannot change."""
    from sklearn.datasets import load_breast_cancer, load_diabetes  # type: ignore[import-not-found,unused-ignore]

    cancer, diabetes = load_breast_cancer(), load_diabetes(scaled=False)
    sex = list(diabetes.feature_names).index("sex")
    tables = {
        "breast_cancer.csv": (
            [*cancer.feature_names, "diagnosis"],
            [[*row, cancer.target_names[y]] for row, y in zip(cancer.data.tolist(), cancer.target, strict=True)],
        ),
        "diabetes.csv": (
            [*diabetes.feature_names, "progression"],
            [
                [*(f"sex {value:.0f}" if i == sex else value for i, value in enumerate(row)), y]
                for row, y in zip(diabetes.data.tolist(), diabetes.target.tolist(), strict=True)
            ],
        ),
    }
    for name, (header, rows) in tables.items():
        with (root / name).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([header, *rows])


def _in_memory(images: object) -> ImageSet:
    assert isinstance(images, ImageSet)
    return images


def _rounded(value: float | None) -> float | None:
    return value if value is None or isinstance(value, int) or not math.isfinite(value) else float(f"{value:.5g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, help="the folder of the data")
    parser.add_argument("--work", type=Path, default=Path("runs/tasks"), help="the folder of unfinished runs")
    parser.add_argument("--out", type=Path, default=Path("docs/results/tasks"), help="the folder of the records")
    parser.add_argument("--tasks", default=",".join(SETUPS), help=f"some of {', '.join(SETUPS)}")
    parser.add_argument("--seeds", default="0,1,2", help="some of them: several processes may share the work")
    parser.add_argument("--penalties", action="store_true", help="run g+ on and off instead")
    parser.add_argument(
        "--write-tables", action="store_true", help="write breast_cancer.csv and diabetes.csv, and stop"
    )
    parser.add_argument("--page-only", action="store_true", help="make the page from the records that are there")
    args = parser.parse_args()
    if not args.page_only and args.data_root is None:
        sys.exit("--data-root is missing: name the folder with fsdd/, camvid96/, breast_cancer.csv and diabetes.csv.")
    if args.write_tables:
        write_tables(args.data_root)
        return
    torch.set_num_threads(1)
    for name in [] if args.page_only else args.tasks.split(","):
        study, seeds = Study(SETUPS[name], args.data_root, args.out, args.work), list(map(int, args.seeds.split(",")))
        run = study.run_penalties if args.penalties else study.run
        run(seeds)
    write_page(args.out)


if __name__ == "__main__":
    main()
