"""Estimate the cost of a training: backprops from its schedule, time and memory from a few batches of each kind of work."""

import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import mkdtemp
from time import perf_counter

import torch
from torch import nn

from deat.attack_schedules import Schedule
from deat.core.batch_buffers import Budget
from deat.data import BatchSource
from deat.evaluation.attack_registry import estimate_passes
from deat.evaluation.attack_verifier import AttackLike
from deat.evaluation.attacks import Attack, logits_under_attack, parse_attack
from deat.methods import Method
from deat.tasks import Classification
from deat.tasks.classification import as_class_logits
from deat.training.checkpoints import Checkpoints
from deat.training.model_checks import log10_lipschitz
from deat.training.trainer import Trainer
from deat.training.validation import AutocastModel
from deat.utils.torch_contexts import eval_mode

MEASURE_SECONDS = 0.5
"""How long batches of one kind are measured at least, as far as an epoch has enough of them."""
LONG_BATCH_SECONDS = 5.0
"""If a batch takes longer than this, its time counts, and no more batches of its kind are measured."""
MAX_MEASURED_CALLS = 20
MEASURED_ATTACK_STEPS = 5
HARMLESS_SHARE_OF_EPS = 1e-6
ACTIVE_SHARE = 0.5
"""The share of images that an attack moves after its first step, since it stops on images that are fooled."""

SecondsRange = tuple[float, float]


@dataclass(frozen=True)
class CostEstimate:
    """The cost of a run; pairs are (lowest, highest), since k may depend on the training.

    Attributes:
        batches: The number of batches of an epoch.
        backprops: Backprops of the run.
        seconds_per_backprop: Seconds of training per backprop.
        seconds: Seconds of the run, the sum of all parts.
        memory: Peak memory in bytes.
        parts: Seconds of "training", "validation", "saving" and other parts.
    """

    batches: int
    backprops: tuple[int, int]
    seconds_per_backprop: float
    seconds: SecondsRange
    memory: int
    parts: dict[str, SecondsRange] = field(default_factory=dict)

    def with_parts(self, parts: Mapping[str, float]) -> "CostEstimate":
        """Return the estimate with more parts, which take these seconds whatever k is."""
        both = self.parts | {name: (seconds, seconds) for name, seconds in parts.items()}
        low, high = (sum(part[side] for part in both.values()) for side in (0, 1))
        return replace(self, seconds=(low, high), parts=both)


@dataclass(frozen=True)
class LinearTime:
    """Seconds of a call on a batch: some for each call, and some for each image."""

    call_seconds: float
    image_seconds: float

    def estimate_seconds(self, num_calls: float, num_images: float) -> float:
        """Estimate the seconds of several calls on so many images in all."""
        return num_calls * self.call_seconds + num_images * self.image_seconds


@dataclass(frozen=True)
class AttackSpeed:
    """How fast a network is attacked.

    Attributes:
        forward: The time of a pass without an attack.
        step: The time of a step of an attack.
        batch_size: Images in a batch.
    """

    forward: LinearTime
    step: LinearTime
    batch_size: int

    def estimate_seconds(self, attacks: Iterable[AttackLike], num_images: int) -> float:
        """Estimate the seconds that attacks on so many images take."""
        calls, seconds = -(-num_images // self.batch_size), 0.0
        for attack in attacks:
            seconds += self.forward.estimate_seconds(calls, num_images)
            if isinstance(attack, Attack):
                seconds += self._estimate_steps(attack, calls, num_images)
            else:
                seconds += self.estimate_pass_seconds(estimate_passes(attack), num_images)
        return seconds

    def estimate_pass_seconds(self, num_passes: float, num_images: int) -> float:
        """Estimate the seconds of so many forward and backward passes of images; a step has one of each."""
        calls = -(-num_images // self.batch_size)
        return num_passes / 2 * self.step.estimate_seconds(calls, num_images)

    def _estimate_steps(self, attack: Attack, calls: int, num_images: int) -> float:
        """All images make the first step; later ones leave out the images that are fooled."""
        first, share = min(1, attack.steps), ACTIVE_SHARE if attack.freeze else 1.0
        moved = first + (attack.steps - first) * share
        return attack.restarts * self.step.estimate_seconds(calls * attack.steps, num_images * moved)


def estimate_cost(trainer: Trainer, folder: Path | None = None) -> CostEstimate:
    """Estimate the cost of a training: its batches, validation after each epoch, and saving.

    Args:
        trainer: The run's trainer. A few batches are trained, so it cannot be used afterwards.
        folder: A folder on the disk that checkpoints are written to; None for a training without checkpoints.

    Returns:
        The estimate.
    """
    epochs, batches = trainer.config.epochs, len(trainer.train)
    low, high = (_plan_budgets(trainer.schedule, epochs, grow) for grow in (False, True))
    with trainer.session():
        trainer.model.train()
        clock = _measure_training(trainer, [*low, *high])
        training = [batches * sum(map(clock.estimate_batch_seconds, budgets)) for budgets in (low, high)]
        parts = {"validation": epochs * _measure_validation(trainer)}
        if folder is not None:
            parts["saving"] = (epochs + 1) * _measure_saving(trainer, folder)
        memory = _peak_memory_bytes(trainer.engine.device)
    backprops = [batches * sum(map(trainer.method.play.backprops, budgets)) for budgets in (low, high)]
    training_parts = {"training": (training[0], training[1])}
    estimate = CostEstimate(
        batches, (backprops[0], backprops[1]), training[1] / backprops[1], (0.0, 0.0), memory, training_parts
    )
    return estimate.with_parts(parts)


def backprop_bounds(method: Method, schedule: Schedule, epochs: int) -> tuple[int, int]:
    """Count the backprops of a training with one batch an epoch, at least and at most.

    Args:
        method: The training method.
        schedule: Its schedule.
        epochs: The number of epochs.

    Returns:
        The lowest and the highest count: if the schedule never adds steps, or whenever it can.
    """
    low, high = (sum(map(method.play.backprops, _plan_budgets(schedule, epochs, grow))) for grow in (False, True))
    return low, high


def measure_attack_speed(
    trainer: Trainer, source: BatchSource, *, attack: Attack | None = None, uses_autocast: bool = False
) -> AttackSpeed:
    """Measure how fast the network of a trainer is attacked, on a batch of a source and on half of it.

    Args:
        trainer: The trainer.
        source: The data.
        attack: The attack whose steps are measured; by default PGD.
        uses_autocast: Compute in the precision of training, as validation does, and not in float32.

    Returns:
        The speed; several processes take the batches in turn.
    """
    model: nn.Module = AutocastModel(trainer.model, trainer.engine) if uses_autocast else trainer.model
    x, y = next(iter(source.epoch(0)))
    x = trainer.engine.to_memory_format(x.to(torch.promote_types(torch.float32, next(model.parameters()).dtype)))
    # An attack that fools no image moves all of them in every step.
    ball = trainer.threat.balls[0]
    harmless = replace(ball, eps=ball.eps * HARMLESS_SHARE_OF_EPS)
    stepping = replace(attack or parse_attack("pgd-20"), name="measured", steps=MEASURED_ATTACK_STEPS, restarts=1)
    if isinstance(trainer.task, Classification):
        with torch.no_grad(), eval_mode(model):
            y = as_class_logits(model(x)).argmax(1)

    def measure(num_images: int) -> tuple[float, float]:
        """Seconds of a pass, and of a step, with so many images."""
        few, labels, device = x[:num_images], y[:num_images], x.device
        forward, attacked = (
            _measure_call(
                lambda: logits_under_attack(model, few, labels, timed_attack, harmless, task=trainer.task),  # noqa: B023
                device,
            )
            for timed_attack in (parse_attack("natural"), stepping)
        )
        return forward, len(trainer.threat.balls) * max(0.0, attacked - forward) / MEASURED_ATTACK_STEPS

    full, half = len(x), max(1, len(x) // 2)
    times = [
        _fit_line((half, quick), (full, slow), trainer.distributed.size)
        for quick, slow in zip(measure(half), measure(full), strict=True)
    ]
    return AttackSpeed(times[0], times[1], source.batch_size)


def _fit_line(half: tuple[int, float], whole: tuple[int, float], num_processes: int) -> LinearTime:
    """The line through two measured times, divided by the number of processes that share the images."""
    (few, quick), (many, slow) = half, whole
    slope = min(max(0.0, (slow - quick) / max(1, many - few)), slow / many)
    return LinearTime((slow - slope * many) / num_processes, slope / num_processes)


@dataclass(frozen=True)
class _BatchClock:
    """Seconds of a batch as a linear function of its backprops, measured at the smallest and the largest number."""

    method: Method
    fewest: tuple[int, float]
    most: tuple[int, float]

    def estimate_batch_seconds(self, budget: Budget) -> float:
        """Estimate the seconds of a batch."""
        backprops = self.method.play.backprops(budget)
        (few, quick), (many, slow) = self.fewest, self.most
        if few == many:
            return quick * backprops / few
        return quick + max(0.0, slow - quick) * (backprops - few) / (many - few)


def _plan_budgets(schedule: Schedule, epochs: int, grow: bool) -> list[Budget]:
    """The budget of each epoch, if the schedule adds a step whenever it can, or never."""
    state, budgets = schedule.init(), []
    for epoch in range(epochs):
        budgets.append(schedule.budget(state, epoch))
        state = schedule.observe(state, schedule.bounding_record(epoch, epochs, grow))
    return budgets


def _measure_training(trainer: Trainer, budgets: Iterable[Budget]) -> _BatchClock:
    """Measure batches with the fewest and with the most backprops; with the fewest alone if the others take too long."""
    play = trainer.method.play
    by_backprops = {play.backprops(budget): budget for budget in budgets}
    few, many = min(by_backprops), max(by_backprops)
    quick = _measure_batches(trainer, by_backprops[few])
    if many == few:
        return _BatchClock(trainer.method, (few, quick), (few, quick))
    while quick * many / few > LONG_BATCH_SECONDS and any(few < n < many for n in by_backprops):
        many = max(n for n in by_backprops if n < many)
    return _BatchClock(trainer.method, (few, quick), (many, _measure_batches(trainer, by_backprops[many])))


def _measure_batches(trainer: Trainer, budget: Budget) -> float:
    """Seconds of a batch. The first one is not counted unless it takes long: set-up is a large part of it."""
    seconds = _time_batches(trainer, budget, 1)
    if seconds < LONG_BATCH_SECONDS:
        seconds = _time_batches(trainer, budget, 1)
        wanted = trainer.distributed.broadcast_json(round(MEASURE_SECONDS / max(seconds, 1e-6)))
        if wanted > 1:
            seconds = _time_batches(trainer, budget, min(wanted, len(trainer.train)))
    return float(trainer.distributed.broadcast_json(seconds))


def _time_batches(trainer: Trainer, budget: Budget, num_batches: int) -> float:
    started = perf_counter()
    for step, (x, y) in zip(range(num_batches), trainer.train.epoch(0), strict=False):
        trainer.prepare_step(0, step)
        trainer.method.play(trainer.game, x, y, budget)
    trainer.game.meter.read(0)  # waits for the device
    return (perf_counter() - started) / num_batches


def _measure_validation(trainer: Trainer) -> float:
    """Seconds of what follows the last batch of an epoch: the check of the weights, and validation."""
    seconds = _measure_call(lambda: log10_lipschitz(trainer.model), trainer.engine.device)
    if trainer.validator:
        source = trainer.validator.source
        speed = measure_attack_speed(trainer, source, attack=trainer.validator.attack, uses_autocast=True)
        attacks = [parse_attack("natural"), trainer.validator.attack]
        seconds += speed.estimate_seconds(attacks, source.num_examples)
    return float(trainer.distributed.broadcast_json(seconds))


def _measure_saving(trainer: Trainer, folder: Path) -> float:
    """Seconds of writing a checkpoint beside the place where the run's folder would be."""
    path = trainer.distributed.run_on_main(lambda: _create_temporary_folder(folder))
    if path is None:  # a folder that cannot be written to is reported when the run starts
        return 0.0
    try:
        started = perf_counter()
        Checkpoints(path).on_train_begin(trainer)
        return float(trainer.distributed.broadcast_json(perf_counter() - started))
    finally:
        trainer.distributed.run_on_main(lambda: shutil.rmtree(path, ignore_errors=True))


def _create_temporary_folder(folder: Path) -> str | None:
    """Create a folder on the same disk as another, which need not exist; None where nothing can be written."""
    place = next((path for path in (folder, *folder.parents) if path.is_dir()), Path())
    try:
        return mkdtemp(prefix=".deat-dry-run-", dir=place)
    except OSError:
        return None


def _measure_call(function: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call. The first one is not counted unless it takes long, and short ones are repeated."""
    seconds = _time_calls(function, device, 1)
    if seconds < LONG_BATCH_SECONDS:
        seconds = _time_calls(function, device, 1)
        wanted = MEASURE_SECONDS / 4 / max(seconds, 1e-6)
        seconds = _time_calls(function, device, round(min(max(wanted, 1), MAX_MEASURED_CALLS)))
    return seconds


def _time_calls(function: Callable[[], object], device: torch.device, num_calls: int) -> float:
    started = perf_counter()
    for _ in range(num_calls):
        function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (perf_counter() - started) / num_calls


def _peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
