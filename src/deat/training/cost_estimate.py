"""Estimate the cost of a run: backprops from its schedule, time and memory from a few batches."""

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
"""If the first batch takes longer than this, no more are measured."""


@dataclass(frozen=True)
class CostEstimate:
    """The cost of a run; pairs are (lowest, highest), since k may depend on the training.

    Attributes:
        batches: The number of batches of an epoch.
        backprops: Backprops of the run.
        seconds_per_backprop: Seconds per backprop.
        seconds: Seconds of training.
        memory: Peak memory in bytes.
    """

    batches: int
    backprops: tuple[int, int]
    seconds_per_backprop: float
    seconds: tuple[float, float]
    memory: int


def estimate_cost(trainer: Trainer) -> CostEstimate:
    """Estimate the cost of a run.

    Args:
        trainer: The run's trainer. A few batches are trained, so it cannot be used afterwards.

    Returns:
        The estimate.
    """
    batches = len(trainer.train)
    backprops = [batches * n for n in backprop_bounds(trainer.method, trainer.schedule, trainer.config.epochs)]
    seconds, memory = _measure(trainer)
    return CostEstimate(
        batches, (backprops[0], backprops[1]), seconds, (backprops[0] * seconds, backprops[1] * seconds), memory
    )


def backprop_bounds(method: Method, schedule: Schedule, epochs: int) -> tuple[int, int]:
    """Count the backprops of one batch position over all epochs.

    Args:
        method: The training method.
        schedule: Its schedule.
        epochs: The number of epochs.

    Returns:
        The lowest and the highest count: if the schedule never adds steps, or whenever it can.
    """
    return _count_backprops(method, schedule, epochs, False), _count_backprops(method, schedule, epochs, True)


def _count_backprops(method: Method, schedule: Schedule, epochs: int, grow: bool) -> int:
    state, backprops = schedule.init(), 0
    for epoch in range(epochs):
        backprops += method.play.backprops(schedule.budget(state, epoch))
        state = schedule.observe(state, _make_record(epoch, epochs, grow))
    return backprops


def _make_record(epoch: int, epochs: int, grow: bool) -> EpochRecord:
    """Make a record after which every schedule adds a step, or none does."""
    return EpochRecord(epoch, 0.0, float(grow), 10.0 ** (300 * epoch / epochs) if grow else 1.0, 1)


def _measure(trainer: Trainer) -> tuple[float, int]:
    """Measure seconds per backprop, and peak memory in bytes, over a few batches."""
    with trainer.session():
        trainer.model.train()
        seconds = _time_batches(trainer, num_batches=1)
        is_short = seconds * trainer.game.cost.backprops < LONG_BATCH_SECONDS
        if trainer.distributed.all_reduce_any(is_short):  # then set-up is a large part of the first batch
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
    """Return a budget with at least one step of the adversary, so that both moves are measured."""
    first = schedule.budget(schedule.init(), 0)
    return first if first.k else Budget(2, schedule.step_size(2), first.level)


def _peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
