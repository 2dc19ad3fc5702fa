"""Runs a game's moves as the engine wants them: recorded as CUDA graphs, their heavy calls compiled."""

import warnings
from collections.abc import Callable, Iterable
from functools import cache, partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from deat.core.buffers import Round
from deat.core.first_layer import FirstLayer, Probed, Replayed
from deat.core.inner_attack import InnerLoss
from deat.core.objectives import ObjectiveCall, Outcome
from deat.engine.cuda_graphs import Move, Recorder
from deat.engine.kernels.conv_streams import join
from deat.engine.kernels.graph_pass import convolved, fused
from deat.engine.precision import Engine, Halves
from deat.threat import Linf, ThreatModel

Attack = Callable[[Tensor, Tensor, Tensor, Tensor], Outcome]
Step = Callable[..., Tensor]


NUMBERS = ("p", "momentum")
"""What a dropout and a batch norm are told, and a callback may tell them anew."""
ANEW = 256
"""How often a function may be compiled anew; torch's 8 end with the eighth epoch of a dropout that changes in each."""


class Compiled:
    """The objective, for J, the inner loss, for A, YOPO's first layer and delta's step, compiled for one batch shape.

    In half precision on a GPU batch norms run by our own kernels, and large weights are halved ahead of a move; where J
    meets other processes, which wait for the weights' own gradients, torch's compiler serves it instead.
    In A and in steps through the first layer the weights are detached inside the compiled function; otherwise its
    backward would compute their gradients.
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
        how, own = (backend if engine.fuses else "inductor" for backend in (fused, convolved))
        self.move: Step = _quick_move(threat, engine)
        learns, frozen = _learning(_bare(objective), self.halves), _frozen(net, self.halves)
        self.objective: ObjectiveCall = _compiled(learns, how) if alone else _compiled(objective, "inductor")
        self.attack: Attack = _compiled(_attack(frozen, inner), how)
        self.probed: Callable[[FirstLayer], Probed] = cache(lambda layer: _compiled(layer.probed(learns), how))
        self.answer: Callable[[Tensor], Tensor] = _compiled(frozen, how)
        self.replayed: Callable[[FirstLayer], Replayed] = cache(lambda layer: _compiled(layer.replayed(frozen), own))


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
        alone: bool,
    ) -> None:
        self._net, self._objective, self._inner, self.engine = net, objective, inner, engine
        self.bare, self._attack = _bare(objective), _attack(net, inner)
        self._threat, self._optimizer, self._alone = threat, optimizer, alone
        self.recorder = Recorder(net, state) if engine.records else None
        self.compiled: Compiled | None = None
        self.whole = 0
        self._granted, self._follows = self._taken_for_granted(), False
        self._known: set[tuple[str, torch.Size]] = set()
        self.warmed = 0.0

    def warm_up(self) -> float:
        """The seconds that moves took which were new, since this was asked last: to be compiled, recorded, set up."""
        seconds, self.warmed = self.warmed, 0.0
        return seconds

    def open(self, r: Round) -> bool:
        """A round begins; whether layers changed since, or steps are watched, which nothing made before knows."""
        anew = self._granted != (granted := self._taken_for_granted()) or (self._follows and self._is_watched())
        if anew:
            self._granted = granted
            self.use_compiled(self.engine.compiles)
        if self.engine.compiles and self.compiled is None and len(r.x) >= self.whole:
            self.compiled = Compiled(
                self._net, self._objective, self._inner, self._threat, self.engine, r.x.shape, self._alone
            )
            self._tell_optimizer(True)
        self.moved()
        return anew

    def play(self, name: str, move: Move, r: Round, *, recorded: bool = True) -> None:
        """Run a move: replay its recording, make one first, or simply call it, as one that is not to be recorded."""
        started, new = perf_counter(), (name, r.x.shape) not in self._known
        self._attempt(name, move, r, recorded)
        if new and (self.engine.compiles or self.engine.device.type == "cuda"):  # else a first call is like any other
            self._known.add((name, r.x.shape))
            self.warmed += perf_counter() - started

    def _attempt(self, name: str, move: Move, r: Round, recorded: bool) -> None:
        """The same; with less, where it fails with what is tried first."""
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
            self._attempt(name, move, r, recorded)

    def ready(self, r: Round) -> None:
        """A move that asks the network comes next: halve the weights, unless that was done since they changed."""
        if self._compiled_for(r.x) and self._halves:
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

    def _compiled_for(self, x: Tensor) -> Compiled | None:
        return self.compiled if self.compiled and self.compiled.shape == x.shape else None

    @property
    def _halves(self) -> Halves | None:
        return self.compiled.halves if self.compiled else None

    def objective(self, r: Round, delta: Tensor, layer: FirstLayer | None) -> Outcome:
        """The objective's outcome on a round; a layer that is given adds its probes, and meets no other processes."""
        found = self._compiled_for(r.x)
        if layer is None:
            objective: ObjectiveCall = found.objective if found else self._objective
            return objective(r.x, delta, r.y)
        probed = found.probed(layer) if found else layer.probed(self.bare)
        with layer.adding():
            return probed(r.x, delta, r.y, layer.probes[r])

    def first_outputs(self, r: Round, delta: Tensor, layer: FirstLayer) -> list[Tensor]:
        """The first layer's outputs on a round, to be differentiated by delta alone."""
        found = self._compiled_for(r.x)
        ask = found.replayed(layer) if found else layer.replayed(self._net)
        with layer.leaving():
            return ask(r.x, delta)

    def attack(self, x: Tensor, delta: Tensor, y: Tensor, reference: Tensor) -> Outcome:
        """The inner loss's outcome on a batch, to be differentiated by delta alone."""
        found = self._compiled_for(x)
        return (found.attack if found else self._attack)(x, delta, y, reference)

    def answer(self, x: Tensor) -> Tensor:
        """The network's logits on a batch, to be differentiated by nothing."""
        found = self._compiled_for(x)
        logits: Tensor = found.answer(x) if found else self._net(x)
        return logits

    def move(self, x: Tensor, delta: Tensor, grad: Tensor, alpha: Tensor, *, out: Tensor) -> Tensor:
        """The next delta, written to `out`, which may be delta itself."""
        if found := self._compiled_for(x):
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

    def _taken_for_granted(self) -> list[Any]:
        """What a recording knows as it was: who learns, weight decay, and modes, dropout and momentum of layers."""
        learns = [p.requires_grad for p in self._net.parameters()]
        decays = [group.get("weight_decay") for group in self._optimizer.param_groups]
        held = [vars(module) for module in self._net.modules()]
        return [*learns, *decays, *(_number(values.get(name)) for values in held for name in ("training", *NUMBERS))]

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
        self._known.clear()
        if self.recorder:
            self.recorder.forget()

    def drop(self, r: Round) -> None:
        """Drop the recordings on a round that will not be played again."""
        self._known = {key for key in self._known if key[1] != r.x.shape}
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


def _number(value: Any) -> Any:
    return value if isinstance(value, (int, float)) else None


def _compiled(function: Callable[..., Any], backend: Any) -> Callable[..., Any]:
    """A function compiled for tensors of one shape, and anew where a network has other hooks: YOPO's come and go."""
    asking = torch._dynamo.config.patch(skip_nnmodule_hook_guards=False, recompile_limit=ANEW)
    asked: Callable[..., Any] = asking(torch.compile(function, dynamic=False, backend=backend))
    return asked


def _quick_move(threat: ThreatModel, engine: Engine) -> Step:
    if engine.fuses and type(threat) is Linf:
        from deat.engine.kernels.linf_step_triton import linf_move

        return partial(linf_move, eps=threat.eps)
    moved = torch.compile(threat.move, dynamic=False) if threat.pointwise else threat.move
    return lambda x, delta, grad, alpha, *, out: out.copy_(moved(x, delta, grad, alpha))


def _bare(objective: nn.Module) -> nn.Module:
    """The objective that meets no other processes."""
    return getattr(objective, "module", objective)


def _learning(objective: nn.Module, halves: Halves | None) -> ObjectiveCall:
    if halves is None:
        return objective
    weights = halves.learning(objective)

    def call(x: Tensor, delta: Tensor, y: Tensor) -> Outcome:
        """The objective with halved weights."""
        outcome: Outcome = functional_call(objective, weights, (x, delta, y))
        return outcome

    return call


def _frozen(net: nn.Module, halves: Halves | None) -> Callable[[Tensor], Tensor]:
    def ask(x: Tensor) -> Tensor:
        """The network with weights that are differentiated by nobody."""
        weights = halves.frozen() if halves else {name: weight.detach() for name, weight in net.named_parameters()}
        logits: Tensor = functional_call(net, weights, (x,))
        return logits

    return ask


def _attack(net: Callable[[Tensor], Tensor], inner: InnerLoss) -> Attack:
    def attack(x: Tensor, delta: Tensor, y: Tensor, reference: Tensor) -> Outcome:
        """The inner loss of a network."""
        logits = net(x + delta)
        return Outcome(inner(logits, y, reference).mean(), logits)

    return attack


def _is_tritons(error: Exception) -> bool:
    return type(error).__module__.partition(".")[0] == "triton"


def _is_compilers(error: Exception) -> bool:
    """Whether it is the compiler's own error; imported here, since it takes a second."""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)
