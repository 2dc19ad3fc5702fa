"""Which engine a training gets, and what a person is told of it."""

import os
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from deat.engine.kernels import are_built
from deat.engine.precision import Engine, choose_precision, choose_records
from deat.methods import Method
from deat.training.config import Settings, find_device
from deat.training.records import EpochTiming
from deat.utils.distributed import Ranks

if TYPE_CHECKING:
    from deat.training.trainer import Trainer

IN_WORDS = {"eager": "", "graph": "recorded", "compile": "compiled"}
"""How moves run."""


class Chosen(NamedTuple):
    """An engine, what stands against recording every move, if anything, and whether a run may come to be compiled."""

    engine: Engine
    obstacle: str
    may_compile: bool

    @property
    def news(self) -> str:
        """Why moves are not recorded, and what is done instead; empty where nothing stands against it."""
        if not self.obstacle:
            return ""
        instead = "compiled" if self.engine.compiles else "compiled once that pays" if self.may_compile else "eager"
        return f"not every move is recorded ({self.obstacle}): it is {instead}"


def choose(settings: Settings, method: Method, num_parameters: int, ranks: Ranks, own_optimizer: bool) -> Chosen:
    """The engine that these settings ask for, on this device, for this method."""
    device = find_device(settings.device)
    if settings.deterministic and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    obstacles = {
        "this method's play cannot be recorded": not method.play.records,
        "a compact batch changes its shape": method.ascent.compact,
        "an optimiser of your own may read the host": own_optimizer,
        "batch-norm statistics meet those of other processes": settings.sync_bn and ranks.many,
    }
    records, obstacle = choose_records(settings.engine, device, next(filter(obstacles.get, obstacles), None))
    if records and ranks.many:
        obstacle = "joint moves meet other processes; the others are recorded"
    precision = choose_precision(settings.precision, device, num_parameters)
    may_compile = settings.engine == "auto" and device.type == "cuda" and not settings.deterministic
    return Chosen(Engine(device, precision, records, compiles=settings.engine == "compile"), obstacle, may_compile)


class Deal(NamedTuple):
    """What compiling is expected to save, as a share of a recorded backprop, and to cost, in seconds.

    once is for kernels that no process has built before, again for those that are in the cache.
    """

    gain: float
    once: float
    again: float
    a_layer: float

    def seconds(self, model: nn.Module) -> float:
        """About how long a network takes."""
        layers = sum(any(True for _ in m.parameters(recurse=False)) for m in model.modules())
        return (self.again if are_built() else self.once) + self.a_layer * layers


OURS = Deal(gain=0.3, once=13, again=0, a_layer=0.1)
"""Our own kernels: docs/results/speed.md has what they gain, docs/results/fast.md what they cost, each time."""
TORCHS = Deal(gain=0.15, once=0, again=0, a_layer=1)
"""torch's compiler, which serves float32: what it brought to half precision; its seconds are a guess."""


WHILE = 20
"""Seconds after which the host, which runs ahead of the device, knows the pace of an epoch that is under way."""


class Mark(NamedTuple):
    """A moment of an epoch: the clock, and what it had spent so far in seconds on what is new, and in backprops."""

    clock: float
    warmed: float
    backprops: int


class Steady:
    """Keeps to the engine that was asked for."""

    def before_epoch(self, trainer: "Trainer") -> None:
        """An epoch begins, or goes on."""

    def after_batch(self, trainer: "Trainer") -> None:
        """A batch has been handed to the device."""

    def after_epoch(self, trainer: "Trainer", timing: EpochTiming) -> None:
        """An epoch has ended."""


class Pace(Steady):
    """Compiles a run that is long enough, and takes it back where that was no faster.

    recorded is the pace, in seconds a backprop, that compiled moves must beat.
    """

    def __init__(self) -> None:
        self.recorded: float | None = None
        self._settled = self._mixed = False
        self._start = Mark(perf_counter(), 0.0, 0)
        self._since: Mark | None = None

    def before_epoch(self, trainer: "Trainer") -> None:
        """Look at the clock."""
        self._start, self._since, self._mixed = _now(trainer), None, False

    def after_batch(self, trainer: "Trainer") -> None:
        """After a while of an epoch, decide; several processes wait for its end, since they must decide together.

        An epoch's first batch is no part of a pace: workers start with it, and what is new beside the moves is built.
        """
        now = _now(trainer)
        since = self._since = self._since or now
        seconds = now.clock - since.clock - (now.warmed - since.warmed)
        if seconds > WHILE and self.recorded is None and not trainer.ranks.many:
            self._consider(trainer, seconds / (now.backprops - since.backprops))
            self._mixed, self._since = self.recorded is not None, now

    def after_epoch(self, trainer: "Trainer", timing: EpochTiming) -> None:
        """Compare seconds a backprop; an epoch that was compiled in its middle says nothing."""
        since, end = self._since or self._start, trainer.game.cost.backprops
        if since.backprops == end:
            since = self._start  # it had a single batch
        if self._settled or self._mixed or since.backprops == end:
            return
        before = since.clock - self._start.clock - (since.warmed - self._start.warmed)
        seconds = trainer.ranks.broadcast(timing.train_seconds - timing.warm_up_seconds - before)  # all do the same
        pace = seconds / (end - since.backprops)
        if self.recorded is None:
            self._consider(trainer, pace)
        else:
            self._settle(trainer, pace, self.recorded)

    def _consider(self, trainer: "Trainer", pace: float) -> None:
        """Compile if what is left earns it back; at today's k, which schedules hardly ever lower."""
        left = (trainer.settings.epochs - trainer.epoch) * len(trainer.train) - trainer.step
        budget = trainer.schedule.budget(trainer.state, trainer.epoch)
        deal = OURS if trainer.engine.fuses else TORCHS
        wait = trainer.ranks.broadcast(deal.seconds(trainer.model))  # not every machine has the same cache
        if left * trainer.method.play.backprops(budget) * pace * deal.gain > wait:
            self.recorded = pace
            trainer.game.runner.use_compiled(True)

    def _settle(self, trainer: "Trainer", pace: float, recorded: float) -> None:
        self._settled = True
        if trainer.game.runner.compiled is not None and pace > recorded:  # else it could not be compiled
            trainer.game.runner.use_compiled(False)


def _now(trainer: "Trainer") -> Mark:
    return Mark(perf_counter(), trainer.game.runner.warmed, trainer.game.cost.backprops)
