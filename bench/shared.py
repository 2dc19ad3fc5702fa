"""What the benchmarks share: networks and images, the machine and its clock, and how a result is written."""

import json
import platform
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

import deat
from deat.core.batch_buffers import Budget
from deat.data import Augment, ImageSet
from deat.version import get_versions

Record = dict[str, Any]
PAGE_WIDTH = 100


def net_of(network: str) -> nn.Module:
    """A fresh network, CIFAR-10's normalisation included."""
    torch.manual_seed(0)
    return deat.build_model(network, normalize=((0.4914, 0.4822, 0.4465), (0.2471, 0.2435, 0.2616)))


def images(side: int, count: int) -> ImageSet:
    """Noise: how long a step takes does not depend on what is on the images."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=generator)
    return ImageSet(pixels, torch.randint(0, 10, (count,), generator=generator), tuple("0123456789"))


def trainer_of(
    net: nn.Module, data: Any, method: str, size: int, engine: str, device: str, **more: Any
) -> deat.Trainer:
    """A trainer as every benchmark of a GPU has it, augmentation included."""
    settings = deat.TrainConfig(
        epochs=10, batch_size=size, lr=0.01, lr_schedule="flat", device=device, engine=engine, **more
    )
    return deat.make_trainer(net, data, method=method, config=settings, augment=Augment(4))


def fixed_budget(trainer: deat.Trainer, k: int) -> Budget:
    """What a batch spends that plays k attack steps, whatever the schedule says."""
    return replace(trainer.schedule.budget(trainer.schedule_state, 0), k=k, step_size=2 / 255)


def clocked(work: Callable[[], object]) -> float:
    """Seconds until a GPU has done a piece of work."""
    torch.cuda.synchronize()
    started = perf_counter()
    work()
    torch.cuda.synchronize()
    return perf_counter() - started


def gpu_machine() -> Record:
    """The GPU, and the software that a number was made with."""
    return {"device": torch.cuda.get_device_name(), **get_versions()}


def cpu_name() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or "unknown")


def command_block(command: str) -> list[str]:
    """Return the lines of a block of code in Markdown."""
    return ["```", command, "```"]


def paragraph(text: str) -> list[str]:
    """Wrap a paragraph of Markdown at 100 columns."""
    return textwrap.wrap(text, PAGE_WIDTH, break_long_words=False, break_on_hyphens=False)


def write_result(result: Record, out: Path, render: Callable[[Record], str], indent: int | None = 1) -> None:
    """The JSON file, and its page beside it; the file first, since a page that fails must not cost its numbers."""
    out.write_text(json.dumps(result, indent=indent) + "\n", encoding="utf-8")
    out.with_suffix(".md").write_text(render(result), encoding="utf-8")
