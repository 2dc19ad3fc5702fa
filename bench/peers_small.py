"""Little things, for bench/peers.py: a whole run on digits beside a plain loop, commands, and the demo."""

import contextlib
import io
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from shared import Record
from side_process import Work
from torch import Tensor, nn
from torch.nn import functional as F

import deat

EPOCHS, BATCH, EPS = 10, 64, 0.1
METHOD = "pgd-7"
PYTHON = sys.executable
DEMO = Path(__file__).parents[1] / "examples" / "demo.py"
COMMANDS = {
    "python -c pass": [PYTHON, "-c", "pass"],
    "import torch": [PYTHON, "-c", "import torch"],
    "import deat": [PYTHON, "-c", "import deat"],
    "import torch, deat": [PYTHON, "-c", "import torch, deat"],
    "deat --help": [PYTHON, "-m", "deat", "--help"],
    "deat list methods": [PYTHON, "-m", "deat", "list", "methods"],
    "deat list attacks": [PYTHON, "-m", "deat", "list", "attacks"],
    "deat train --help": [PYTHON, "-m", "deat", "train", "--help"],
}
IMPORTS_COMPILER = "import sys, deat.cli.main, deat.cli.train; print('torch._dynamo' in sys.modules)"


def digits() -> tuple[Tensor, Tensor]:
    """The training images of a run: those that it does not hold out."""
    train: Any = deat.load_data("digits").train
    count = len(train) - len(train) // 10
    return train.images[:count].float() / 255, train.labels[:count]


def make_plain() -> Work:
    """Return a plain loop: PGD-7 on the same number of images, nothing else."""
    x, y = digits()

    def work() -> Record:
        torch.manual_seed(0)
        net: nn.Module = deat.build_model("small", 10, 1, 8)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
        for _ in range(EPOCHS):
            order = torch.randperm(len(x))
            for rows in torch.split(order, BATCH):
                train_on_batch(net, optimizer, x[rows], y[rows])
        return {}

    work()
    return work


def train_on_batch(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """Seven attack steps, and an update."""
    delta = (x + torch.empty_like(x).uniform_(-EPS, EPS)).clamp_(0, 1).sub_(x)
    for _ in range(7):
        delta.requires_grad_()
        (grad,) = torch.autograd.grad(F.cross_entropy(net(x + delta), y), delta)
        delta = (delta.detach() + EPS / 4 * grad.sign()).clamp_(-EPS, EPS)
        delta = (x + delta).clamp_(0, 1).sub_(x)
    optimizer.zero_grad()
    torch.autograd.backward(F.cross_entropy(net(x + delta), y))
    optimizer.step()


def make_train() -> Work:
    """Return `deat train` as a user has it: held-out images, the watch, checkpoints and the final scores."""
    from deat.cli.main import main

    def work() -> Record:
        folder = Path(tempfile.mkdtemp())
        flags = ["--method", METHOD, "--epochs", str(EPOCHS), "--baseline", "no", "--out", str(folder / "run")]
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                if main(["train", *flags]):
                    raise RuntimeError("deat train failed")
            return read_timing(folder / "run")
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    work()
    return work


def read_timing(run: Path) -> Record:
    """Where the time of a run's epochs went, as it recorded it."""
    lines = [json.loads(line) for line in (run / "timing.jsonl").read_text(encoding="utf-8").splitlines()]
    parts = {name for line in lines for name, value in line.items() if name.endswith("seconds") and value is not None}
    return {"parts": {name: sum(line.get(name) or 0.0 for line in lines) for name in sorted(parts)}}


def measure_commands(rounds: int) -> Record:
    """Seconds of each command, in turns.

    Args:
        rounds: How often each is run.

    Returns:
        The seconds of each command, and whether a command's modules import torch's compiler.
    """
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    cpu: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(rounds + 1):
        for name, command in COMMANDS.items():
            lap = time_command(command)
            seconds[name].append(lap[0])
            cpu[name].append(lap[1])
    compiler = subprocess.run([PYTHON, "-c", IMPORTS_COMPILER], capture_output=True, text=True, check=True).stdout
    return {
        "seconds": {name: values[1:] for name, values in seconds.items()},
        "cpu_seconds": {name: values[1:] for name, values in cpu.items()},
        "imports_compiler": compiler.strip() == "True",
    }


def time_command(command: list[str], cwd: Path | None = None) -> tuple[float, float]:
    """Seconds and processor seconds of a command."""
    import resource

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = perf_counter()
    subprocess.run(command, capture_output=True, check=True, cwd=cwd)
    seconds = perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def measure_demo(rounds: int) -> Record:
    """Seconds of what `make demo` runs, installation left out.

    Args:
        rounds: How often it is run.

    Returns:
        The seconds, and the processor seconds.
    """
    laps = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            laps.append(time_command([PYTHON, str(DEMO), f"{folder}/demo"]))
    return {
        "seconds": {"make demo": [lap[0] for lap in laps]},
        "cpu_seconds": {"make demo": [lap[1] for lap in laps]},
    }
