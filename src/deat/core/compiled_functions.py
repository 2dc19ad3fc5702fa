"""The functions that the moves call: losses, logits and the step of delta, eager or compiled for one batch shape."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from deat.core.batch_buffers import Buffers
from deat.core.first_layer import FirstLayer, FirstLayerForward, OffsetObjective
from deat.core.inner_attack import InnerAttack, InnerLoss
from deat.core.training_losses import LossOutput, ObjectiveFunction, PenalisedOutput, Penalty
from deat.engine.engine import Engine
from deat.engine.executor import Executor, compile_function
from deat.engine.half_weights import HalfWeights
from deat.engine.kernels.graph_pass import first_layer_backend, fused_backend
from deat.errors import UsageError
from deat.tasks import Task
from deat.threat import Linf, ThreatModel

InnerLossFunction = Callable[[Tensor, Tensor, Tensor, Tensor], LossOutput]
"""The loss that the attack maximises, as a function of (x, delta, y, reference logits)."""
ProjectedStep = Callable[..., Tensor]


class CompiledFunctions:
    """The functions of `NetworkFunctions`, compiled for one batch shape.

    With our own kernels (half precision on a GPU), batch norms are fused and large weights are cast to half precision
    once a move. Where several processes share a batch, the objective is compiled by torch's own compiler, since DDP
    waits for the gradients of the weights themselves. In every other function the weights are detached inside the
    compiled
    function: otherwise its backward would compute unused gradients.

    Args:
        net: The network.
        objective: The training loss around it, wrapped by DDP or not.
        attack: The attack, whose loss and step are compiled too.
        threat: The threat model.
        task: What outputs and labels mean.
        engine: Precision and device.
        shape: The shape of the batches.
        single_process: Whether no other process shares the batch.
    """

    def __init__(
        self,
        net: nn.Module,
        objective: nn.Module,
        attack: InnerAttack,
        threat: ThreatModel,
        task: Task,
        engine: Engine,
        shape: torch.Size,
        single_process: bool,
    ) -> None:
        self.shape = shape
        self.half_weights = HalfWeights(net, engine.dtype) if engine.uses_own_kernels else None
        backend: Any = fused_backend if engine.uses_own_kernels else "inductor"
        first_backend: Any = first_layer_backend if engine.uses_own_kernels else "inductor"
        trainable = _objective_with_half_weights(unwrap_ddp(objective), self.half_weights)
        frozen = _network_with_frozen_weights(net, self.half_weights)
        self.objective: ObjectiveFunction = (
            compile_function(trainable, backend) if single_process else compile_function(objective, "inductor")
        )
        self.attack_loss: InnerLossFunction = compile_function(_make_inner_loss(frozen, attack.loss_fn(task)), backend)
        self.logits: Callable[[Tensor], Tensor] = compile_function(frozen, backend)
        self.projected_step: ProjectedStep = _make_projected_step(attack, threat, engine)
        self.objective_with_offsets: Callable[[FirstLayer], OffsetObjective] = cache(
            lambda layer: compile_function(layer.objective_with_offsets(trainable), backend)
        )
        self.first_layer_forward: Callable[[FirstLayer], FirstLayerForward] = cache(
            lambda layer: compile_function(layer.first_layer_forward(frozen), first_backend)
        )


class NetworkFunctions:
    """The functions that the moves call: compiled if the executor has compiled them for the batch's shape, else eager.

    Args:
        net: The network.
        objective: The training loss around it, wrapped by DDP or not.
        attack: The attack, with the loss that it maximises.
        threat: The threat model, which may be replaced; compiled functions keep the one that they were compiled with.
        task: What outputs and labels mean.
        executor: Where compiled functions are stored.
    """

    def __init__(
        self,
        net: nn.Module,
        objective: nn.Module,
        attack: InnerAttack,
        threat: ThreatModel,
        task: Task,
        executor: Executor,
    ) -> None:
        self.unwrapped_objective = unwrap_ddp(objective)
        self._net, self._objective, self._attack, self.threat, self.task = net, objective, attack, threat, task
        self._executor = executor
        self._attack_loss = _make_inner_loss(net, attack.loss_fn(task))

    def compile_for(self, shape: torch.Size) -> CompiledFunctions:
        """Compile every function for batches of one shape; the compiler runs at the first call."""
        return CompiledFunctions(
            self._net,
            self._objective,
            self._attack,
            self.threat,
            self.task,
            self._executor.engine,
            shape,
            self._executor.single_process,
        )

    @property
    def needs_start(self) -> bool:
        """Whether the training loss needs the perturbation that a batch started from."""
        return bool(getattr(self.unwrapped_objective, "needs_start", False))

    def objective(self, buffers: Buffers, delta: Tensor) -> LossOutput:
        """The training loss at x + delta; with several processes, called through DDP, which averages the gradients in
        the backward pass.
        """
        compiled = self._compiled_for(buffers.x)
        function: ObjectiveFunction = compiled.objective if compiled else self._objective
        if self.needs_start:
            return function(buffers.x, delta, buffers.y, None, buffers.initial_delta)
        return function(buffers.x, delta, buffers.y)

    def penalised_objective(self, buffers: Buffers, delta: Tensor, penalty: Penalty) -> PenalisedOutput:
        """The training loss at x + delta with a penalty. It takes gradients inside, so it is never compiled."""
        start = buffers.initial_delta if self.needs_start else None
        output: PenalisedOutput = self._objective(buffers.x, delta, buffers.y, penalty, start)
        return output

    def objective_with_offsets(self, buffers: Buffers, delta: Tensor, layer: FirstLayer) -> LossOutput:
        """The training loss with zeros added to the first layer's outputs, whose gradients are YOPO's costates."""
        compiled = self._compiled_for(buffers.x)
        function = (
            compiled.objective_with_offsets(layer)
            if compiled
            else layer.objective_with_offsets(self.unwrapped_objective)
        )
        with layer.add_offsets():
            return function(buffers.x, delta, buffers.y, layer.output_offsets[buffers])

    def first_layer_outputs(self, buffers: Buffers, delta: Tensor, layer: FirstLayer) -> list[Tensor]:
        """The first layer's outputs at x + delta, to be differentiated with respect to delta alone."""
        compiled = self._compiled_for(buffers.x)
        function = compiled.first_layer_forward(layer) if compiled else layer.first_layer_forward(self._net)
        with layer.stop_after_first_layer():
            return function(buffers.x, delta)

    def attack_loss(self, x: Tensor, delta: Tensor, y: Tensor, reference: Tensor) -> LossOutput:
        """The loss that the attack maximises at x + delta, to be differentiated with respect to delta alone."""
        compiled = self._compiled_for(x)
        return (compiled.attack_loss if compiled else self._attack_loss)(x, delta, y, reference)

    def logits(self, x: Tensor) -> Tensor:
        """The network's logits, without gradients."""
        compiled = self._compiled_for(x)
        logits: Tensor = compiled.logits(x) if compiled else self._net(x)
        return logits

    def projected_step(self, x: Tensor, delta: Tensor, grad: Tensor, alpha: Tensor, *, out: Tensor) -> Tensor:
        """The next delta, written to `out`, which may be delta itself."""
        if compiled := self._compiled_for(x):
            return compiled.projected_step(x, delta, grad, alpha, out=out)
        return out.copy_(_projected_step_function(self._attack, self.threat)(x, delta, grad, alpha))

    def _compiled_for(self, x: Tensor) -> CompiledFunctions | None:
        compiled: CompiledFunctions | None = self._executor.compiled_for(x.shape)
        return compiled


def unwrap_ddp(objective: nn.Module) -> nn.Module:
    """Return the objective inside of DDP; calling it does not communicate with other processes."""
    return getattr(objective, "module", objective)


def _projected_step_function(attack: InnerAttack, threat: ThreatModel) -> Callable[..., Tensor]:
    if attack.projects_to_threat:
        return threat.pgd_step
    return lambda x, delta, grad, alpha: attack.project(threat, x, threat.step(x, delta, grad, alpha))


def _make_projected_step(attack: InnerAttack, threat: ThreatModel, engine: Engine) -> ProjectedStep:
    if engine.uses_own_kernels and type(threat) is Linf and threat.is_plain and attack.projects_to_threat:
        from deat.engine.kernels.linf_step_triton import linf_projected_step

        return partial(linf_projected_step, eps=threat.eps)
    step = _projected_step_function(attack, threat)
    step = torch.compile(step, dynamic=False) if threat.pointwise else step
    return lambda x, delta, grad, alpha, *, out: out.copy_(step(x, delta, grad, alpha))


def _objective_with_half_weights(objective: nn.Module, half_weights: HalfWeights | None) -> ObjectiveFunction:
    if half_weights is None:
        return objective
    weights = half_weights.trainable_copies(objective)

    def call(x: Tensor, delta: Tensor, y: Tensor, *others: Any) -> LossOutput:
        """Compute the objective with the half-precision weights."""
        output: LossOutput = functional_call(objective, weights, (x, delta, y, *others))
        return output

    return call


def _network_with_frozen_weights(net: nn.Module, half_weights: HalfWeights | None) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        """Compute the logits with weights that get no gradient."""
        weights = (
            half_weights.frozen()
            if half_weights
            else {name: weight.detach() for name, weight in net.named_parameters()}
        )
        logits: Tensor = functional_call(net, weights, (x,))
        return logits

    return call


def _make_inner_loss(net: Callable[[Tensor], Tensor], inner_loss: InnerLoss) -> InnerLossFunction:
    def call(x: Tensor, delta: Tensor, y: Tensor, reference: Tensor) -> LossOutput:
        """Average the inner loss over the batch."""
        logits = net(x + delta)
        losses = inner_loss(logits, y, reference)
        if losses.shape != y.shape[:1]:
            raise UsageError(
                f"the inner loss returns a tensor of shape {tuple(losses.shape)} for {len(y)} examples. Return one loss for "
                "each of them: use reduction='none'."
            )
        return LossOutput(losses.mean(), logits)

    return call
