"""Whether bf16 costs a small network robustness: PreAct-ResNet 8 on CIFAR-10 in float32 and in bf16, seed by seed.

    python bench/precision.py --data-root FOLDER --work docs/results/precision

Both runs of a seed have the same initial weights, batches and random starts. Each trains DEAT-3 on 10,000 training
images, and its last epoch is evaluated in float32 on the first 2,000 test images. Each run is a file of WORK, and one
that is there is not repeated. The page is written beside WORK, with the difference of the two over the seeds.
"""

import argparse
import json
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from time import process_time
from typing import Any

import torch
from shared import Record, command_block, cpu_name, paragraph

import deat
from deat.utils.safe_write import write_json
from deat.version import get_versions

NETWORK, METHOD, PRECISIONS = "preact_resnet8", "deat-3", ("fp32", "bf16")
SEEDS = range(6)
TRAIN_IMAGES, TEST_IMAGES = 10_000, 2_000
CONFIG: dict[str, Any] = {"epochs": 4, "batch_size": 64, "lr": 0.1}
ATTACKS = ("natural", "pgd-20")
T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571}
"""Two-sided 95 % quantiles of Student's t distribution, by degrees of freedom."""


def main() -> None:
    """Make the runs that are missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", required=True, help="the folder that CIFAR-10 is in")
    parser.add_argument("--work", type=Path, required=True, help="the folder of records")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = deat.load_data("cifar10", root=args.data_root)
    for seed in args.seeds:
        for precision in PRECISIONS:
            path = args.work / f"{precision}-{seed}.json"
            if not path.is_file():
                path.parent.mkdir(parents=True, exist_ok=True)
                write_json(path, run(data, precision, seed))
                print(path.name, flush=True)
    args.work.with_suffix(".md").write_text(render(args.work), encoding="utf-8")


def run(data: deat.DataSplits, precision: str, seed: int) -> Record:
    """Train once, and evaluate the last epoch in float32."""
    torch.manual_seed(seed)
    train, test = data.train, data.test
    assert isinstance(train, deat.ImageSet)
    assert isinstance(test, deat.ImageSet)
    started = process_time()
    result = deat.fit(
        deat.build_model(NETWORK),
        train.subset(range(TRAIN_IMAGES)),
        method=METHOD,
        threat="linf:8/255",
        augment=data.augment,
        normalize=(data.mean, data.std) if data.mean and data.std else None,
        seed=seed,
        precision=precision,
        threads=1,
        progress=False,
        **CONFIG,
    )
    seconds = process_time() - started
    images = test.subset(range(TEST_IMAGES))
    scores = deat.evaluate(
        result.model, images, threat="linf:8/255", attacks=ATTACKS, precision="fp32", sanity=False, progress=False
    )
    return {
        "precision": precision,
        "seed": seed,
        "train_cpu_seconds": seconds,
        "backprops": result.history[-1].backprops,
        "loss": [stats.loss for stats in result.history],
        "magnitude": [stats.magnitude for stats in result.history],
        "evaluation": scores.as_json(),
        "machine": {"cpu": cpu_name(), "versions": get_versions()},
    }


def render(folder: Path) -> str:
    """The page of all seeds that have both runs."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    by_key = {(record["precision"], record["seed"]): record for record in records}
    seeds = sorted({seed for _, seed in by_key if all((p, seed) in by_key for p in PRECISIONS)})
    pairs = [tuple(by_key[p, seed] for p in PRECISIONS) for seed in seeds]
    lines = ["| | " + " | ".join(map(str, seeds)) + " | mean |", "|---|" + "---|" * (len(seeds) + 1)]
    for side, precision in enumerate(PRECISIONS):
        for attack in ATTACKS:
            values = [100 * pair[side]["evaluation"]["accuracy"][attack] for pair in pairs]
            cells = [f"{value:.1f}" for value in [*values, mean(values)]]
            lines.append(f"| {precision}, {attack} | " + " | ".join(cells) + " |")
    seconds = [[pair[side]["train_cpu_seconds"] / pair[side]["backprops"] for pair in pairs] for side in (0, 1)]
    ratio = sorted(b / a for a, b in zip(*seconds, strict=True))
    told = ", ".join(f"{name} {value}" for name, value in CONFIG.items())
    return "\n".join(
        [
            "# bf16 on a small network",
            "",
            *command_block("python bench/precision.py --data-root FOLDER --work docs/results/precision"),
            "",
            *paragraph(
                f"Machine: {pairs[0][0]['machine']['cpu']}, one thread, torch {pairs[0][0]['machine']['versions']['torch']}. "
                f"{NETWORK} (308,266 weights), {METHOD}, linf:8/255, on {TRAIN_IMAGES:,} images of CIFAR-10 itself; {told}. "
                "The two runs of a seed have the same initial weights, batches and random starts. The last epoch is "
                f"evaluated in float32 on {TEST_IMAGES:,} test images. Accuracies in %, one column per seed:"
            ),
            "",
            *lines,
            "",
            *paragraph(
                "bf16 minus fp32, in points, as mean and 95 % interval over the seeds (Student's t): "
                + "; ".join(f"{attack} {_difference(pairs, attack)}" for attack in ATTACKS)
                + "."
            ),
            "",
            *paragraph(
                f"Training in bf16 took {mean(ratio):.2f} of the CPU time of fp32 per backprop "
                f"({ratio[0]:.2f} to {ratio[-1]:.2f}), data and augmentation included, while other processes used the machine."
            ),
            "",
        ]
    )


def _difference(pairs: list[tuple[Record, ...]], attack: str) -> str:
    values = [
        100 * (half["evaluation"]["accuracy"][attack] - full["evaluation"]["accuracy"][attack]) for full, half in pairs
    ]
    if len(values) < 2:
        return f"{mean(values):+.2f}"
    half_width = T_95[len(values) - 1] * stdev(values) / sqrt(len(values))
    return f"{mean(values):+.2f} ({mean(values) - half_width:+.2f} to {mean(values) + half_width:+.2f})"


if __name__ == "__main__":
    main()
