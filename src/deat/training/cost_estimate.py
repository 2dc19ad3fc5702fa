"""What a run will cost, before it begins: backprops exactly, time and memory from a few batches really played."""

import sys
from dataclasses import dataclass
from time import perf_counter

import torch

from deat.core.buffers import Budget
from deat.core.meter import EpochRecord
from deat.methods import Method
from deat.schedules import Schedule
from deat.training.trainer import Trainer

LONG_BATCH_SECONDS = 5.0
"""Seconds after which a first batch is measurement enough."""


@dataclass(frozen=True)
class CostEstimate:
    """A run's cost: at least and at most, since k may depend on what training shows."""

    batches: int
    backprops: tuple[int, int]
    seconds_per_backprop: float
    seconds: tuple[float, float]
    memory: int


def estimate_cost(trainer: Trainer) -> CostEstimate:
    """The cost of a trainer's run. A few batches are played on the trainer itself, which is then used up."""
    batches = len(trainer.train)
    spent = [batches * n for n in backprop_bounds(trainer.method, trainer.schedule, trainer.config.epochs)]
    seconds, memory = _measure(trainer)
    return CostEstimate(batches, (spent[0], spent[1]), seconds, (spent[0] * seconds, spent[1] * seconds), memory)


def backprop_bounds(method: Method, schedule: Schedule, epochs: int) -> tuple[int, int]:
    """A batch's backprops over all epochs, if the schedule sees no reason to add steps, or every reason."""
    few, many = (_count_backprops(method, schedule, epochs, grow) for grow in (False, True))
    return few, many


def _count_backprops(method: Method, schedule: Schedule, epochs: int, grow: bool) -> int:
    state, spent = schedule.init(), 0
    for epoch in range(epochs):
        spent += method.play.backprops(schedule.budget(state, epoch))
        state = schedule.observe(state, _make_record(epoch, epochs, grow))
    return spent


def _make_record(epoch: int, epochs: int, grow: bool) -> EpochRecord:
    """A record that makes every rule add a step, or none."""
    return EpochRecord(epoch, 0.0, float(grow), 10.0 ** (300 * epoch / epochs) if grow else 1.0, 1)


def _measure(trainer: Trainer) -> tuple[float, int]:
    """Seconds a backprop, and peak bytes, over a few batches."""
    with trainer.session():
        trainer.model.train()
        seconds = _time_batches(trainer, num_batches=1)
        if trainer.distributed.all_reduce_any(
            seconds * trainer.game.cost.backprops < LONG_BATCH_SECONDS
        ):  # else set-up is a small part of it
            seconds = _time_batches(trainer, num_batches=3)
    return seconds, _peak_memory_bytes(trainer.engine.device)


def _time_batches(trainer: Trainer, num_batches: int) -> float:
    game, budget = trainer.game, _attacking_budget(trainer.schedule)
    started, before = perf_counter(), game.cost.backprops
    for step, (x, y) in zip(range(num_batches), trainer.train.epoch(0), strict=False):
        trainer.prepare_step(0, step)
        trainer.method.play(game, x, y, budget)
    game.meter.read(0)  # waits for the device
    return (perf_counter() - started) / (game.cost.backprops - before)


def _attacking_budget(schedule: Schedule) -> Budget:
    """A budget with an adversary in it, so that both moves are measured."""
    first = schedule.budget(schedule.init(), 0)
    return first if first.k else Budget(2, schedule.step_size(2), first.level)


def _peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
