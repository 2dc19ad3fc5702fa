"""The choice of the engine that runs training, and when `--engine auto` compiles."""

import os
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from deat.engine.engine import Engine, choose_recording
from deat.engine.kernels import has_cached_kernels
from deat.engine.precision import choose_precision
from deat.methods import Method
from deat.training.config import TrainConfig, resolve_device
from deat.training.epoch_records import EpochTiming
from deat.utils.distributed import Distributed

if TYPE_CHECKING:
    from deat.training.trainer import Trainer

ENGINE_LABELS = {"eager": "", "graph": "recorded", "compile": "compiled"}
"""How batches are run, in words, by the engine's name."""


class EngineChoice(NamedTuple):
    """The engine of a training.

    Attributes:
        engine: The engine.
        no_recording_reason: Why not every move is recorded as a CUDA graph; empty if none is to be, or all are.
        may_compile: Whether moves may be compiled later in the run.
    """

    engine: Engine
    no_recording_reason: str
    may_compile: bool

    @property
    def fallback_note(self) -> str:
        """A message: why not every move is recorded, and how it runs instead; empty without a reason."""
        if not self.no_recording_reason:
            return ""
        instead = "compiled" if self.engine.use_compile else "compiled once that pays" if self.may_compile else "eager"
        return f"not every move is recorded ({self.no_recording_reason}): it is {instead}"


def choose_engine(
    config: TrainConfig,
    method: Method,
    count_batch_work: Callable[[], float],
    distributed: Distributed,
    can_record_steps: bool,
) -> EngineChoice:
    """Choose the engine of a training.

    Args:
        config: The settings of training.
        method: The training method.
        count_batch_work: Counts the multiply-adds of a batch, which choose the precision on a CPU.
        distributed: The processes that train together.
        can_record_steps: Whether the optimizer's steps can be recorded; one of the user's own may read the host.

    Returns:
        The engine, and why it does not record every move.

    Raises:
        UsageError: The settings do not fit the device or the method.
    """
    device = resolve_device(config.device)
    if config.deterministic and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    reasons = {
        "this method's play cannot be recorded": not method.play.can_record,
        "a compact batch changes its shape": method.attack.compact,
        "only steps of deat's SGD can be": not can_record_steps,
        "batch-norm statistics meet those of other processes": config.sync_bn and distributed.is_multiprocess,
    }
    records, reason = choose_recording(config.engine, device, next(filter(reasons.get, reasons), None))
    if records and distributed.is_multiprocess:
        reason = "joint moves meet other processes; the others are recorded"
    precision = choose_precision(config.precision, device, count_batch_work)
    may_compile = config.engine == "auto" and device.type == "cuda" and not config.deterministic
    engine = Engine(device, precision, records, use_compile=config.engine == "compile")
    return EngineChoice(engine, reason, may_compile)


class CompileCost(NamedTuple):
    """The expected saving and cost of compiling.

    Attributes:
        saving: The part of a recorded backprop's time that is saved.
        first_build_seconds: The time to build kernels that are not in the cache.
        cached_build_seconds: The time to load kernels from the cache.
        seconds_per_layer: The additional time for each layer with parameters.
    """

    saving: float
    first_build_seconds: float
    cached_build_seconds: float
    seconds_per_layer: float

    def estimate_seconds(self, model: nn.Module) -> float:
        """Estimate the seconds that compiling a network takes."""
        layers = sum(any(True for _ in m.parameters(recurse=False)) for m in model.modules())
        build_seconds = self.cached_build_seconds if has_cached_kernels() else self.first_build_seconds
        return build_seconds + self.seconds_per_layer * layers


TRITON_COMPILE_COST = CompileCost(saving=0.3, first_build_seconds=13, cached_build_seconds=0, seconds_per_layer=0.1)
"""For our own kernels; the saving is measured in docs/results/speed.md, the cost in docs/results/fast.md."""
TORCH_COMPILE_COST = CompileCost(saving=0.15, first_build_seconds=0, cached_build_seconds=0, seconds_per_layer=1)
"""For torch.compile, used in float32; the saving was measured in half precision, the seconds are a guess."""

MEASURE_SECONDS = 20
"""Seconds of an epoch that are measured; in fewer the host, which runs ahead of the device, measures too little."""


class TimingMark(NamedTuple):
    """The clock at one moment of an epoch, with the warm-up seconds and the backprops spent so far."""

    clock: float
    warm_up_seconds: float
    backprops: int


class CompilePolicy:
    """Never changes the engine; the base class of policies that do."""

    def before_epoch(self, trainer: "Trainer") -> None:
        """Called before an epoch starts or resumes."""

    def after_batch(self, trainer: "Trainer") -> None:
        """Called after a batch was submitted to the device."""

    def after_epoch(self, trainer: "Trainer", timing: EpochTiming) -> None:
        """Called after an epoch."""


class AutoCompile(CompilePolicy):
    """Compiles moves if the rest of the run repays it, and reverts if compiled moves are no faster.

    Attributes:
        recorded_pace: Seconds per backprop before compiling; None until moves are compiled.
    """

    def __init__(self) -> None:
        self.recorded_pace: float | None = None
        self._is_decided = self._is_mixed_epoch = False
        self._epoch_start = TimingMark(perf_counter(), 0.0, 0)
        self._measured_from: TimingMark | None = None

    def before_epoch(self, trainer: "Trainer") -> None:
        """Start the clock of the epoch."""
        self._epoch_start, self._measured_from, self._is_mixed_epoch = _mark_now(trainer), None, False

    def after_batch(self, trainer: "Trainer") -> None:
        """Decide in the middle of a long epoch; several processes decide together at its end instead.

        The first batch of an epoch is not measured: in it, data workers start and other things are built.
        """
        now = _mark_now(trainer)
        since = self._measured_from = self._measured_from or now
        seconds = now.clock - since.clock - (now.warm_up_seconds - since.warm_up_seconds)
        if seconds > MEASURE_SECONDS and self.recorded_pace is None and not trainer.distributed.is_multiprocess:
            self._compile_if_worth_it(trainer, seconds / (now.backprops - since.backprops))
            self._is_mixed_epoch, self._measured_from = self.recorded_pace is not None, now

    def after_epoch(self, trainer: "Trainer", timing: EpochTiming) -> None:
        """Compare seconds per backprop; an epoch in which moves were compiled is not measured."""
        since, end = self._measured_from or self._epoch_start, trainer.game.cost.backprops
        if since.backprops == end:
            since = self._epoch_start  # the epoch had a single batch
        if self._is_decided or self._is_mixed_epoch or since.backprops == end:
            return
        before = since.clock - self._epoch_start.clock - (since.warm_up_seconds - self._epoch_start.warm_up_seconds)
        measured = timing.train_seconds - timing.warm_up_seconds - before
        seconds = trainer.distributed.broadcast_json(measured)  # so that all processes decide alike
        pace = seconds / (end - since.backprops)
        if self.recorded_pace is None:
            self._compile_if_worth_it(trainer, pace)
        else:
            self._keep_or_revert(trainer, pace, self.recorded_pace)

    def _compile_if_worth_it(self, trainer: "Trainer", pace: float) -> None:
        """Compile if the rest of the run, at the present k, saves more than compiling takes."""
        batches_left = (trainer.config.epochs - trainer.epoch) * len(trainer.train) - trainer.batches_done
        budget = trainer.schedule.budget(trainer.schedule_state, trainer.epoch)
        cost = TRITON_COMPILE_COST if trainer.engine.uses_own_kernels else TORCH_COMPILE_COST
        # The processes' kernel caches may differ.
        compile_seconds = trainer.distributed.broadcast_json(cost.estimate_seconds(trainer.model))
        if batches_left * trainer.method.play.backprops(budget) * pace * cost.saving > compile_seconds:
            self.recorded_pace = pace
            trainer.game.executor.use_compiled(True)

    def _keep_or_revert(self, trainer: "Trainer", pace: float, recorded: float) -> None:
        self._is_decided = True
        if trainer.game.executor.compiled is not None and pace > recorded:  # None: compiling failed
            trainer.game.executor.use_compiled(False)


def _mark_now(trainer: "Trainer") -> TimingMark:
    return TimingMark(perf_counter(), trainer.game.executor.warm_up_seconds, trainer.game.cost.backprops)
