"""Whether this checkout trains as fast on a CPU as another one, such as the one before a change.

    git worktree add ../before COMMIT
    python bench/cpu_versions.py ../before --rounds 7

Both checkouts train the same batches by the same methods, in two processes that take turns, one epoch each. It prints
the CPU seconds of each and their ratio: medians over the rounds, and the range of the ratio.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
METHODS = (
    *("natural", "fgsm", "pgd-7", "free-8", "deat-3", "m+deat", "trades-5", "mart-5", "fat-5", "f+trades-5"),
    *("yopo-5-3", "amata-2-10", "dat"),
)
WORKER = """
import json, sys, time
import torch, deat
config_class = getattr(deat, "TrainConfig", None) or deat.Settings
name = "config" if hasattr(deat, "TrainConfig") else "settings"
shape = "lr_schedule" if "lr_schedule" in config_class.__dataclass_fields__ else "rate"
images = torch.rand(256, 3, 32, 32, generator=torch.Generator().manual_seed(0))
data = images, torch.arange(256) % 10
trainers = {}
for line in sys.stdin:
    method = json.loads(line)
    if method not in trainers:
        torch.manual_seed(0)
        settings = {"epochs": 1000, "batch_size": 64, "lr": 0.01, shape: "flat", "precision": "fp32", "threads": 1}
        model = deat.build_model("preact_resnet8", num_classes=10)
        options = {"method": method, "threat": "linf:8/255", name: config_class(**settings)}
        trainers[method] = deat.make_trainer(model, data, **options)
        trainers[method].run_epoch()
    before, spent = time.process_time(), trainers[method].game.cost.backprops
    trainers[method].run_epoch()
    backprops = trainers[method].game.cost.backprops - spent
    print(json.dumps((time.process_time() - before) / backprops), flush=True)
"""


class Checkout:
    """A process that trains with the sources of one checkout."""

    def __init__(self, root: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", WORKER]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def seconds_per_backprop(self, method: str) -> float:
        """Train one epoch."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(method) + "\n")
        self.process.stdin.flush()
        return float(json.loads(self.process.stdout.readline()))


def main() -> None:
    """Compare the checkouts method by method."""
    parser = argparse.ArgumentParser(description="CPU seconds a backprop of two checkouts, in turns.")
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=5, help="epochs of each method and checkout")
    parser.add_argument("--methods", nargs="*", default=METHODS, help="training methods")
    args = parser.parse_args()
    other, this = Checkout(args.other), Checkout(ROOT)
    print("| method | other, ms a backprop | this, ms a backprop | this / other | range |\n|---|---|---|---|---|")
    for method in args.methods:
        pairs = [(other.seconds_per_backprop(method), this.seconds_per_backprop(method)) for _ in range(args.rounds)]
        before, now = (1000 * statistics.median(column) for column in zip(*pairs, strict=True))
        ratios = sorted(b / a for a, b in pairs)
        middle = statistics.median(ratios)
        print(
            f"| `{method}` | {before:.1f} | {now:.1f} | {middle:.3f} | {ratios[0]:.3f} to {ratios[-1]:.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
