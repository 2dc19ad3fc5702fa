"""The game of one minibatch: an adversary who moves delta and a learner who moves theta.

Two moves cost one backprop each: A (ascend) takes delta's gradient alone and steps delta; J (joint) takes
both gradients in one pass and steps theta. Nothing here reads the device.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from deat.core.buffers import Budget, Buffers, Cost
from deat.core.first_layer import FirstLayer, find_first_layer
from deat.core.inner_attack import DeltaScale, InnerAttack
from deat.core.meter import Meter
from deat.core.network_calls import NetworkCalls
from deat.core.objectives import Objective
from deat.engine.executor import Executor
from deat.engine.precision import Engine, LossScaler
from deat.errors import UsageError
from deat.threat import ThreatModel
from deat.utils.distributed import SINGLE_PROCESS, Distributed
from deat.utils.torch_utils import broadcast_mask, eval_mode

SYNCHRONISED_MOVES = ("joint", "close")
"""Moves that meet other processes, or count what they share; with several processes these are never recorded."""


Move = Callable[[Buffers], None]


@dataclass(frozen=True)
class MagnitudeProbe:
    """Which gradient is the magnitude l_X: of the last J or the last A, over what, in which space."""

    move: Literal["joint", "ascend"] = "joint"
    over: Literal["epoch", "last_batch"] = "epoch"
    space: Literal["pixel", "normalised"] = "pixel"


class Game:
    """One minibatch's players and their moves, over a round's static buffers.

    `carry` is the perturbation that a persistent ascent hands from batch to batch. pixel_scale is the
    normalisation's std, by which the released code multiplied the gradient before measuring it. Where several
    processes share a batch, `among` is how many images it has in all, to be set before a round opens; only J
    waits for the others.
    """

    def __init__(
        self,
        net: nn.Module,
        objective: Objective | nn.Module,
        threat: ThreatModel,
        attack: InnerAttack,
        optimizer: torch.optim.Optimizer,
        *,
        probe: MagnitudeProbe | None = None,
        engine: Engine | None = None,
        pixel_scale: Tensor | None = None,
        distributed: Distributed = SINGLE_PROCESS,
    ) -> None:
        self.net, self.objective, self.optimizer = net, objective, optimizer
        self.threat, self.attack, self.distributed = threat, attack, distributed
        self.probe, self.engine = probe or MagnitudeProbe(), engine or Engine()
        device = self.engine.device
        self.dtype = torch.promote_types(torch.float32, next(net.parameters()).dtype)
        self.pixel_scale = pixel_scale if self.probe.space == "normalised" else None
        self.meter = Meter(device, self.probe.over, distributed, self.engine.non_finite_hint)
        self.generator = torch.Generator(device)
        self.alpha, self.level = (torch.zeros((), dtype=self.dtype, device=device) for _ in range(2))
        self.delta_scale = DeltaScale(device, attack.has_tiny_start and self.engine.precision != "fp32")
        self.cost = Cost()
        self.carried_delta: Tensor | None = None
        self.global_batch_size: int | None = None
        self.executor = Executor(net, optimizer, self.engine, single_process=not distributed.is_multiprocess)
        self.calls = NetworkCalls(net, objective, attack.inner, threat, self.executor)
        self.has_static_gradients = False
        self._first_layer: FirstLayer | None = None
        self._buffers_by_shape: OrderedDict[torch.Size, Buffers] = OrderedDict()

    def refresh(self) -> None:
        """Adapt to changed layers; call it in a loop of your own after changing modes, dropout or what learns.

        The trainer calls it at the beginning of an epoch.
        """
        if self.executor.refresh():
            self.has_static_gradients = False

    def open(self, x: Tensor, y: Tensor, budget: Budget) -> Buffers:
        """A round on this batch, with delta at its start."""
        r = self._buffers_for(x, y)
        if self.executor.begin_batch(r.x, self.calls.compile_for):
            self.has_static_gradients = False
        r.x.copy_(x)
        r.y.copy_(y)
        r.magnitude.zero_()
        r.valid.fill_(True)
        self.alpha.fill_(budget.alpha)
        self.level.fill_(budget.level)
        self.delta_scale.extend()
        r.delta.copy_(self._start(r, budget))
        if self.attack.freeze is not None:
            self.attack.freeze.open(r, self.level)
            if not self._own:
                r.active.fill_(False)
        if self.attack.needs_reference and budget.k:
            self._compute_reference_logits(r)
        return r

    def _buffers_for(self, x: Tensor, y: Tensor) -> Buffers:
        if x.shape not in self._buffers_by_shape:
            if len(self._buffers_by_shape) == 4:  # images of ever new sizes must not fill the memory
                self.executor.drop(self._buffers_by_shape.popitem(last=False)[1])
            self._buffers_by_shape[x.shape] = Buffers.allocate(self.engine.layout(x.to(self.dtype)), y)
        return self._buffers_by_shape[x.shape]

    def _start(self, buffers: Buffers, budget: Budget) -> Tensor:
        if not budget.k and not self.attack.noisy:
            return torch.zeros_like(buffers.x)
        rows = slice(None) if self.global_batch_size is None else self.distributed.shard.rows(self.global_batch_size)
        start = self.threat.initial_delta(
            buffers.x, self.attack.start, self.generator, full_batch_size=self.global_batch_size, rows=rows
        )
        if self.carried_delta is not None and self.carried_delta.shape[1:] == buffers.x.shape[1:]:
            kept = self.carried_delta[: len(buffers)]  # a batch longer than any before starts its other rows anew
            start[: len(kept)] = self.threat.project(buffers.x[: len(kept)], kept)
        return start

    def _compute_reference_logits(self, buffers: Buffers) -> None:
        self.cost.passes += 1
        self.executor.prepare_forward(buffers.x)
        self._play("refer", self._store_reference_logits, buffers)

    def _store_reference_logits(self, buffers: Buffers) -> None:
        with torch.no_grad(), self.attack_mode(), self.engine.autocast():
            logits = self.calls.logits(buffers.x)
        if buffers.reference_logits.shape != logits.shape:  # the first batch of this shape
            buffers.reference_logits = torch.zeros_like(logits, dtype=self.dtype)
        buffers.reference_logits.copy_(logits)

    def ascend(self, buffers: Buffers) -> None:
        """A: the gradient of the inner loss by delta alone, then a projected step of delta."""
        if self.attack.compact:
            self._ascend_active_rows(buffers)
        else:
            self._count_backprop()
            self.executor.prepare_forward(buffers.x)
            self._play("ascend", self._ascend, buffers)
        self.delta_scale.restore()
        if self.probe.move == "ascend":
            self._play("measure", self._measure_magnitude, buffers)

    def _ascend(self, buffers: Buffers) -> None:
        self._compute_delta_gradient(buffers)
        self.step_delta(buffers)

    def _compute_delta_gradient(self, buffers: Buffers) -> None:
        delta = self.delta_scale.point(buffers.delta)
        with self.attack_mode(), self.engine.autocast():
            loss, logits = self.calls.attack_loss(buffers.x, delta, buffers.y, buffers.reference_logits)
        (grad,) = torch.autograd.grad(self.engine.scale(loss), delta)
        self.engine.unscale_into(buffers.grad, grad, len(buffers))
        self.delta_scale.undo(buffers.grad)
        if self.attack.freeze is not None:
            self.attack.freeze.update(buffers, logits.detach(), self.level, self.threat)

    def _ascend_active_rows(self, buffers: Buffers) -> None:
        index = self.attack.active_indices(buffers)
        if len(index) == 0:
            return
        part = buffers.rows(index)
        self._count_backprop()
        self.executor.prepare_forward(part.x)
        self.executor.run("ascend", self._ascend, part, self.mutable_tensors, recorded=False)
        for name in ("delta", "grad", "steps_left", "active"):
            getattr(buffers, name).index_copy_(0, index, getattr(part, name))

    def joint_update(self, buffers: Buffers) -> None:
        """J: one pass for both gradients; the optimiser steps theta, delta's gradient comes free."""
        self._count_backprop(self._num_forwards)
        self.executor.prepare_forward(buffers.x)
        self._play("joint", self._joint_update, buffers)
        self.executor.weights_changed(by_optimizer=True)

    def _joint_update(self, buffers: Buffers) -> None:
        finite = self.compute_both_gradients(buffers)
        self._step_weights(buffers)
        if finite is not None:
            buffers.valid.logical_and_(finite)

    def compute_both_gradients(self, buffers: Buffers, layer: FirstLayer | None = None) -> Tensor | None:
        """Both gradients, and those by a layer's probes; under a loss scaler, whether delta's did not overflow."""
        delta = buffers.delta.detach().requires_grad_()
        with self.engine.autocast():
            if layer is None:
                loss, logits = self.calls.objective(buffers, delta)
            else:
                loss, logits = self.calls.objective_with_offsets(buffers, delta, layer)
        torch.autograd.backward(
            self.engine.scale(self._weight_by_share(loss, buffers))
        )  # autograd.grad would not meet others
        self.executor.merge_gradients(keep_for_optimizer=True)
        if delta.grad is None:
            raise UsageError("the loss does not depend on the input: the model detaches or rounds it away.")
        self.engine.unscale_into(buffers.grad, delta.grad, self.effective_batch_size(buffers))
        if layer is not None:
            return None  # the rest is read of a round's last pass alone
        finite = self.engine.is_finite(delta.grad)
        buffers.loss.copy_(loss.detach())
        buffers.num_correct.copy_((logits.detach().argmax(1) == buffers.y).sum())
        if self.probe.move == "joint":
            self._measure_magnitude(buffers)
        return finite

    def _weight_by_share(self, loss: Tensor, buffers: Buffers) -> Tensor:
        """A mean over this process's images, weighed by how many they are; nothing is done where shares are equal."""
        weight = len(buffers) * self._own / self.effective_batch_size(buffers)
        return loss if weight == 1 else loss * weight

    def _step_weights(self, buffers: Buffers) -> None:
        """Step theta along its accumulated gradient and forget it."""
        taken = self.engine.step(self.optimizer)
        self.clear_gradients()
        if taken is not None:
            buffers.valid.copy_(taken)
            self.meter.skip(~taken)

    def accumulate_gradients(self, buffers: Buffers, move: Move) -> None:
        """J without its update, as `move` spells it: theta's gradient is added to what has accumulated."""
        self._count_backprop(self._num_forwards)
        if self.engine.records and not self.has_static_gradients:
            self._allocate_gradients()
        self.executor.prepare_forward(buffers.x)
        self._play("accumulate", partial(self._accumulate_move, move), buffers)

    def _accumulate_move(self, move: Move, buffers: Buffers) -> None:
        move(buffers)
        self.executor.merge_gradients()

    def _allocate_gradients(self) -> None:
        """Give every weight a gradient that stays in its place, for recordings to add to."""
        for p in self.net.parameters():
            p.grad = torch.zeros_like(p) if p.requires_grad else None
        self.has_static_gradients = True
        self.executor.clear_recordings()  # what was recorded made its gradients anew

    def clear_gradients(self) -> None:
        """Drop what has accumulated; where recordings add to it, it stays in its place."""
        self.optimizer.zero_grad(set_to_none=not self.has_static_gradients)

    def step(self, buffers: Buffers) -> None:
        """Step delta along the round's last gradient, project it, and leave frozen examples in place."""
        self._play("step", self.step_delta, buffers)
        self.delta_scale.restore()

    def step_delta(self, buffers: Buffers) -> None:
        """Step delta, as a part of a move."""
        if self.attack.freeze is None:
            self.calls.projected_step(buffers.x, buffers.delta, buffers.grad, self.alpha, out=buffers.delta)
            return
        moved = self.calls.projected_step(
            buffers.x, buffers.delta, buffers.grad, self.alpha, out=torch.empty_like(buffers.delta)
        )
        self.meter.count_active(buffers.active)
        buffers.delta.copy_(torch.where(broadcast_mask(buffers.active, buffers.x), moved, buffers.delta))

    def _measure_magnitude(self, buffers: Buffers) -> None:
        grad = buffers.grad if self.pixel_scale is None else buffers.grad * self.pixel_scale
        buffers.magnitude.copy_(self.threat.dual_norm(grad))

    def close(self, buffers: Buffers) -> None:
        """Feed the meter once, and keep delta where it is carried over."""
        self._play("close", partial(self.meter.add, has_own_images=self._own), buffers)
        if self.attack.persistent and self._own:
            self._keep(buffers.delta)

    def _keep(self, delta: Tensor) -> None:
        if (
            self.carried_delta is None
            or self.carried_delta.shape[1:] != delta.shape[1:]
            or len(self.carried_delta) < len(delta)
        ):
            self.carried_delta = delta.clone()
        else:
            self.carried_delta[: len(delta)].copy_(delta)

    @contextmanager
    def attack_mode(self) -> Iterator[None]:
        """The ascent's batch-norm mode; every module's own mode is restored."""
        if self.attack.batch_norm == "train":
            yield
            return
        with eval_mode(self.net):
            yield

    def first_layer(self, buffers: Buffers) -> FirstLayer:
        """The network's first layer, found once, with probes for this round."""
        layer = self._first_layer = self._first_layer or find_first_layer(self.net, buffers.x[:1])
        if buffers not in layer.output_offsets:
            with self.engine.autocast():
                layer.probe(self.calls.unwrapped_objective, buffers, self.engine.layout)
        return layer

    def mutable_tensors(self) -> Iterator[Tensor]:
        """Every tensor that a move may change, beside a round's own."""
        yield from (*self.net.parameters(), *self.net.buffers(), self.meter.sums, self.meter.counts)
        yield from self.executor.half_weight_tensors()
        yield from (p.grad for p in self.net.parameters() if self.has_static_gradients and p.grad is not None)
        yield from self.engine.scaler.tensors() if isinstance(self.engine.scaler, LossScaler) else ()
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))

    def effective_batch_size(self, buffers: Buffers) -> float:
        """How many images J's mean is over here, so that the processes' average is the mean of the whole batch."""
        return len(buffers) if self.global_batch_size is None else self.global_batch_size / self.distributed.size

    @property
    def _own(self) -> bool:
        """Whether this process has images of its own in the batch, rather than a stand-in."""
        return self.global_batch_size is None or self.distributed.shard.count(self.global_batch_size) > 0

    @property
    def _num_forwards(self) -> int:
        loss = getattr(getattr(self.objective, "module", self.objective), "loss", None)
        return int(getattr(loss, "num_forwards", 1))

    def _count_backprop(self, branches: int = 1) -> None:
        self.cost.backprops += 1
        self.cost.passes += 2 * branches

    def _play(self, name: str, move: Move, buffers: Buffers) -> None:
        recorded = not (self.distributed.is_multiprocess and name in SYNCHRONISED_MOVES)
        self.executor.run(name, move, buffers, self.mutable_tensors, recorded=recorded)
