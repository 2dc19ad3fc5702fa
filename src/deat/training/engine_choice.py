"""Which engine a training gets, and what a person is told of it."""

import os
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from deat.engine.kernels import has_cached_kernels
from deat.engine.precision import Engine, choose_precision, choose_recording
from deat.methods import Method
from deat.training.config import TrainConfig, resolve_device
from deat.training.records import EpochTiming
from deat.utils.distributed import Distributed

if TYPE_CHECKING:
    from deat.training.trainer import Trainer

ENGINE_LABELS = {"eager": "", "graph": "recorded", "compile": "compiled"}
"""How moves run."""


class EngineChoice(NamedTuple):
    """An engine, what stands against recording every move, if anything, and whether a run may come to be compiled."""

    engine: Engine
    no_recording_reason: str
    may_compile: bool

    @property
    def news(self) -> str:
        """Why moves are not recorded, and what is done instead; empty where nothing stands against it."""
        if not self.no_recording_reason:
            return ""
        instead = "compiled" if self.engine.use_compile else "compiled once that pays" if self.may_compile else "eager"
        return f"not every move is recorded ({self.no_recording_reason}): it is {instead}"


def choose_engine(
    config: TrainConfig, method: Method, num_parameters: int, distributed: Distributed, custom_optimizer: bool
) -> EngineChoice:
    """The engine that these settings ask for, on this device, for this method."""
    device = resolve_device(config.device)
    if config.deterministic and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    obstacles = {
        "this method's play cannot be recorded": not method.play.can_record,
        "a compact batch changes its shape": method.attack.compact,
        "an optimiser of your own may read the host": custom_optimizer,
        "batch-norm statistics meet those of other processes": config.sync_bn and distributed.is_multiprocess,
    }
    records, obstacle = choose_recording(config.engine, device, next(filter(obstacles.get, obstacles), None))
    if records and distributed.is_multiprocess:
        obstacle = "joint moves meet other processes; the others are recorded"
    precision = choose_precision(config.precision, device, num_parameters)
    may_compile = config.engine == "auto" and device.type == "cuda" and not config.deterministic
    return EngineChoice(
        Engine(device, precision, records, use_compile=config.engine == "compile"), obstacle, may_compile
    )


class CompileCost(NamedTuple):
    """What compiling is expected to save, as a share of a recorded backprop, and to cost, in seconds.

    once is for kernels that no process has built before, again for those that are in the cache.
    """

    saving: float
    first_build_seconds: float
    cached_build_seconds: float
    seconds_per_layer: float

    def seconds(self, model: nn.Module) -> float:
        """About how long a network takes."""
        layers = sum(any(True for _ in m.parameters(recurse=False)) for m in model.modules())
        return (
            self.cached_build_seconds if has_cached_kernels() else self.first_build_seconds
        ) + self.seconds_per_layer * layers


TRITON_COMPILE_COST = CompileCost(saving=0.3, first_build_seconds=13, cached_build_seconds=0, seconds_per_layer=0.1)
"""Our own kernels: docs/results/speed.md has what they gain, docs/results/fast.md what they cost, each time."""
TORCH_COMPILE_COST = CompileCost(saving=0.15, first_build_seconds=0, cached_build_seconds=0, seconds_per_layer=1)
"""torch's compiler, which serves float32: what it brought to half precision; its seconds are a guess."""


MEASURE_SECONDS = 20
"""Seconds after which the host, which runs ahead of the device, knows the pace of an epoch that is under way."""


class TimingMark(NamedTuple):
    """A moment of an epoch: the clock, and what it had spent so far in seconds on what is new, and in backprops."""

    clock: float
    warmed: float
    backprops: int


class CompilePolicy:
    """Keeps to the engine that was asked for."""

    def before_epoch(self, trainer: "Trainer") -> None:
        """An epoch begins, or goes on."""

    def after_batch(self, trainer: "Trainer") -> None:
        """A batch has been handed to the device."""

    def after_epoch(self, trainer: "Trainer", timing: EpochTiming) -> None:
        """An epoch has ended."""


class AutoCompile(CompilePolicy):
    """Compiles a run that is long enough, and takes it back where that was no faster.

    recorded is the pace, in seconds a backprop, that compiled moves must beat.
    """

    def __init__(self) -> None:
        self.recorded: float | None = None
        self._is_decided = self._is_mixed_epoch = False
        self._start = TimingMark(perf_counter(), 0.0, 0)
        self._since: TimingMark | None = None

    def before_epoch(self, trainer: "Trainer") -> None:
        """Look at the clock."""
        self._start, self._since, self._is_mixed_epoch = _mark_now(trainer), None, False

    def after_batch(self, trainer: "Trainer") -> None:
        """After a while of an epoch, decide; several processes wait for its end, since they must decide together.

        An epoch's first batch is no part of a pace: workers start with it, and what is new beside the moves is built.
        """
        now = _mark_now(trainer)
        since = self._since = self._since or now
        seconds = now.clock - since.clock - (now.warmed - since.warmed)
        if seconds > MEASURE_SECONDS and self.recorded is None and not trainer.distributed.is_multiprocess:
            self._compile_if_worth_it(trainer, seconds / (now.backprops - since.backprops))
            self._is_mixed_epoch, self._since = self.recorded is not None, now

    def after_epoch(self, trainer: "Trainer", timing: EpochTiming) -> None:
        """Compare seconds a backprop; an epoch that was compiled in its middle says nothing."""
        since, end = self._since or self._start, trainer.game.cost.backprops
        if since.backprops == end:
            since = self._start  # it had a single batch
        if self._is_decided or self._is_mixed_epoch or since.backprops == end:
            return
        before = since.clock - self._start.clock - (since.warmed - self._start.warmed)
        seconds = trainer.distributed.broadcast(
            timing.train_seconds - timing.warm_up_seconds - before
        )  # all do the same
        pace = seconds / (end - since.backprops)
        if self.recorded is None:
            self._compile_if_worth_it(trainer, pace)
        else:
            self._settle(trainer, pace, self.recorded)

    def _compile_if_worth_it(self, trainer: "Trainer", pace: float) -> None:
        """Compile if what is left earns it back; at today's k, which schedules hardly ever lower."""
        left = (trainer.config.epochs - trainer.epoch) * len(trainer.train) - trainer.step
        budget = trainer.schedule.budget(trainer.state, trainer.epoch)
        deal = TRITON_COMPILE_COST if trainer.engine.uses_own_kernels else TORCH_COMPILE_COST
        wait = trainer.distributed.broadcast(deal.seconds(trainer.model))  # not every machine has the same cache
        if left * trainer.method.play.backprops(budget) * pace * deal.saving > wait:
            self.recorded = pace
            trainer.game.executor.use_compiled(True)

    def _settle(self, trainer: "Trainer", pace: float, recorded: float) -> None:
        self._is_decided = True
        if trainer.game.executor.compiled is not None and pace > recorded:  # else it could not be compiled
            trainer.game.executor.use_compiled(False)


def _mark_now(trainer: "Trainer") -> TimingMark:
    return TimingMark(perf_counter(), trainer.game.executor.warm_up_seconds, trainer.game.cost.backprops)
