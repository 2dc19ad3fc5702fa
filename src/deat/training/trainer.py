"""The training loop. It is the same for every method."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from deat.core.batch_buffers import Budget
from deat.core.epoch_sums import EpochRecord
from deat.core.game import Game
from deat.core.training_losses import Objective
from deat.data.batch_order import num_images_in_batch
from deat.data.batch_source import BatchSource, SeekableSource, find_batch_indices, stopping_workers
from deat.data.image_label_checks import noun_of_shape
from deat.engine.cpu_memory import reused_memory
from deat.engine.layer_work import count_multiply_adds
from deat.engine.precision import has_native_cpu_bf16
from deat.errors import Interrupted, NumericalError
from deat.methods import Method, get_method
from deat.methods.method import check_method_on_task, check_method_on_threat
from deat.models import get_input_std
from deat.models.interface_checks import check_model
from deat.models.weights import get_state_dict, unwrap_model
from deat.tasks import CLASSIFICATION, Task, get_task
from deat.threat import ThreatModel, parse_threat
from deat.training.batch_mixing import BatchMixing
from deat.training.best_epoch import CHOICE_KEY, BestEpoch, ScoredEpoch, Snapshot
from deat.training.callbacks import CallbackLike, Checkpointer, check_callbacks
from deat.training.config import TrainConfig, choose_num_threads, torch_backend_flags
from deat.training.distributed_state import gather_process_state, restore_process_state, sync_batch_norm
from deat.training.engine_choice import AutoCompile, CompilePolicy, choose_engine
from deat.training.epoch_records import EpochStats, EpochTiming, separate_training_accuracy
from deat.training.learner_task import make_learner_task
from deat.training.messages import (
    collect_partial_notes,
    collect_result_notes,
    is_out_of_memory,
    make_numerical_error,
    out_of_memory_message,
    raise_if_nondeterministic,
)
from deat.training.model_checks import log10_lipschitz
from deat.training.named_optimizers import OPTIMIZERS
from deat.training.optimizers import (
    LRScheduler,
    OptimizerFactory,
    check_optimizer_factory,
    clip_gradients,
    describe_param_groups,
    load_optimizer_state,
    make_optimizer,
    make_optimizer_factory,
)
from deat.training.run_record import describe_training
from deat.training.train_result import TrainResult
from deat.training.validation import Validator, ValScores
from deat.training.weight_average import WeightAverage
from deat.utils.distributed import SINGLE_PROCESS, Distributed
from deat.utils.seeding import RandomStreams
from deat.utils.signals import Interruption
from deat.utils.torch_contexts import device_context, without_autocast

Batch = tuple[Tensor, Tensor]

STATE_KEPT_ON_REWIND = ("cost", "active", "seconds", "val_passes", "lengths")
"""Entries of the state that a rewind does not change: what was spent, and the step lengths."""


class Trainer:
    """Trains one network with one method against one threat model.

    :func:`deat.fit` makes a trainer and runs it. Use one directly to add checkpoints or to call single epochs.
    `state_dict` has all that is needed to resume, also in the middle of an epoch.

    Args:
        model: A network that returns logits. It is trained in place.
        train: The source of training batches.
        method: The training method, or its name.
        threat: The threat model, or its text such as "linf:8/255".
        config: The settings of training.
        val: The source of held-out images that choose the best epoch.
        optimizer: A function from parameters to an optimizer; by default the one that `config` names, SGD.
        callbacks: Functions f(trainer, stats, timing) called after each epoch, or objects with methods of `Callback`.
        distributed: The processes that train together.
        task: What outputs and labels mean.

    Attributes:
        epoch: The number of finished epochs.
        batches_done: The number of batches done in the current epoch.
        schedule: The method's schedule, with absolute lengths.
        schedule_state: What the schedule remembers of the epochs so far.
        budget: The number and the size of the attack's steps in the current epoch.
        history: The statistics of every finished epoch.
        best: The best epoch so far.
        average: The moving average of the weights; None without `config.ema`.
        engine_note: Why batches are not all recorded as CUDA graphs; empty if they are, or if that is as configured.
        was_loaded_finished: Whether `load_state_dict` loaded a state without epochs left to train.
        data_name: The name of the data set, such as "cifar10", if it has one.
        n_train: The number of training images that were chosen of a larger set; None for all.
        checkpointer: Saves the state after epochs and on interruption; None for no saving.
        interruption: Ends training between two batches.

    Example:
        >>> trainer = deat.Trainer(model, source, method="n-fgsm", threat="linf:8/255", config=deat.TrainConfig())
        >>> result = trainer.fit()
    """

    def __init__(
        self,
        model: nn.Module,
        train: BatchSource,
        *,
        method: str | Method,
        threat: str | ThreatModel,
        config: TrainConfig,
        val: BatchSource | None = None,
        optimizer: OptimizerFactory | None = None,
        callbacks: Sequence[CallbackLike] = (),
        distributed: Distributed = SINGLE_PROCESS,
        task: str | Task = CLASSIFICATION,
    ) -> None:
        check_model(model)
        check_optimizer_factory(optimizer)
        self.callbacks = check_callbacks(callbacks)
        self.method, self.threat = method, threat = get_method(method), parse_threat(threat)
        self.task = get_task(task)
        check_method_on_task(method, self.task)
        check_method_on_threat(method, threat)
        self.train, self.val, self.config, self.distributed, self.model = train, val, config, distributed, model
        self.num_parameters = sum(p.numel() for p in model.parameters())
        self.threads = choose_num_threads(config, model)
        can_record_steps = optimizer is None and OPTIMIZERS[config.optimizer].can_record
        choice = choose_engine(config, method, self._count_batch_work, distributed, can_record_steps)
        self.engine, self.engine_note, self.may_compile = choice.engine, choice.fallback_note, choice.may_compile
        self.model = self.engine.prepare(sync_batch_norm(model, config, self.engine.device, distributed))
        factory = optimizer or make_optimizer_factory(config, self.engine.use_cuda_graphs)
        self.optimizer = make_optimizer(factory, self.model)
        self.custom_param_groups = describe_param_groups(self.optimizer) if optimizer else None
        if config.clip_grad_norm:
            clip_gradients(self.optimizer, config.clip_grad_norm)
        self.lr_scheduler = LRScheduler(self.optimizer, config, total_steps=config.epochs * len(train))
        self.mixing = BatchMixing.of(config, self.task, train, threat.box)
        played_task = self.task.with_mixed_labels() if self.mixing and self.mixing.mixes_labels else self.task
        learner_task = make_learner_task(played_task, config, method.objective, train)
        self.game = Game(
            self.model,
            distributed.wrap_ddp(Objective(self.model, method.objective, played_task, learner_task)),
            threat,
            method.attack,
            self.optimizer,
            probe=method.probe,
            engine=self.engine,
            pixel_scale=_input_scale(self.model, train.shape),
            distributed=distributed,
            measurements=method.measurements,
            check_inputs=False,  # sources check their data once
        )
        self._batch_indices = None
        if method.attack.remember is not None:
            self._batch_indices = find_batch_indices(train, method.name)
            self.game.remember_starts(train.num_examples, tuple(train.shape))
        self.average = WeightAverage(self.model, config.ema) if config.ema else None
        self.game.after_update = self.average.update if self.average else None
        self.game.executor.full_batch_size = distributed.shard.count(train.batch_size)
        self.compile_policy = AutoCompile() if self.may_compile else CompilePolicy()
        self.random_streams = RandomStreams(config.seed, self.game.generator, distributed)
        self.interruption = Interruption(distributed)
        self.checkpointer: Checkpointer | None = None
        self.validator = Validator.of(val, config, threat, self.engine, self.interruption, self.task)
        self.schedule = method.bind(threat, config.epochs)
        self.schedule_state = self.schedule.init()
        self.budget = self.schedule.budget(self.schedule_state, 0)
        self.epoch, self.batches_done, self.seconds = 0, 0, 0.0
        self._epoch_started = self._last_epoch_ended = perf_counter()
        self.num_image_steps, self._stopping, self.was_loaded_finished = 0, False, False
        self.data_name: str | None = None
        self.n_train: int | None = None
        self.history: list[EpochStats] = []
        self.best = self._make_best_epoch()

    def fit(self) -> TrainResult:
        """Train until the last epoch.

        Returns:
            The trained model, in eval mode, the history and the best epoch.

        Raises:
            Interrupted: Training was interrupted. Its state was saved first, if there is a checkpointer.
            NumericalError: The loss or the weights are not finite, or memory ran out.
        """
        self._stopping, self.was_loaded_finished = self.was_loaded_finished, False
        self._last_epoch_ended = perf_counter()
        result = None
        try:
            self._train_in_session()
            result = self.make_result()
        finally:
            self.call_callbacks("on_train_end", result)
        return result

    def _train_in_session(self) -> None:
        with self.session():
            if self.checkpointer:
                self.checkpointer.on_train_begin(self)
            self.call_callbacks("on_train_begin")
            try:
                self._run_remaining_epochs()
            except (Interrupted, KeyboardInterrupt) as error:
                self.seconds += perf_counter() - self._epoch_started
                if isinstance(error, Interrupted):  # else the weights may be those of half a step
                    with self.interruption.saving():
                        self._save_if_due(force=True)
                self.interruption.reason = None  # so that fit can be called again
                raise
            except (RuntimeError, MemoryError) as error:
                raise_if_nondeterministic(error)
                if not is_out_of_memory(error):
                    raise
                raise self.numerical_error(out_of_memory_message(self.epoch, self.train.batch_size)) from error
            self._save_if_due(force=True)

    def make_result(self, *, is_partial: bool = False) -> TrainResult:
        """Return what training has reached so far, with the model in eval mode. At least one epoch must be finished.

        Args:
            is_partial: Whether training was interrupted.
        """
        stopped_after = (self.epoch, self.batches_done) if is_partial else None
        return TrainResult(
            self.model.eval(),
            self.history,
            self.best.snapshot,
            self.best.choice,
            self.seconds,
            collect_partial_notes(self) if is_partial else collect_result_notes(self),
            record={
                **describe_training(self),
                CHOICE_KEY: self.best.choice.as_json(),
                **({"stopped_after": stopped_after} if stopped_after else {}),
            },
            stopped_after=stopped_after,
            averaged=self.average.weights() if self.average else None,
        )

    def _run_remaining_epochs(self) -> None:
        while self.has_epochs_left:
            self._epoch_started = perf_counter()
            self.interruption.check()
            self.run_epoch()
            self._save_if_due()

    def run_epoch(self) -> EpochStats:
        """Train one epoch, validate, update the schedule and the best epoch, and call the callbacks.

        Returns:
            The epoch's statistics, which were also appended to `history`.

        Raises:
            NumericalError: The loss, the weights or the validation loss are not finite.
        """
        started = perf_counter()
        self.game.executor.take_warm_up_seconds()  # drops those of an interrupted epoch
        self.compile_policy.before_epoch(self)
        self.budget = self.schedule.budget(self.schedule_state, self.epoch)
        record = self.train_epoch(self.budget)
        train_ended = perf_counter()
        lipschitz_bound = self._check_weights()
        scores = self._validate(self.validator) if self.validator else None
        average_scores = self._validate_average()
        timing = self._make_timing(record, started, train_ended)
        stats = self._make_stats(record, lipschitz_bound, scores, average_scores)
        stats = self._update_best(stats, scores, average_scores)
        self.schedule_state = self.schedule.observe(self.schedule_state, record)
        self.history.append(stats)
        self.epoch, self.batches_done, self.seconds = self.epoch + 1, 0, self.seconds + timing.train_seconds
        self.compile_policy.after_epoch(self, timing)
        self.call_callbacks("on_epoch", stats, timing)
        return stats

    def train_epoch(self, budget: Budget) -> EpochRecord:
        """Train on the batches of an epoch that are left. The device is read once, at the end.

        Args:
            budget: The number and the length of the adversary's steps.

        Returns:
            The means over the epoch.
        """
        self.model.train()
        self.game.refresh()
        self.game.clear_gradients()
        if self.average:
            self.average.refresh()
        if not self.batches_done:
            self.game.meter.reset()
        for step, (x, y) in remaining_batches(self.train, self.epoch, self.batches_done, self.interruption):
            self.prepare_step(self.epoch, step)
            if self.mixing:
                x, y = self.mixing.apply(x, y, self.epoch, step)
            self.method.play_batch(self.game, x, y, budget)
            self.batches_done = step + 1
            self.call_callbacks("on_batch", self.game.last_batch)
            self.compile_policy.after_batch(self)
        self.distributed.broadcast_model_buffers(self.model)
        if self.average:
            self.average.broadcast_buffers(self.distributed)
        return self.read_meter()

    def prepare_step(self, epoch: int, step: int) -> None:
        """Set the random streams, the learning rate, the batch size and the numbers of the images for one batch.

        Args:
            epoch: The epoch, from 0.
            step: The batch in the epoch, from 0.
        """
        self.random_streams.seek(epoch, step)
        self.lr_scheduler.set_step(epoch * len(self.train) + step)
        if self.distributed.is_multiprocess:
            self.game.global_batch_size = num_images_in_batch(self.train.num_examples, self.train.batch_size, step)
        if self._batch_indices is not None:
            self.game.batch_index = self._batch_indices(epoch, step)

    def use_recorded_precision(self, precision: str) -> None:
        """Train on a CPU in the precision that a checkpoint was trained in, where the config leaves the choice to deat.

        What "auto" is may have changed between versions.

        Args:
            precision: The precision in the checkpoint.
        """
        is_choice = self.config.precision == "auto" and self.engine.device.type == "cpu"
        if is_choice and (precision == "fp32" or (precision == "bf16" and has_native_cpu_bf16())):
            self.game.use_precision(precision)  # type: ignore[arg-type]

    def _count_batch_work(self) -> float:
        """The multiply-adds of a forward pass of a batch; with several processes, of their parts together."""
        return self.train.batch_size * count_multiply_adds(self.model, tuple(self.train.shape))

    def set_interruption(self, interruption: Interruption) -> None:
        """Use another interruption, such as one that several trainings share.

        Args:
            interruption: The interruption.
        """
        self.interruption = interruption
        if self.validator:
            self.validator.interruption = interruption

    def call_callbacks(self, event: str, *arguments: object) -> None:
        """Call the callbacks that handle an event, a method of `Callback`, in their order.

        Args:
            event: The name of the callbacks' function, such as "on_epoch".
            *arguments: What it is called with, after the trainer.
        """
        for callback in self.callbacks:
            if handler := getattr(callback, event, None):
                handler(self, *arguments)

    def stop(self) -> None:
        """End training after the current epoch. For callbacks."""
        self._stopping = True

    def scale_step_size(self, factor: float) -> None:
        """Multiply the length of the adversary's steps by `factor` from the next epoch on. For callbacks.

        Args:
            factor: What the step size is multiplied by.
        """
        lengths = {name: factor * length for name, length in self._step_lengths.items()}
        self.schedule = replace(self.schedule, **lengths)

    def rewind(self, state: dict[str, Any]) -> None:
        """Return to an earlier state; costs and step lengths are not reset.

        Args:
            state: An earlier result of `state_dict`.
        """
        current = self.state_dict()
        self.load_state_dict({**state, **{name: current[name] for name in STATE_KEPT_ON_REWIND}})

    def _save_if_due(self, *, force: bool = False) -> None:
        if self.checkpointer:
            self.checkpointer.save_if_due(self, force=force)

    def read_meter(self) -> EpochRecord:
        """Read the epoch's means so far.

        Returns:
            The means.

        Raises:
            NumericalError: A batch's loss was not finite.
        """
        try:
            return self.game.meter.read(self.epoch)
        except NumericalError as error:
            raise self.numerical_error(str(error), error.batch) from None

    def numerical_error(self, message: str, batch: int | None = None) -> NumericalError:
        """Make an error that names the position in training.

        Args:
            message: What is wrong, and what to do.
            batch: The first bad batch of the epoch, from 1; by default the last one.

        Returns:
            The error, to be raised.
        """
        batch = max(1, self.batches_done) if batch is None else batch
        lr = self.lr_scheduler.lr_at(self.epoch * len(self.train) + batch - 1)
        seed = self.config.seed
        return make_numerical_error(message, epoch=self.epoch, batch=batch, budget=self.budget, lr=lr, seed=seed)

    def state_dict(self) -> dict[str, Any]:
        """Return all that is needed to resume between two batches. A collective call for several processes."""
        return {
            "epoch": self.epoch,
            "step": self.batches_done,
            "stopping": self._stopping,
            "schedule": dict(self.schedule_state),
            "lengths": self._step_lengths,
            **gather_process_state(self.game, self.batches_done),
            "rng": self.random_streams.state_dict(),
            "model": get_state_dict(self.model),
            "optimizer": self.optimizer.state_dict(),
            "cost": vars(self.game.cost).copy(),
            "active": self.num_image_steps,
            "seconds": self.seconds,
            "history": list(self.history),
            "best": self.best.snapshot_or_none,
            "scored": list(self.best.scored),
            "scaler": self.engine.scaler.state_dict() if self.engine.scaler else None,
            "val_passes": self.validator.passes if self.validator else 0,
            "average": self.average.state_dict() if self.average else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a result of `state_dict`.

        Args:
            state: What `state_dict` returned.
        """
        unwrap_model(self.model).load_state_dict(state["model"])
        load_optimizer_state(self.optimizer, state["optimizer"])
        self.game.executor.clear_recordings()  # they refer to tensors that the optimizer has replaced
        self.schedule = replace(self.schedule, **state["lengths"])
        self.epoch, self.schedule_state, self.seconds = state["epoch"], dict(state["schedule"]), state["seconds"]
        self.batches_done, self.was_loaded_finished = (
            state["step"],
            state["stopping"] or state["epoch"] >= self.config.epochs,
        )
        restore_process_state(self.game, state)
        self.random_streams.load_state_dict(state["rng"])
        vars(self.game.cost).update(state["cost"])
        description = self.method.describe()
        self.history = [separate_training_accuracy(stats, description) for stats in state["history"]]
        self.num_image_steps = state["active"]
        self.best = self._make_best_epoch(state["best"], state.get("scored", ()))
        if self.engine.scaler and state["scaler"]:
            self.engine.scaler.load_state_dict(state["scaler"])
        if self.validator:
            self.validator.passes = state["val_passes"]
        if self.average:
            self.average.load_state_dict(state["average"])

    @property
    def has_epochs_left(self) -> bool:
        """Whether the running `fit` has epochs left to train."""
        return self.epoch < self.config.epochs and not self._stopping

    @property
    def _step_lengths(self) -> dict[str, float]:
        return {"alpha": self.schedule.alpha or 0.0, "stretch": self.schedule.stretch or 0.0}

    def _check_weights(self) -> float:
        """Return log10 of the bound on the network's Lipschitz constant; raise if weights are not finite."""
        bound = log10_lipschitz(self.model)
        trained = [p.detach() for p in self.model.parameters() if p.requires_grad]
        if not (math.isfinite(bound) and torch.stack([p.isfinite().all() for p in trained]).all()):
            raise self.numerical_error(
                f"the weights are not finite after epoch {self.epoch + 1}. Lower the learning rate."
            )
        return bound

    def _validate(self, validator: Validator) -> ValScores:
        """Return the scores on held-out images; raise if the loss is not finite."""
        scores = validator(self.model)
        if not math.isfinite(scores.loss):
            raise self.numerical_error(
                f"the loss on held-out {noun_of_shape(validator.source.shape)} is {scores.loss} in epoch {self.epoch + 1}: "
                "in eval mode, where batch norms use their running statistics, the network's outputs are not finite. "
                "Lower the learning rate."
            )
        self.call_callbacks("on_validation", scores)
        return scores

    def _validate_average(self) -> ValScores | None:
        """Return the scores of the averaged weights on held-out images, if there is an average."""
        if not self.average or not self.validator:
            return None
        with self.average.applied():
            return self.validator(self.model)

    def _make_best_epoch(self, snapshot: Snapshot | None = None, scored: Iterable[ScoredEpoch] = ()) -> BestEpoch:
        """The choice of the best epoch, from the start or from a checkpoint."""
        noun = noun_of_shape(self.train.shape)
        return BestEpoch(snapshot, scored, robust=self.schedule.has_adversary, task=self.task, noun=noun)

    def _update_best(self, stats: EpochStats, scores: ValScores | None, average: ValScores | None) -> EpochStats:
        """Keep the weights or their average if it is the best so far; the epoch's statistics say which epoch is."""
        chance = self.validator.chance_upper_bound if self.validator else None
        p_value = self.best.update_if_better(stats, self.model, chance, scores.correct if scores else None)
        if self.average:
            of_average = replace(stats, val_natural=stats.ema_natural, val_robust=stats.ema_robust)
            correct = average.correct if average else None
            with self.average.applied():
                self.best.update_if_better(of_average, self.model, chance, correct, averaged=True)
        return replace(stats, best_epoch=self.best.snapshot.epoch, val_p=p_value)

    def _make_stats(
        self, record: EpochRecord, lipschitz_bound: float, scores: ValScores | None, average: ValScores | None
    ) -> EpochStats:
        budget, self.num_image_steps = self.budget, self.num_image_steps + record.num_image_steps
        stats = EpochStats(
            epoch=self.epoch,
            k=budget.k,
            alpha=budget.step_size,
            level=budget.stop_threshold,
            magnitude=record.magnitude,
            threshold=self.schedule_state.get("threshold"),
            loss=record.loss,
            train_accuracy=record.accuracy,
            val_natural=scores.natural if scores else None,
            val_robust=scores.robust if scores else None,
            log10_lipschitz=lipschitz_bound,
            lr=self.lr_scheduler.lr_at(self.epoch * len(self.train) + self.batches_done - 1),
            examples=record.examples,
            skipped=record.skipped,
            active=self.num_image_steps,
            backprops=self.game.cost.backprops,
            passes=self.game.cost.passes,
            val_passes=self.validator.passes if self.validator else 0,
            val_loss=scores.loss if scores else None,
            ema_natural=average.natural if average else None,
            ema_robust=average.robust if average else None,
            measured=dict(record.measured) or None,
        )
        return separate_training_accuracy(stats, self.method.describe())

    def _make_timing(self, record: EpochRecord, started: float, train_ended: float) -> EpochTiming:
        previous_ended, self._last_epoch_ended = self._last_epoch_ended, perf_counter()
        train_seconds = train_ended - started
        return EpochTiming(
            epoch=self.epoch,
            train_seconds=train_seconds,
            val_seconds=self._last_epoch_ended - train_ended,
            images_per_second=record.examples / train_seconds,
            other_seconds=started - previous_ended,
            warm_up_seconds=self.game.executor.take_warm_up_seconds(),
            engine=self.engine.name,
        )

    @contextmanager
    def session(self) -> Iterator[None]:
        """Set threads, backend flags, precision and random state for training, and restore them on exit.

        Data workers end on exit. A caller's `torch.autocast` has no effect inside: the precision is that of the config.

        Raises:
            UsageError: Another thread of this process trains.
        """
        flags = torch_backend_flags(
            self.threads,
            cudnn_benchmark=self.engine.use_cuda_graphs,  # a recording is replayed often, which repays the search
            deterministic=self.config.deterministic,
        )
        device = self.engine.device
        with (
            device_context(device),
            reused_memory() if device.type == "cpu" else nullcontext(),
            flags,
            without_autocast(device.type),
            stopping_workers(self.train, self.val),
            self.random_streams.isolated_rng(device),
        ):
            yield


def _input_scale(model: nn.Module, shape: Sequence[int]) -> Tensor | None:
    """The deviation by which a model divides its inputs, as a tensor that broadcasts over examples of a shape."""
    std = get_input_std(model)
    return None if std is None else std.view(1, -1, *[1] * (len(shape) - 1))


def remaining_batches(
    source: BatchSource, epoch: int, step: int, interruption: Interruption
) -> Iterator[tuple[int, Batch]]:
    """Yield the batches of an epoch from `step` on, each with its number, until an interruption is requested.

    A source that cannot seek draws its first batches again; they are skipped.
    """
    first, batches = _start_batches(source, epoch, step)
    for number, batch in enumerate(batches, first):
        interruption.check()
        if number >= step:
            yield number, batch


def _start_batches(source: BatchSource, epoch: int, step: int) -> tuple[int, Iterator[Batch]]:
    if step and isinstance(source, SeekableSource) and source.can_seek:
        return step, source.epoch(epoch, step)
    return 0, source.epoch(epoch)
