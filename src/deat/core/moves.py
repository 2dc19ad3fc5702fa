"""The game of one minibatch: an adversary who moves delta and a learner who moves theta.

Two moves cost one backprop each: A (ascend) takes delta's gradient alone and steps delta; J (joint) takes
both gradients in one pass and steps theta. Nothing here reads the device.
"""

import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from deat.core.buffers import Budget, Cost, Round
from deat.core.first_layer import FirstLayer, find_first_layer
from deat.core.inner_attack import Ascent, Reach
from deat.core.meter import Meter
from deat.core.objectives import Objective
from deat.engine.cuda_graphs import Move
from deat.engine.executor import Runner
from deat.engine.precision import DeviceScaler, Engine
from deat.errors import UsageError
from deat.threat import ThreatModel
from deat.utils.distributed import ALONE, Ranks
from deat.utils.torch_utils import evaluating, spread

MEETINGS = ("joint", "close")
"""Moves that meet other processes, or count what they share; with several processes these are never recorded."""


@dataclass(frozen=True)
class Probe:
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
        ascent: Ascent,
        optimizer: torch.optim.Optimizer,
        *,
        probe: Probe | None = None,
        engine: Engine | None = None,
        pixel_scale: Tensor | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.net, self.objective, self.optimizer = net, objective, optimizer
        self.threat, self.ascent, self.ranks = threat, ascent, ranks
        self.probe, self.engine = probe or Probe(), engine or Engine()
        device = self.engine.device
        self.dtype = torch.promote_types(torch.float32, next(net.parameters()).dtype)
        self.pixel_scale = pixel_scale if self.probe.space == "normalised" else None
        self.meter = Meter(device, self.probe.over, ranks, self.engine.remedy)
        self.generator = torch.Generator(device)
        self.alpha, self.level = (torch.zeros((), dtype=self.dtype, device=device) for _ in range(2))
        self.reach = Reach(device, ascent.starts_unseen and self.engine.precision != "fp32")
        self.cost = Cost()
        self.carry: Tensor | None = None
        self.among: int | None = None
        own = weakref.proxy(self)  # else recordings would stay, and all they hold, until garbage is collected
        self.runner = Runner(
            net, objective, ascent.inner, threat, optimizer, self.engine, lambda: own.changing(), alone=not ranks.many
        )
        self.holds_gradients = False
        self._first_layer: FirstLayer | None = None
        self._rounds: OrderedDict[torch.Size, Round] = OrderedDict()

    def open(self, x: Tensor, y: Tensor, budget: Budget) -> Round:
        """A round on this batch, with delta at its start."""
        r = self._round_like(x, y)
        if self.runner.open(r):
            self.holds_gradients = False
        r.x.copy_(x)
        r.y.copy_(y)
        r.magnitude.zero_()
        r.valid.fill_(True)
        self.alpha.fill_(budget.alpha)
        self.level.fill_(budget.level)
        self.reach.extend()
        r.delta.copy_(self._start(r, budget))
        if self.ascent.freeze is not None:
            self.ascent.freeze.open(r, self.level)
            if not self._own:
                r.active.fill_(False)
        if self.ascent.needs_reference and budget.k:
            self._refer_to_clean(r)
        return r

    def _round_like(self, x: Tensor, y: Tensor) -> Round:
        if x.shape not in self._rounds:
            if len(self._rounds) == 4:  # images of ever new sizes must not fill the memory
                self.runner.drop(self._rounds.popitem(last=False)[1])
            self._rounds[x.shape] = Round.like(self.engine.layout(x.to(self.dtype)), y)
        return self._rounds[x.shape]

    def _start(self, r: Round, budget: Budget) -> Tensor:
        if not budget.k and not self.ascent.noisy:
            return torch.zeros_like(r.x)
        rows = slice(None) if self.among is None else self.ranks.share.rows(self.among)
        start = self.threat.start(r.x, self.ascent.start, self.generator, among=self.among, rows=rows)
        if self.carry is not None and self.carry.shape[1:] == r.x.shape[1:]:
            kept = self.carry[: len(r)]  # a batch longer than any before starts its other rows anew
            start[: len(kept)] = self.threat.project(r.x[: len(kept)], kept)
        return start

    def _refer_to_clean(self, r: Round) -> None:
        self.cost.passes += 1
        self.runner.ready(r)
        self._play("refer", self._take_reference, r)

    def _take_reference(self, r: Round) -> None:
        with torch.no_grad(), self.crafting(), self.engine.autocast():
            logits = self.runner.answer(r.x)
        if r.reference.shape != logits.shape:  # the first batch of this shape
            r.reference = torch.zeros_like(logits, dtype=self.dtype)
        r.reference.copy_(logits)

    def ascend(self, r: Round) -> None:
        """A: the gradient of the inner loss by delta alone, then a projected step of delta."""
        if self.ascent.compact:
            self._ascend_active_rows(r)
        else:
            self._count_backprop()
            self.runner.ready(r)
            self._play("ascend", self._ascend, r)
        self.reach.retract()
        if self.probe.move == "ascend":
            self._play("measure", self._measure, r)

    def _ascend(self, r: Round) -> None:
        self._take_gradient(r)
        self.step_delta(r)

    def _take_gradient(self, r: Round) -> None:
        delta = self.reach.point(r.delta)
        with self.crafting(), self.engine.autocast():
            loss, logits = self.runner.attack(r.x, delta, r.y, r.reference)
        (grad,) = torch.autograd.grad(self.engine.scale(loss), delta)
        self.engine.unscale_into(r.grad, grad, len(r))
        self.reach.undo(r.grad)
        if self.ascent.freeze is not None:
            self.ascent.freeze.update(r, logits.detach(), self.level, self.threat)

    def _ascend_active_rows(self, r: Round) -> None:
        index = self.ascent.active_rows(r)
        if len(index) == 0:
            return
        part = r.rows(index)
        self._count_backprop()
        self.runner.ready(part)
        self.runner.play("ascend", self._ascend, part, recorded=False)
        for name in ("delta", "grad", "counter", "active"):
            getattr(r, name).index_copy_(0, index, getattr(part, name))

    def joint(self, r: Round) -> None:
        """J: one pass for both gradients; the optimiser steps theta, delta's gradient comes free."""
        self._count_backprop(self._branches)
        self.runner.ready(r)
        self._play("joint", self._joint_and_update, r)
        self.runner.moved(by_optimizer=True)

    def _joint_and_update(self, r: Round) -> None:
        finite = self.take_both_gradients(r)
        self._update(r)
        if finite is not None:
            r.valid.logical_and_(finite)

    def take_both_gradients(self, r: Round, layer: FirstLayer | None = None) -> Tensor | None:
        """Both gradients, and those by a layer's probes; under a loss scaler, whether delta's did not overflow."""
        delta = r.delta.detach().requires_grad_()
        with self.engine.autocast():
            loss, logits = self.runner.objective(r, delta, layer)
        torch.autograd.backward(self.engine.scale(self._weighed(loss, r)))  # autograd.grad would not meet others
        self.runner.hand_back(keep=True)
        if delta.grad is None:
            raise UsageError("the loss does not depend on the input: the model detaches or rounds it away.")
        self.engine.unscale_into(r.grad, delta.grad, self.mean_over(r))
        if layer is not None:
            return None  # the rest is read of a round's last pass alone
        finite = self.engine.is_finite(delta.grad)
        r.loss.copy_(loss.detach())
        r.hits.copy_((logits.detach().argmax(1) == r.y).sum())
        if self.probe.move == "joint":
            self._measure(r)
        return finite

    def _weighed(self, loss: Tensor, r: Round) -> Tensor:
        """A mean over this process's images, weighed by how many they are; nothing is done where shares are equal."""
        weight = len(r) * self._own / self.mean_over(r)
        return loss if weight == 1 else loss * weight

    def _update(self, r: Round) -> None:
        """Step theta along its accumulated gradient and forget it."""
        taken = self.engine.step(self.optimizer)
        self.forget_gradients()
        if taken is not None:
            r.valid.copy_(taken)
            self.meter.skip(~taken)

    def accumulate(self, r: Round, move: Move) -> None:
        """J without its update, as `move` spells it: theta's gradient is added to what has accumulated."""
        self._count_backprop(self._branches)
        if self.engine.records and not self.holds_gradients:
            self._hold_gradients()
        self.runner.ready(r)
        self._play("accumulate", partial(self._accumulated, move), r)

    def _accumulated(self, move: Move, r: Round) -> None:
        move(r)
        self.runner.hand_back()

    def _hold_gradients(self) -> None:
        """Give every weight a gradient that stays in its place, for recordings to add to."""
        for p in self.net.parameters():
            p.grad = torch.zeros_like(p) if p.requires_grad else None
        self.holds_gradients = True
        self.runner.forget()  # what was recorded made its gradients anew

    def forget_gradients(self) -> None:
        """Drop what has accumulated; where recordings add to it, it stays in its place."""
        self.optimizer.zero_grad(set_to_none=not self.holds_gradients)

    def step(self, r: Round) -> None:
        """Step delta along the round's last gradient, project it, and leave frozen examples in place."""
        self._play("step", self.step_delta, r)
        self.reach.retract()

    def step_delta(self, r: Round) -> None:
        """Step delta, as a part of a move."""
        if self.ascent.freeze is None:
            self.runner.move(r.x, r.delta, r.grad, self.alpha, out=r.delta)
            return
        moved = self.runner.move(r.x, r.delta, r.grad, self.alpha, out=torch.empty_like(r.delta))
        self.meter.ascended(r.active)
        r.delta.copy_(torch.where(spread(r.active, r.x), moved, r.delta))

    def _measure(self, r: Round) -> None:
        grad = r.grad if self.pixel_scale is None else r.grad * self.pixel_scale
        r.magnitude.copy_(self.threat.dual_norm(grad))

    def close(self, r: Round) -> None:
        """Feed the meter once, and keep delta where it is carried over."""
        self._play("close", partial(self.meter.add, own=self._own), r)
        if self.ascent.persistent and self._own:
            self._keep(r.delta)

    def _keep(self, delta: Tensor) -> None:
        if self.carry is None or self.carry.shape[1:] != delta.shape[1:] or len(self.carry) < len(delta):
            self.carry = delta.clone()
        else:
            self.carry[: len(delta)].copy_(delta)

    @contextmanager
    def crafting(self) -> Iterator[None]:
        """The ascent's batch-norm mode; every module's own mode is restored."""
        if self.ascent.batch_norm == "train":
            yield
            return
        with evaluating(self.net):
            yield

    def first_layer(self, r: Round) -> FirstLayer:
        """The network's first layer, found once, with probes for this round."""
        layer = self._first_layer = self._first_layer or find_first_layer(self.net, r.x[:1])
        if r not in layer.probes:
            with self.engine.autocast():
                layer.probe(self.runner.bare, r, self.engine.layout)
        return layer

    def changing(self) -> Iterator[Tensor]:
        """Every tensor that a move may change, beside a round's own."""
        yield from (*self.net.parameters(), *self.net.buffers(), self.meter.sums, self.meter.counts)
        yield from self.runner.following()
        yield from (p.grad for p in self.net.parameters() if self.holds_gradients and p.grad is not None)
        yield from self.engine.scaler.tensors() if isinstance(self.engine.scaler, DeviceScaler) else ()
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))

    def mean_over(self, r: Round) -> float:
        """How many images J's mean is over here, so that the processes' average is the mean of the whole batch."""
        return len(r) if self.among is None else self.among / self.ranks.size

    @property
    def _own(self) -> bool:
        """Whether this process has images of its own in the batch, rather than a stand-in."""
        return self.among is None or self.ranks.share.count(self.among) > 0

    @property
    def _branches(self) -> int:
        loss = getattr(getattr(self.objective, "module", self.objective), "loss", None)
        return int(getattr(loss, "branches", 1))

    def _count_backprop(self, branches: int = 1) -> None:
        self.cost.backprops += 1
        self.cost.passes += 2 * branches

    def _play(self, name: str, move: Move, r: Round) -> None:
        self.runner.play(name, move, r, recorded=not (self.ranks.many and name in MEETINGS))
