"""The first layer of a network: the modules with parameters that see the input before any others do.

YOPO's cheap steps of delta use it alone. One forward pass finds it, for any network.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from deat.core.batch_buffers import Buffers
from deat.core.training_losses import LossOutput, ObjectiveFunction
from deat.errors import UsageError
from deat.utils.torch_contexts import eval_mode, frozen_parameters

ForwardHook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]
OutputOffsets = list[Tensor | None]
OffsetObjective = Callable[[Tensor, Tensor, Tensor, OutputOffsets], LossOutput]
FirstLayerForward = Callable[[Tensor, Tensor], list[Tensor]]


class _FirstLayerDone(Exception):
    """Ends a forward pass after the last first-layer call."""


@dataclass(eq=False)
class FirstLayer:
    """The modules of the first layer, and which of their calls in a forward pass see the input itself.

    The functions that `objective_with_offsets` and `first_layer_forward` return must be called inside `add_offsets` and
    `stop_after_first_layer`: hooks can be compiled, but a compiled function cannot register them.

    Attributes:
        modules: The modules, in the order of their first calls.
        sees_input: Whether each call of these modules in one forward pass sees the input.
        output_offsets: Zeros to be added to the modules' outputs, for each batch's buffers: the gradient of the loss
            with respect to an offset is its costate. There is one for each call by the objective, None if the call does
            not see the perturbed input. Where the objective calls the network on perturbed inputs more than once, the
            calls share offsets, so that costates are sums over these calls.
    """

    modules: tuple[nn.Module, ...]
    sees_input: tuple[bool, ...]
    output_offsets: WeakKeyDictionary[Buffers, OutputOffsets] = field(default_factory=WeakKeyDictionary)
    _pending_calls: list[Any] = field(default_factory=list)
    """For each call that the running pass has yet to make: its offset, or whether it sees the input."""
    _outputs: list[Tensor] = field(default_factory=list)

    def unique_offsets(self, buffers: Buffers) -> list[Tensor]:
        """Return the offsets of a batch's buffers, in the order of the calls that see the input."""
        return list({id(offset): offset for offset in self.output_offsets[buffers] if offset is not None}.values())

    def make_offsets(
        self, objective: nn.Module, buffers: Buffers, to_memory_format: Callable[[Tensor], Tensor]
    ) -> None:
        """Make the offsets for a batch's buffers, by one forward pass of the objective.

        Args:
            objective: The training loss, without DDP around it.
            buffers: The batch's buffers.
            to_memory_format: Lays a tensor out in memory as the engine wants it.

        Raises:
            UsageError: If the objective calls a part of the network.
        """
        delta = buffers.delta.detach().requires_grad_()
        outputs: list[Tensor] = []
        sees_delta: list[bool] = []

        def note_call(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
            """Note a call's output, and whether its input depends on delta."""
            outputs.append(_require_tensor(module, output).detach())
            sees_delta.append(any(_depends_on(a, delta) for a in (*inputs, *named.values()) if isinstance(a, Tensor)))

        # With gradients, since an objective may differentiate inside, and without effect on later random numbers.
        devices = [delta.device] if delta.is_cuda else []
        with _forward_hooks(self.modules, note_call), eval_mode(objective), torch.random.fork_rng(devices):
            objective(buffers.x, delta, buffers.y)
        calls_per_pass = len(self.sees_input)
        if len(outputs) % calls_per_pass:
            raise UsageError(
                "yopo needs an objective that calls the whole network, once or more often; this one calls the first layer "
                f"{len(outputs)} times, where the network does so {calls_per_pass} times. Use free-M or m+deat instead."
            )
        offsets: OutputOffsets = [None] * len(outputs)
        shared: dict[tuple[int, torch.Size], Tensor] = {}
        for call, output in enumerate(outputs):
            place = call % calls_per_pass
            if self.sees_input[place] and sees_delta[call]:
                zeros = torch.zeros_like(to_memory_format(output), requires_grad=True)
                offsets[call] = shared.setdefault((place, output.shape), zeros)
        self.output_offsets[buffers] = offsets

    def objective_with_offsets(self, objective_fn: ObjectiveFunction) -> OffsetObjective:
        """Return the objective as a function that also takes the offsets.

        Args:
            objective_fn: The objective.

        Returns:
            A function of (x, delta, y, offsets), to be called inside `add_offsets`.
        """

        def call(x: Tensor, delta: Tensor, y: Tensor, offsets: OutputOffsets) -> LossOutput:
            """The objective's loss and logits, with the offsets added."""
            self._pending_calls = list(offsets)
            return objective_fn(x, delta, y)

        return call

    def add_offsets(self) -> AbstractContextManager[None]:
        """Add the offsets to the first layer's outputs inside."""
        return _forward_hooks(self.modules, self._add_offset)

    def _add_offset(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Tensor) -> Tensor:
        offset = self._pending_calls.pop(0)
        return output if offset is None else output + offset

    def first_layer_forward(self, net: Callable[[Tensor], Tensor]) -> FirstLayerForward:
        """Return a function that computes the first layer's outputs; the rest of the network does not run.

        Args:
            net: The network.

        Returns:
            A function of (x, delta), to be called inside `stop_after_first_layer`.
        """

        def call(x: Tensor, delta: Tensor) -> list[Tensor]:
            """The outputs of the calls that see the input."""
            self._pending_calls, self._outputs = list(self.sees_input), []
            with suppress(_FirstLayerDone):
                net(x + delta)
            outputs, self._outputs = self._outputs, []
            return outputs

        return call

    def stop_after_first_layer(self) -> AbstractContextManager[None]:
        """End forward passes inside after the last first-layer call that sees the input."""
        return _forward_hooks(self.modules, self._collect_output)

    def _collect_output(
        self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Tensor
    ) -> Tensor:
        if self._pending_calls.pop(0):
            self._outputs.append(output)
        if not any(self._pending_calls):
            raise _FirstLayerDone
        return output.detach()  # its costate includes the paths through later first-layer modules


def find_first_layer(net: nn.Module, x: Tensor) -> FirstLayer:
    """Find the first layer of a network by one forward pass, which changes nothing.

    Args:
        net: The network.
        x: One or more images.

    Returns:
        The first layer.

    Raises:
        UsageError: If no module with parameters sees the input.
    """
    calls: list[tuple[nn.Module, bool]] = []

    def detach_output(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> Any:
        """Note whether the module sees x, and detach its output."""
        arguments = (*inputs, *named.values())
        calls.append((module, any(isinstance(a, Tensor) and a.requires_grad for a in arguments)))
        return output.detach() if isinstance(output, Tensor) else output

    # With frozen weights and detached outputs, only the arguments that depend on x directly require a gradient.
    with (
        frozen_parameters(net),
        eval_mode(net),
        _forward_hooks(_innermost_parametric_modules(net), detach_output),
        torch.enable_grad(),
    ):
        net(x.detach().clone().requires_grad_())
    modules = {module: None for module, sees_x in calls if sees_x}
    if not modules:
        raise UsageError("yopo found no layer with parameters that sees the input; use free-M or m+deat instead.")
    return FirstLayer(tuple(modules), tuple(sees_x for module, sees_x in calls if module in modules))


def _depends_on(value: Tensor, delta: Tensor) -> bool:
    """Whether a tensor was computed from delta."""
    if not value.requires_grad:
        return False
    with torch.enable_grad():
        (grad,) = torch.autograd.grad(value.sum(), delta, retain_graph=True, allow_unused=True)
    return grad is not None


def _require_tensor(module: nn.Module, output: Any) -> Tensor:
    if not isinstance(output, Tensor):
        raise UsageError(f"yopo needs a first layer that returns one tensor; {type(module).__name__} does not.")
    return output


def _innermost_parametric_modules(net: nn.Module) -> list[nn.Module]:
    """The innermost modules with parameters; a parametrised layer counts as one."""
    return [
        m
        for m in net.modules()
        if is_parametrized(m) or (_has_own_parameters(m) and not any(map(_has_own_parameters, _submodules(m))))
    ]


def _has_own_parameters(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _submodules(module: nn.Module) -> Iterator[nn.Module]:
    modules = module.modules()
    next(modules)
    return modules


@contextmanager
def _forward_hooks(modules: Sequence[nn.Module], hook: ForwardHook) -> Iterator[None]:
    handles = [m.register_forward_hook(hook, with_kwargs=True) for m in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
