"""How a whole batch's time on a GPU is spent, beyond its moves; gpu_profile.py shows it next to them.

A trainer runs batches of PreAct-ResNet-18, compiled, as in a real run, with data and augmentation. Milliseconds are
wall-clock times without a profiler. Host time is the time that the host needs to launch a batch on an idle device; if it
is shorter than the batch, the device is the limit. Batches without replays show the cost of everything else. The
timeline is from the profiler, which slows the host down, so its gaps are longer.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from gpu_timeline import spans_of, timeline
from shared import Record, clocked, fixed_budget, images, net_of, trainer_of
from torch.profiler import ProfilerActivity, profile

import gpu
from deat.training.trainer import Trainer

METHODS = ("pgd-7", "m+deat", "trades")
SIZE, PROFILED = 128, 20
"""Images of a batch, and batches under the profiler."""


def batches() -> Record:
    """Each method's batches; one that fails says why."""
    return {method: attempt(partial(measure, method)) for method in METHODS}


def attempt(work: Callable[[], Record]) -> Record:
    """What work finds, or why it does not."""
    try:
        return work()
    except Exception as error:  # whatever is missing, the rest is still worth showing
        return {"failed": f"{type(error).__name__}: {error}".split("\n")[0][:200]}


def measure(method: str) -> Record:
    """A batch by the clock, and by the profiler."""
    torch._dynamo.reset()
    gc.collect()
    with trained(method) as player:
        found = {"k": player.budget.k, **player.clocked()}
        with patch.object(player.recorder, "run", lambda *held: None):
            rest = player.clocked()
        found |= {f"rest_{name}": value for name, value in rest.items()}
        return found | {"device": attempt(player.profiled)}


@contextmanager
def trained(method: str) -> Iterator["Player"]:
    """A trainer whose moves are compiled and recorded."""
    data = images(32, SIZE * gpu.MANY)
    trainer = trainer_of(net_of("preact_resnet18"), data, method, SIZE, "compile", gpu.DEVICE)
    player = Player(trainer, gpu.STEPS[method])
    with trainer.session():
        player.play()
        assert trainer.engine.name == "compile", f"it ran {trainer.engine.name}"
        yield player


class Player:
    """A trainer that plays the same epoch again and again, each batch with k attack steps."""

    def __init__(self, trainer: Trainer, k: int) -> None:
        self.trainer = trainer
        self.budget = fixed_budget(trainer, k)

    @property
    def recorder(self) -> Any:
        """Who replays moves."""
        assert self.trainer.game.executor.recorder is not None, "nothing was recorded"
        return self.trainer.game.executor.recorder

    def play(self) -> None:
        """An epoch."""
        self.trainer.batches_done = 0
        self.trainer.train_epoch(self.budget)

    def each(self) -> Iterator[None]:
        """The same, batch by batch, so that one may look between them."""
        trainer = self.trainer
        for step, (x, y) in enumerate(trainer.train.epoch(trainer.epoch)):
            trainer.prepare_step(trainer.epoch, step)
            trainer.method.play(trainer.game, x, y, self.budget)
            yield

    def clocked(self) -> Record:
        """Milliseconds of a batch among many, and of the host to ask for one."""
        seconds = min(clocked(self.play) for _ in range(3)) / len(self.trainer.train)
        return {"ms": round(1000 * seconds, 4), "host_ms": round(1000 * median(self.asked()), 4)}

    def asked(self) -> Iterator[float]:
        """Seconds until the host has asked for each batch, none before it being under way."""
        each = self.each()
        for _ in range(len(self.trainer.train)):
            torch.cuda.synchronize()
            started = perf_counter()
            next(each)
            yield perf_counter() - started

    def profiled(self) -> Record:
        """What the device did in a batch."""
        each = self.each()
        next(each)  # an epoch's order and draws are made before its first batch
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
            for _ in range(PROFILED):
                next(each)
            torch.cuda.synchronize()
        return timeline(*spans_of(found.events()), batches=PROFILED)
