"""Runs a game's moves as the engine wants them: recorded as CUDA graphs, their heavy calls compiled."""

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from deat.game.ascent import InnerLoss
from deat.game.capture import Move, Recorder
from deat.game.engine import Engine
from deat.game.halves import Halves
from deat.game.objectives import Outcome
from deat.game.round import Round
from deat.kernels.forked import join
from deat.kernels.fuse import fused
from deat.threat import Linf, ThreatModel

Attack = Callable[[Tensor, Tensor, Tensor, Tensor], Outcome]
Judge = Callable[[Tensor, Tensor, Tensor], Outcome]
Step = Callable[..., Tensor]


class Compiled:
    """The objective, for J, the inner loss, for A, and delta's step, compiled for batches of one shape.

    In half precision on a GPU batch norms run by our own kernels, and large weights are halved ahead of a move; where J
    meets other processes, which wait for the weights' own gradients, torch's compiler serves it instead.
    In A the weights are detached inside the compiled function; otherwise its backward would compute their gradients.
    """

    def __init__(
        self,
        net: nn.Module,
        objective: nn.Module,
        inner: InnerLoss,
        threat: ThreatModel,
        engine: Engine,
        shape: torch.Size,
        alone: bool,
    ) -> None:
        self.shape = shape
        self.halves = Halves(net, engine.dtype) if engine.fuses else None
        how: dict[str, Any] = {"dynamic": False, "backend": fused if engine.fuses else "inductor"}
        self.move: Step = _quick_move(threat, engine)
        learns: Judge = _learning(objective, self.halves) if alone else objective
        self.objective: Judge = torch.compile(learns, **(how if alone else {"dynamic": False}))
        self.attack: Attack = torch.compile(_attack(net, inner, self.halves), **how)


class Runner:
    """Plays moves on rounds, and answers their calls of objective and network.

    `state` yields every tensor that a move may change. The first batch's shape is compiled, if it has `whole` rows; a
    short last batch, which a training that goes on may begin with, would not earn a compilation of its own.
    What cannot be compiled runs as it is, what cannot be recorded runs eagerly.
    """

    def __init__(
        self,
        net: nn.Module,
        objective: nn.Module,
        inner: InnerLoss,
        threat: ThreatModel,
        optimizer: torch.optim.Optimizer,
        engine: Engine,
        state: Callable[[], Iterable[Tensor]],
        alone: bool = True,
    ) -> None:
        self._net, self._objective, self._inner, self.engine = net, objective, inner, engine
        self._threat, self._optimizer, self._alone = threat, optimizer, alone
        self.recorder = Recorder(state) if engine.records else None
        self.compiled: Compiled | None = None
        self.whole = 0
        self._learning, self._follows = self._who_learns(), False

    def open(self, r: Round) -> bool:
        """A round begins; whether layers were frozen since, or steps are watched, which nothing made before knows."""
        anew = self._learning != (learning := self._who_learns()) or (self._follows and self._is_watched())
        if anew:
            self._learning = learning
            self.use_compiled(self.engine.compiles)
        if self.engine.compiles and self.compiled is None and len(r.x) >= self.whole:
            held = self._net, self._objective, self._inner, self._threat, self.engine
            self.compiled = Compiled(*held, r.x.shape, alone=self._alone)
            self._tell_optimizer(True)
        self.moved()
        return anew

    def play(self, name: str, move: Move, r: Round, *, recorded: bool = True) -> None:
        """Run a move: replay its recording, make one first, or simply call it, as one that is not to be recorded."""
        recorder = self.recorder if recorded else None
        blank = [p for group in self._optimizer.param_groups for p in group["params"] if p.grad is None]
        try:
            if recorder is None:
                move(r)
            else:
                recorder.play(name, move, r)
        except Exception as error:
            if not self._may_fall_back(error, recorder):
                raise
            self._fall_back(str(error).split("\n")[0])
            for p in blank:  # which may hold a part of a gradient by now
                p.grad = None
            self.play(name, move, r, recorded=recorded)

    def ready(self, r: Round) -> None:
        """A move that asks the network comes next: halve the weights, unless that was done since they changed."""
        if self.compiled and self._halves and self.compiled.shape == r.x.shape:
            self._halves.cast()

    def moved(self, by_optimizer: bool = False) -> None:
        """The weights have changed, or may have; an optimiser that follows has changed halved ones with them."""
        if self._halves and not (by_optimizer and self._follows):
            self._halves.fresh = False

    def hand_back(self, *, keep: bool = False) -> None:
        """Gradients that were taken by halved weights become the weights' own; or stay, if the optimiser takes them."""
        if self._halves:
            self._halves.hand_back(keep=keep and self._follows)

    def following(self) -> list[Tensor]:
        """What changes with the weights."""
        return self._halves.tensors() if self._follows and self._halves else []

    @property
    def _halves(self) -> Halves | None:
        return self.compiled.halves if self.compiled else None

    def objective(self, x: Tensor, delta: Tensor, y: Tensor) -> Outcome:
        """The objective's outcome on a batch."""
        found = self.compiled
        outcome: Outcome = (found.objective if found and found.shape == x.shape else self._objective)(x, delta, y)
        return outcome

    def attack(self, x: Tensor, delta: Tensor, y: Tensor, reference: Tensor) -> Outcome:
        """The inner loss's outcome on a batch, to be differentiated by delta alone."""
        found = self.compiled
        if found and found.shape == x.shape:
            return found.attack(x, delta, y, reference)
        logits: Tensor = self._net(x + delta)
        return Outcome(self._inner(logits, y, reference).mean(), logits)

    def move(self, x: Tensor, delta: Tensor, grad: Tensor, alpha: Tensor, *, out: Tensor) -> Tensor:
        """The next delta, written to `out`, which may be delta itself."""
        found = self.compiled
        if found and found.shape == x.shape:
            return found.move(x, delta, grad, alpha, out=out)
        return out.copy_(self._threat.move(x, delta, grad, alpha))

    def use_compiled(self, wanted: bool) -> None:
        """Compile from the next batch on, or stop doing so; what was recorded is recorded anew."""
        join()  # what a move that failed has begun
        self.engine.compiles, self.compiled = wanted, None
        self._tell_optimizer(False)
        self.forget()

    def _is_watched(self) -> bool:
        return bool(getattr(self._optimizer, "is_watched", False))

    def _who_learns(self) -> list[bool]:
        return [p.requires_grad for p in self._net.parameters()]

    def _tell_optimizer(self, wanted: bool) -> None:
        """Whether to compile its step, if it is one that can, and to step halved weights with the others."""
        if use := getattr(self._optimizer, "use_compiled", None):
            use(wanted)
        may = self._alone and self.engine.scaler is None and not self._is_watched()
        halves = self._halves if may else None
        if follow := getattr(self._optimizer, "follow", None):
            self._follows = halves is not None
            follow(halves.copies if halves else {})

    def forget(self) -> None:
        """Drop every recording, as when the tensors they were made on are replaced."""
        if self.recorder:
            self.recorder.forget()

    def drop(self, r: Round) -> None:
        """Drop the recordings on a round that will not be played again."""
        if self.recorder:
            self.recorder.drop(r)

    def _may_fall_back(self, error: Exception, recorder: Recorder | None) -> bool:
        """Whether to play a move again, with less; not one that has met other processes, who would wait for it."""
        known = isinstance(error, RuntimeError) or _is_tritons(error)
        if recorder is None:
            return self.compiled is not None and (known if self._alone else _is_compilers(error))
        return known

    def _fall_back(self, reason: str) -> None:
        """Do without compiling, or else without recording."""
        if self.compiled is not None:
            warnings.warn(f"this network cannot be compiled, so it runs as it is: {reason}", stacklevel=4)
            self.use_compiled(False)
            return
        warnings.warn(f"this network cannot be recorded as a CUDA graph, so it runs eagerly: {reason}", stacklevel=4)
        self.recorder, self.engine.records = None, False


def _quick_move(threat: ThreatModel, engine: Engine) -> Step:
    if engine.fuses and type(threat) is Linf:
        from deat.kernels.step import linf_move

        return partial(linf_move, eps=threat.eps)
    moved = torch.compile(threat.move, dynamic=False) if threat.pointwise else threat.move
    return lambda x, delta, grad, alpha, *, out: out.copy_(moved(x, delta, grad, alpha))


def _learning(objective: nn.Module, halves: Halves | None) -> Judge:
    if halves is None:
        return objective
    weights = halves.learning(objective)

    def judge(x: Tensor, delta: Tensor, y: Tensor) -> Outcome:
        """The objective with halved weights."""
        outcome: Outcome = functional_call(objective, weights, (x, delta, y))
        return outcome

    return judge


def _attack(net: nn.Module, inner: InnerLoss, halves: Halves | None) -> Attack:
    def attack(x: Tensor, delta: Tensor, y: Tensor, reference: Tensor) -> Outcome:
        """The inner loss of weights that are differentiated by nobody."""
        weights = halves.frozen() if halves else {name: weight.detach() for name, weight in net.named_parameters()}
        logits: Tensor = functional_call(net, weights, (x + delta,))
        return Outcome(inner(logits, y, reference).mean(), logits)

    return attack


def _is_tritons(error: Exception) -> bool:
    return type(error).__module__.partition(".")[0] == "triton"


def _is_compilers(error: Exception) -> bool:
    """Whether it is the compiler's own error; imported here, since it takes a second."""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)
