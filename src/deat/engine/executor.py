"""Runs a game's moves as the engine wants them: recorded as CUDA graphs, their heavy calls compiled."""

import warnings
from collections.abc import Callable, Iterable
from functools import cache, partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from deat.core.buffers import Buffers
from deat.core.first_layer import FirstLayer, FirstLayerForward, OffsetObjective
from deat.core.inner_attack import InnerLoss
from deat.core.objectives import LossOutput, ObjectiveFunction
from deat.engine.cuda_graphs import GraphRecorder, Move
from deat.engine.kernels.conv_streams import wait_for_gradients
from deat.engine.kernels.graph_pass import first_layer_backend, fused_backend
from deat.engine.precision import Engine, HalfWeights
from deat.threat import Linf, ThreatModel

InnerLossFunction = Callable[[Tensor, Tensor, Tensor, Tensor], LossOutput]
ProjectedStep = Callable[..., Tensor]


GUARDED_LAYER_ATTRIBUTES = ("p", "momentum")
"""What a dropout and a batch norm are told, and a callback may tell them anew."""
RECOMPILE_LIMIT = 256
"""How often a function may be compiled anew; torch's 8 end with the eighth epoch of a dropout that changes in each."""


class CompiledFunctions:
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
        inner_loss: InnerLoss,
        threat: ThreatModel,
        engine: Engine,
        shape: torch.Size,
        single_process: bool,
    ) -> None:
        self.shape = shape
        self.half_weights = HalfWeights(net, engine.dtype) if engine.uses_own_kernels else None
        how, own = (
            backend if engine.uses_own_kernels else "inductor" for backend in (fused_backend, first_layer_backend)
        )
        self.move: ProjectedStep = _make_projected_step(threat, engine)
        learns, frozen = (
            _objective_with_half_weights(_unwrap_ddp(objective), self.half_weights),
            _network_with_frozen_weights(net, self.half_weights),
        )
        self.objective: ObjectiveFunction = _compile(learns, how) if single_process else _compile(objective, "inductor")
        self.attack: InnerLossFunction = _compile(_make_inner_loss(frozen, inner_loss), how)
        self.objective_with_offsets: Callable[[FirstLayer], OffsetObjective] = cache(
            lambda layer: _compile(layer.objective_with_offsets(learns), how)
        )
        self.answer: Callable[[Tensor], Tensor] = _compile(frozen, how)
        self.first_layer_forward: Callable[[FirstLayer], FirstLayerForward] = cache(
            lambda layer: _compile(layer.first_layer_forward(frozen), own)
        )


class Executor:
    """Plays moves on rounds, and answers their calls of objective and network.

    `state` yields every tensor that a move may change. The first batch's shape is compiled, if it has `whole` rows; a
    short last batch, which a training that goes on may begin with, would not earn a compilation of its own.
    What cannot be compiled runs as it is, what cannot be recorded runs eagerly.
    """

    def __init__(
        self,
        net: nn.Module,
        objective: nn.Module,
        inner_loss: InnerLoss,
        threat: ThreatModel,
        optimizer: torch.optim.Optimizer,
        engine: Engine,
        mutable_tensors: Callable[[], Iterable[Tensor]],
        single_process: bool,
    ) -> None:
        self._net, self._objective, self._inner_loss, self.engine = net, objective, inner_loss, engine
        self.unwrapped_objective, self._attack = _unwrap_ddp(objective), _make_inner_loss(net, inner_loss)
        self._threat, self._optimizer, self._alone = threat, optimizer, single_process
        self.recorder = GraphRecorder(net, mutable_tensors) if engine.records else None
        self.compiled: CompiledFunctions | None = None
        self.full_batch_size = 0
        self._guard_values, self._optimizer_steps_half_weights = self._read_guard_values(), False
        self._known: set[tuple[str, torch.Size]] = set()
        self.warmed = 0.0

    def warm_up(self) -> float:
        """The seconds that moves took which were new, since this was asked last: to be compiled, recorded, set up."""
        seconds, self.warmed = self.warmed, 0.0
        return seconds

    def open(self, buffers: Buffers) -> bool:
        """A round begins; whether layers changed since, or steps are watched, which nothing made before knows."""
        anew = self._guard_values != (granted := self._read_guard_values()) or (
            self._optimizer_steps_half_weights and self._has_optimizer_hooks()
        )
        if anew:
            self._guard_values = granted
            self.use_compiled(self.engine.use_compile)
        if self.engine.use_compile and self.compiled is None and len(buffers.x) >= self.full_batch_size:
            self.compiled = CompiledFunctions(
                self._net, self._objective, self._inner_loss, self._threat, self.engine, buffers.x.shape, self._alone
            )
            self._configure_optimizer(True)
        self.moved()
        return anew

    def play(self, name: str, move: Move, buffers: Buffers, *, recorded: bool = True) -> None:
        """Run a move: replay its recording, make one first, or simply call it, as one that is not to be recorded."""
        started, new = perf_counter(), (name, buffers.x.shape) not in self._known
        self._run_with_fallback(name, move, buffers, recorded)
        if new and (
            self.engine.use_compile or self.engine.device.type == "cuda"
        ):  # else a first call is like any other
            self._known.add((name, buffers.x.shape))
            self.warmed += perf_counter() - started

    def _run_with_fallback(self, name: str, move: Move, buffers: Buffers, recorded: bool) -> None:
        """The same; with less, where it fails with what is tried first."""
        recorder = self.recorder if recorded else None
        blank = [p for group in self._optimizer.param_groups for p in group["params"] if p.grad is None]
        try:
            if recorder is None:
                move(buffers)
            else:
                recorder.play(name, move, buffers)
        except Exception as error:
            if not self._can_fall_back(error, recorder):
                raise
            self._fall_back(str(error).split("\n")[0])
            for p in blank:  # which may hold a part of a gradient by now
                p.grad = None
            self._run_with_fallback(name, move, buffers, recorded)

    def prepare_forward(self, buffers: Buffers) -> None:
        """A move that asks the network comes next: halve the weights, unless that was done since they changed."""
        if self._compiled_for(buffers.x) and self._half_weights:
            self._half_weights.cast()

    def moved(self, by_optimizer: bool = False) -> None:
        """The weights have changed, or may have; an optimiser that follows has changed halved ones with them."""
        if self._half_weights and not (by_optimizer and self._optimizer_steps_half_weights):
            self._half_weights.is_current = False

    def merge_gradients(self, *, keep_for_optimizer: bool = False) -> None:
        """Gradients that were taken by halved weights become the weights' own; or stay, if the optimiser takes them."""
        if self._half_weights:
            self._half_weights.merge_gradients(
                keep_for_optimizer=keep_for_optimizer and self._optimizer_steps_half_weights
            )

    def following(self) -> list[Tensor]:
        """What changes with the weights."""
        return self._half_weights.tensors() if self._optimizer_steps_half_weights and self._half_weights else []

    def _compiled_for(self, x: Tensor) -> CompiledFunctions | None:
        return self.compiled if self.compiled and self.compiled.shape == x.shape else None

    @property
    def _half_weights(self) -> HalfWeights | None:
        return self.compiled.half_weights if self.compiled else None

    def objective(self, buffers: Buffers, delta: Tensor, layer: FirstLayer | None) -> LossOutput:
        """The objective's outcome on a round; a layer that is given adds its probes, and meets no other processes."""
        found = self._compiled_for(buffers.x)
        if layer is None:
            objective: ObjectiveFunction = found.objective if found else self._objective
            return objective(buffers.x, delta, buffers.y)
        probed = (
            found.objective_with_offsets(layer) if found else layer.objective_with_offsets(self.unwrapped_objective)
        )
        with layer.add_offsets():
            return probed(buffers.x, delta, buffers.y, layer.output_offsets[buffers])

    def first_layer_outputs(self, buffers: Buffers, delta: Tensor, layer: FirstLayer) -> list[Tensor]:
        """The first layer's outputs on a round, to be differentiated by delta alone."""
        found = self._compiled_for(buffers.x)
        ask = found.first_layer_forward(layer) if found else layer.first_layer_forward(self._net)
        with layer.stop_after_first_layer():
            return ask(buffers.x, delta)

    def attack(self, x: Tensor, delta: Tensor, y: Tensor, reference: Tensor) -> LossOutput:
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

    def use_compiled(self, enabled: bool) -> None:
        """Compile from the next batch on, or stop doing so; what was recorded is recorded anew."""
        wait_for_gradients()  # what a move that failed has begun
        self.engine.use_compile, self.compiled = enabled, None
        self._configure_optimizer(False)
        self.clear_recordings()

    def _has_optimizer_hooks(self) -> bool:
        return bool(getattr(self._optimizer, "is_watched", False))

    def _read_guard_values(self) -> list[Any]:
        """What a recording knows as it was: who learns, weight decay, and modes, dropout and momentum of layers."""
        learns = [p.requires_grad for p in self._net.parameters()]
        decays = [group.get("weight_decay") for group in self._optimizer.param_groups]
        held = [vars(module) for module in self._net.modules()]
        return [
            *learns,
            *decays,
            *(_number_or_none(values.get(name)) for values in held for name in ("training", *GUARDED_LAYER_ATTRIBUTES)),
        ]

    def _configure_optimizer(self, compiled: bool) -> None:
        """Whether to compile its step, if it is one that can, and to step halved weights with the others."""
        if use := getattr(self._optimizer, "use_compiled", None):
            use(compiled)
        may = self._alone and self.engine.scaler is None and not self._has_optimizer_hooks()
        halves = self._half_weights if may else None
        if follow := getattr(self._optimizer, "follow", None):
            self._optimizer_steps_half_weights = halves is not None
            follow(halves.copies if halves else {})

    def clear_recordings(self) -> None:
        """Drop every recording, as when the tensors they were made on are replaced."""
        self._known.clear()
        if self.recorder:
            self.recorder.clear_recordings()

    def drop(self, buffers: Buffers) -> None:
        """Drop the recordings on a round that will not be played again."""
        self._known = {key for key in self._known if key[1] != buffers.x.shape}
        if self.recorder:
            self.recorder.drop(buffers)

    def _can_fall_back(self, error: Exception, recorder: GraphRecorder | None) -> bool:
        """Whether to play a move again, with less; not one that has met other processes, who would wait for it."""
        known = isinstance(error, RuntimeError) or _is_triton_error(error)
        if recorder is None:
            return self.compiled is not None and (known if self._alone else _is_dynamo_error(error))
        return known

    def _fall_back(self, reason: str) -> None:
        """Do without compiling, or else without recording."""
        if self.compiled is not None:
            warnings.warn(f"this network cannot be compiled, so it runs as it is: {reason}", stacklevel=4)
            self.use_compiled(False)
            return
        warnings.warn(f"this network cannot be recorded as a CUDA graph, so it runs eagerly: {reason}", stacklevel=4)
        self.recorder, self.engine.records = None, False


def _number_or_none(value: Any) -> Any:
    return value if isinstance(value, (int, float)) else None


def _compile(function: Callable[..., Any], backend: Any) -> Callable[..., Any]:
    """A function compiled for tensors of one shape, and anew where a network has other hooks: YOPO's come and go."""
    asking = torch._dynamo.config.patch(skip_nnmodule_hook_guards=False, recompile_limit=RECOMPILE_LIMIT)
    asked: Callable[..., Any] = asking(torch.compile(function, dynamic=False, backend=backend))
    return asked


def _make_projected_step(threat: ThreatModel, engine: Engine) -> ProjectedStep:
    if engine.uses_own_kernels and type(threat) is Linf:
        from deat.engine.kernels.linf_step_triton import linf_projected_step

        return partial(linf_projected_step, eps=threat.eps)
    moved = torch.compile(threat.move, dynamic=False) if threat.pointwise else threat.move
    return lambda x, delta, grad, alpha, *, out: out.copy_(moved(x, delta, grad, alpha))


def _unwrap_ddp(objective: nn.Module) -> nn.Module:
    """The objective that meets no other processes."""
    return getattr(objective, "module", objective)


def _objective_with_half_weights(objective: nn.Module, half_weights: HalfWeights | None) -> ObjectiveFunction:
    if half_weights is None:
        return objective
    weights = half_weights.trainable_copies(objective)

    def call(x: Tensor, delta: Tensor, y: Tensor) -> LossOutput:
        """The objective with halved weights."""
        outcome: LossOutput = functional_call(objective, weights, (x, delta, y))
        return outcome

    return call


def _network_with_frozen_weights(net: nn.Module, half_weights: HalfWeights | None) -> Callable[[Tensor], Tensor]:
    def ask(x: Tensor) -> Tensor:
        """The network with weights that are differentiated by nobody."""
        weights = (
            half_weights.frozen()
            if half_weights
            else {name: weight.detach() for name, weight in net.named_parameters()}
        )
        logits: Tensor = functional_call(net, weights, (x,))
        return logits

    return ask


def _make_inner_loss(net: Callable[[Tensor], Tensor], inner_loss: InnerLoss) -> InnerLossFunction:
    def attack(x: Tensor, delta: Tensor, y: Tensor, reference: Tensor) -> LossOutput:
        """The inner loss of a network."""
        logits = net(x + delta)
        return LossOutput(inner_loss(logits, y, reference).mean(), logits)

    return attack


def _is_triton_error(error: Exception) -> bool:
    return type(error).__module__.partition(".")[0] == "triton"


def _is_dynamo_error(error: Exception) -> bool:
    """Whether it is the compiler's own error; imported here, since it takes a second."""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)
