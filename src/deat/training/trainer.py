"""The training loop, in plain sight. It knows neither which method it runs nor what a method is made of."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from deat.core.buffers import Budget
from deat.core.meter import EpochRecord
from deat.core.moves import Game
from deat.core.objectives import Objective
from deat.data.batch_order import num_images_in_batch
from deat.data.sources import SeekableSource, Source, stopping_workers
from deat.engine.cuda_graphs import device_context
from deat.errors import Interrupted, NumericalError, UsageError
from deat.evaluation.arguments import check_model
from deat.methods import Method, get_method
from deat.models import get_input_std
from deat.models.weights import get_state_dict, unwrap_model
from deat.threat import ThreatModel, parse_threat
from deat.training.best_epoch import BestEpoch, TrainResult
from deat.training.callbacks import Callback, Checkpointer, check_callbacks, log10_lipschitz
from deat.training.config import TrainConfig, choose_num_threads, torch_backend_flags
from deat.training.engine_choice import AutoCompile, CompilePolicy, choose_engine
from deat.training.messages import (
    collect_result_notes,
    is_out_of_memory,
    make_numerical_error,
    out_of_memory_message,
    raise_if_nondeterministic,
)
from deat.training.optimizers import (
    LRScheduler,
    OptimizerFactory,
    check_optimizer_factory,
    describe_param_groups,
    load_optimizer_state,
    make_sgd_factory,
)
from deat.training.records import EpochStats, EpochTiming
from deat.training.validation import Validator
from deat.utils.distributed import SINGLE_PROCESS, Distributed
from deat.utils.seeding import RandomStreams
from deat.utils.signals import Interruption

Batch = tuple[Tensor, Tensor]


def remaining_batches(source: Source, epoch: int, step: int, interruption: Interruption) -> Iterator[tuple[int, Batch]]:
    """An epoch's batches from `step` on, each with its number; asked to stop, it stops before the next one.

    A source that can begin there does. Any other draws its first batches again, and they are left out.
    """
    first, batches = _start_batches(source, epoch, step)
    for number, batch in enumerate(batches, first):
        interruption.check()
        if number >= step:
            yield number, batch


def _start_batches(source: Source, epoch: int, step: int) -> tuple[int, Iterator[Batch]]:
    """The number of the first batch that is drawn, and the batches from it on."""
    if step and isinstance(source, SeekableSource) and source.can_seek:
        return step, source.epoch(epoch, step)
    return 0, source.epoch(epoch)


def gather_process_state(game: Game, step: int) -> dict[str, Any]:
    """Every process's sums and buffers, and the carried delta of the whole batch; all must ask for it."""
    ranks, buffers = game.distributed, {}
    if step and ranks.is_multiprocess:  # between epochs they are everybody's
        buffers = {name: torch.stack(ranks.all_gather_tensor(b)) for name, b in game.net.named_buffers()}
    return {
        "meter": ranks.gather(game.meter.state_dict()) if step else None,
        "carry": None if game.carried_delta is None else _interleave_rows(ranks.all_gather_tensor(game.carried_delta)),
        "buffers": buffers,
    }


def restore_process_state(game: Game, state: dict[str, Any]) -> None:
    """Take this process's part of such a state up again."""
    rank, size, carry = game.distributed.rank, game.distributed.size, state["carry"]
    if state["meter"]:
        game.meter.load_state_dict(_select_own_sums(state["meter"], rank, size))
    game.carried_delta = None if carry is None else carry[rank::size].to(game.engine.device, copy=True)
    with torch.no_grad():
        for name, buffer in game.net.named_buffers():
            rows = state.get("buffers", {}).get(name, ())
            if len(rows) == size:  # else as many processes as now did not save it, and the first one's are in the model
                buffer.copy_(rows[rank])


def sync_batch_norm(model: nn.Module, config: TrainConfig, device: torch.device, distributed: Distributed) -> nn.Module:
    """The model, its batch norms taking their statistics over all processes where that was asked for."""
    if not config.sync_bn:
        return model
    if device.type != "cuda":
        raise UsageError("sync_bn needs GPUs: torch has no synchronised batch norm on a CPU. Leave it out.")
    return distributed.to_sync_batch_norm(model)


def _select_own_sums(saved: list[dict[str, list[float]]], rank: int, size: int) -> dict[str, list[float]]:
    """This process's sums; where another number of processes saved them, those it now stands for."""
    mine = saved[rank::size]
    sums = [sum(column) for column in zip(*(part["sums"] for part in mine), strict=True)]
    common, active = saved[0]["counts"][:3], sum(part["counts"][3] for part in mine)
    return {"sums": sums or [0.0] * 4, "counts": [*common, active]}


def _interleave_rows(parts: list[Tensor]) -> Tensor:
    """A batch's rows in their order, from every process's."""
    whole = torch.cat([torch.empty_like(part) for part in parts])
    for rank, part in enumerate(parts):
        whole[rank :: len(parts)] = part
    return whole


STATE_KEPT_ON_REWIND = ("cost", "active", "seconds", "val_passes", "lengths")
"""What a trainer keeps when it goes back to an earlier state: what was spent, and how long its steps are."""


class Trainer:
    """Trains one network by one method against one threat model, on sources of batches.

    Weights, optimiser, the schedule's state, the game's carried delta, the meter's sums and the position are all
    there is to continue from: state_dict() has them, and a keeper saves them. interruption ends training between
    two batches. ended says that the state which was loaded has nothing left to play. engine_news is what a person
    should know of how moves run, if anything.
    """

    def __init__(
        self,
        model: nn.Module,
        train: Source,
        *,
        method: str | Method,
        threat: str | ThreatModel,
        config: TrainConfig,
        val: Source | None = None,
        optimizer: OptimizerFactory | None = None,
        callbacks: Sequence[Callback] = (),
        distributed: Distributed = SINGLE_PROCESS,
    ) -> None:
        check_model(model)
        check_optimizer_factory(optimizer)
        self.callbacks = check_callbacks(callbacks)
        self.method, self.threat = method, threat = get_method(method), parse_threat(threat)
        self.train, self.val, self.config, self.distributed = train, val, config, distributed
        self.num_parameters = sum(p.numel() for p in model.parameters())
        self.threads = choose_num_threads(config, model)
        chosen = choose_engine(config, method, self.num_parameters, distributed, custom_optimizer=optimizer is not None)
        self.engine, self.engine_note, self.may_compile = chosen.engine, chosen.news, chosen.may_compile
        self.model = self.engine.prepare(sync_batch_norm(model, config, self.engine.device, distributed))
        self.optimizer = (optimizer or make_sgd_factory(config, self.engine.use_cuda_graphs))(self.model.parameters())
        self.custom_param_groups = describe_param_groups(self.optimizer) if optimizer else None
        self.lr_scheduler = LRScheduler(self.optimizer, config, total_steps=config.epochs * len(train))
        self.game = Game(
            self.model,
            distributed.wrap_ddp(Objective(self.model, method.objective)),
            threat,
            method.attack,
            self.optimizer,
            probe=method.probe,
            engine=self.engine,
            pixel_scale=get_input_std(self.model),
            distributed=distributed,
        )
        self.game.executor.full_batch_size = distributed.share.count(train.batch_size)
        self.pace = AutoCompile() if self.may_compile else CompilePolicy()
        self.random_streams = RandomStreams(config.seed, self.game.generator, distributed)
        self.interruption = Interruption(distributed)
        self.checkpointer: Checkpointer | None = None
        self.validator = Validator.of(val, config, threat, self.engine, self.interruption)
        self.schedule = method.bind(threat, config.epochs)
        self.state = self.schedule.init()
        self.budget = self.schedule.budget(self.state, 0)
        self.epoch, self.step, self.seconds = 0, 0, 0.0
        self._started = self._done = perf_counter()
        self.active, self._stopping, self.is_finished = 0, False, False
        self.history: list[EpochStats] = []
        self.best = BestEpoch(robust=self.schedule.attacks)

    def fit(self) -> TrainResult:
        """Train until the last epoch; where training is interrupted, its state is kept first."""
        self._stopping, self.is_finished, self._done = self.is_finished, False, perf_counter()
        with self.session():
            if self.checkpointer:
                self.checkpointer.begin(self)
            try:
                self._run_remaining_epochs()
            except Interrupted:
                self.seconds += perf_counter() - self._started
                self._keep(force=True)
                self.interruption.asked = None  # whoever caught this may call fit again
                raise
            except (RuntimeError, MemoryError) as error:
                raise_if_nondeterministic(error)
                if not is_out_of_memory(error):
                    raise
                raise self.numerical_error(out_of_memory_message(self.epoch, self.train.batch_size)) from error
            self._keep(force=True)
        return TrainResult(
            self.model.eval(), self.history, self.best.snapshot, self.seconds, collect_result_notes(self)
        )

    def _run_remaining_epochs(self) -> None:
        while self.epoch < self.config.epochs and not self._stopping:
            self._started = perf_counter()
            self.interruption.check()
            self.run_epoch()
            self._keep()

    def run_epoch(self) -> EpochStats:
        """Play every batch once, validate, let the schedule observe, keep the best, tell the callbacks."""
        started = perf_counter()
        self.game.executor.take_warm_up_seconds()  # what is left of an epoch that was broken off
        self.pace.before_epoch(self)
        self.budget = self.schedule.budget(self.state, self.epoch)
        record = self.train_epoch(self.budget)
        played = perf_counter()
        bound = self._check_weights()
        validated = self._validate(self.validator) if self.validator else (None, None, None)
        stats, timing = self._make_stats(record, bound, *validated), self._make_timing(record, started, played)
        self.state = self.schedule.observe(self.state, record)
        self.history.append(stats)
        self.best.update_if_better(stats, self.model, self.validator.chance_upper_bound if self.validator else None)
        self.epoch, self.step, self.seconds = self.epoch + 1, 0, self.seconds + timing.train_seconds
        self.pace.after_epoch(self, timing)
        for callback in self.callbacks:
            callback.on_epoch(self, stats, timing)
        return stats

    def train_epoch(self, budget: Budget) -> EpochRecord:
        """One epoch of games; the device is read once, at its end."""
        self.model.train()
        self.game.refresh()
        self.game.clear_gradients()
        if not self.step:
            self.game.meter.reset()
        for step, (x, y) in remaining_batches(self.train, self.epoch, self.step, self.interruption):
            self.prepare_step(self.epoch, step)
            self.method.play(self.game, x, y, budget)
            self.step = step + 1
            self.pace.after_batch(self)
        self.distributed.broadcast_model_buffers(self.model)
        return self.read_meter()

    def prepare_step(self, epoch: int, step: int) -> None:
        """Put random streams, learning rate and the batch's length where a batch finds them."""
        self.random_streams.at(epoch, step)
        self.lr_scheduler.at(epoch * len(self.train) + step)
        if self.distributed.is_multiprocess:
            self.game.global_batch_size = num_images_in_batch(self.train.num_examples, self.train.batch_size, step)

    def set_interruption(self, interruption: Interruption) -> None:
        """Stop when this one asks to."""
        self.interruption = interruption
        if self.validator:
            self.validator.interruption = interruption

    def stop(self) -> None:
        """End training after the epoch that is running; for callbacks."""
        self._stopping = True

    def scale_step_size(self, factor: float) -> None:
        """Multiply the schedule's lengths, and so the adversary's steps, from the next epoch on; for callbacks."""
        lengths = {name: factor * length for name, length in self._step_lengths.items()}
        self.schedule = replace(self.schedule, **lengths)

    def rewind(self, state: dict[str, Any]) -> None:
        """Go back to an earlier state_dict(); what was spent since stays spent, and short steps stay short."""
        now = self.state_dict()
        self.load_state_dict({**state, **{name: now[name] for name in STATE_KEPT_ON_REWIND}})

    def _keep(self, *, force: bool = False) -> None:
        if self.checkpointer:
            self.checkpointer.keep(self, force=force)

    def read_meter(self) -> EpochRecord:
        """Read the meter, and raise where an epoch's numbers went bad."""
        try:
            return self.game.meter.read(self.epoch)
        except NumericalError as error:
            raise self.numerical_error(str(error), error.batch) from None

    def numerical_error(self, message: str, batch: int | None = None) -> NumericalError:
        """An error that says where training was: at the first bad batch if it is known, else at the last one."""
        batch = max(1, self.step) if batch is None else batch
        lr = self.lr_scheduler.lr_at(self.epoch * len(self.train) + batch - 1)
        seed = self.config.seed
        return make_numerical_error(message, epoch=self.epoch, batch=batch, budget=self.budget, lr=lr, seed=seed)

    def state_dict(self) -> dict[str, Any]:
        """Everything to continue from between two batches."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "stopping": self._stopping,
            "schedule": dict(self.state),
            "lengths": self._step_lengths,
            **gather_process_state(self.game, self.step),
            "rng": self.random_streams.state_dict(),
            "model": get_state_dict(self.model),
            "optimizer": self.optimizer.state_dict(),
            "cost": vars(self.game.cost).copy(),
            "active": self.active,
            "seconds": self.seconds,
            "history": list(self.history),
            "best": self.best.held,
            "scaler": self.engine.scaler.state_dict() if self.engine.scaler else None,
            "val_passes": self.validator.passes if self.validator else 0,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state_dict()."""
        unwrap_model(self.model).load_state_dict(state["model"])
        load_optimizer_state(self.optimizer, state["optimizer"])
        self.game.executor.clear_recordings()  # the optimiser has new tensors
        self.schedule = replace(self.schedule, **state["lengths"])
        self.epoch, self.state, self.seconds = state["epoch"], dict(state["schedule"]), state["seconds"]
        self.step, self.is_finished = state["step"], state["stopping"] or state["epoch"] >= self.config.epochs
        restore_process_state(self.game, state)
        self.random_streams.load_state_dict(state["rng"])
        vars(self.game.cost).update(state["cost"])
        self.active, self.history = state["active"], list(state["history"])
        self.best = BestEpoch(state["best"], robust=self.schedule.attacks)
        if self.engine.scaler and state["scaler"]:
            self.engine.scaler.load_state_dict(state["scaler"])
        if self.validator:
            self.validator.passes = state["val_passes"]

    @property
    def _step_lengths(self) -> dict[str, float]:
        return {"alpha": self.schedule.alpha, "stretch": self.schedule.stretch}

    def _check_weights(self) -> float:
        """The bound on the network's Lipschitz constant, as log10; raises where weights went bad."""
        bound = log10_lipschitz(self.model)
        finite = torch.stack([p.detach().isfinite().all() for p in self.model.parameters() if p.requires_grad]).all()
        if not (math.isfinite(bound) and finite):
            raise self.numerical_error(
                f"weights stopped being finite in epoch {self.epoch + 1}. Lower the learning rate."
            )
        return bound

    def _validate(self, validator: Validator) -> tuple[float, float, float]:
        """Natural and robust accuracy and the loss on held-out images; raises where answers went bad."""
        natural, robust, loss = validator(self.model)
        if not math.isfinite(loss):
            raise self.numerical_error(
                f"the loss on held-out images is {loss} in epoch {self.epoch + 1}: in eval mode, where batch norms use "
                "their running statistics, the network's answers stopped being finite. Lower the learning rate."
            )
        return natural, robust, loss

    def _make_stats(
        self,
        record: EpochRecord,
        lipschitz_bound: float,
        natural: float | None,
        robust: float | None,
        val_loss: float | None,
    ) -> EpochStats:
        budget, self.active = self.budget, self.active + record.active
        return EpochStats(
            epoch=self.epoch,
            k=budget.k,
            alpha=budget.step_size,
            level=budget.level,
            magnitude=record.magnitude,
            threshold=self.state.get("threshold"),
            loss=record.loss,
            train_accuracy=record.accuracy,
            val_natural=natural,
            val_robust=robust,
            log10_lipschitz=lipschitz_bound,
            lr=self.lr_scheduler.lr_at(self.epoch * len(self.train) + self.step - 1),
            examples=record.examples,
            skipped=record.skipped,
            active=self.active,
            backprops=self.game.cost.backprops,
            passes=self.game.cost.passes,
            val_passes=self.validator.passes if self.validator else 0,
            val_loss=val_loss,
        )

    def _make_timing(self, record: EpochRecord, started: float, train_ended: float) -> EpochTiming:
        before, self._done = self._done, perf_counter()
        training, validation, other = train_ended - started, self._done - train_ended, started - before
        pace, warm_up = record.examples / training, self.game.executor.take_warm_up_seconds()
        return EpochTiming(self.epoch, training, validation, pace, other, warm_up, self.engine.name)

    @contextmanager
    def session(self) -> Iterator[None]:
        """Threads and torch's random state are the trainer's inside, and the caller's again afterwards; workers end."""
        # A recording is made once and played often, so the fastest convolutions are worth a search.
        modes = torch_backend_flags(
            self.threads, cudnn_benchmark=self.engine.use_cuda_graphs, deterministic=self.config.deterministic
        )
        device = self.engine.device
        with (
            device_context(device),
            modes,
            stopping_workers(self.train, self.val),
            self.random_streams.isolated_rng(device),
        ):
            yield
