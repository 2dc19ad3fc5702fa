"""The first layer of any network: every parametric module that sees the input before any other.

YOPO steps delta through it alone. It is found by one traced forward, so it needs to know no network.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from deat.core.buffers import Buffers
from deat.core.objectives import LossOutput, ObjectiveFunction
from deat.errors import UsageError
from deat.utils.torch_utils import eval_mode, frozen_parameters

ForwardHook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]
OutputOffsets = list[Tensor | None]
OffsetObjective = Callable[[Tensor, Tensor, Tensor, OutputOffsets], LossOutput]
FirstLayerForward = Callable[[Tensor, Tensor], list[Tensor]]


class _FirstLayerDone(Exception):
    """Leaves a forward pass once the last first-layer call has answered."""


@dataclass(eq=False)
class FirstLayer:
    """The modules of the first layer, and which of their calls in a forward pass see the input itself.

    `probes` are zeros to be added to its outputs: the loss's gradient by one is its costate. Each call of the layer by
    the objective has one, or None if it does not see the perturbed input.
    What `probed` and `replayed` make is called inside `adding` and `leaving`: a compiler sees hooks, but places none.
    """

    modules: tuple[nn.Module, ...]
    sees_input: tuple[bool, ...]
    output_offsets: WeakKeyDictionary[Buffers, OutputOffsets] = field(default_factory=WeakKeyDictionary)
    _left: list[Any] = field(default_factory=list)
    _outputs: list[Tensor] = field(default_factory=list)

    def probe(self, objective: nn.Module, buffers: Buffers, to_memory_format: Callable[[Tensor], Tensor]) -> None:
        """Make a round's probes, laid out in memory as wanted, as one forward of the objective shows them."""
        outputs: list[Tensor] = []
        note: ForwardHook = lambda module, inputs, named, output: outputs.append(_require_tensor(module, output))  # noqa: E731
        with _forward_hooks(self.modules, note), eval_mode(objective), torch.no_grad():
            objective(buffers.x, buffers.delta, buffers.y)
        clean = len(outputs) - len(self.sees_input)  # an objective with a clean branch runs it first
        sees = (*[False] * clean, *self.sees_input)
        blank = [torch.zeros_like(to_memory_format(output)) for output in outputs]
        self.output_offsets[buffers] = [
            zero.requires_grad_() if seen else None for zero, seen in zip(blank, sees, strict=True)
        ]

    def objective_with_offsets(self, objective_fn: ObjectiveFunction) -> OffsetObjective:
        """An objective that is given probes as well."""

        def call(x: Tensor, delta: Tensor, y: Tensor, probes: OutputOffsets) -> LossOutput:
            """The objective's outcome, with the probes added."""
            self._left = list(probes)
            return objective_fn(x, delta, y)

        return call

    def add_offsets(self) -> AbstractContextManager[None]:
        """Inside, probes are added."""
        return _forward_hooks(self.modules, self._add_offset)

    def _add_offset(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Tensor) -> Tensor:
        probe = self._left.pop(0)
        return output if probe is None else output + probe

    def first_layer_forward(self, net: Callable[[Tensor], Tensor]) -> FirstLayerForward:
        """The first layer's outputs on perturbed images; the rest of the network does not run."""

        def call(x: Tensor, delta: Tensor) -> list[Tensor]:
            """The outputs that see the input."""
            self._left, self._outputs = list(self.sees_input), []
            with suppress(_FirstLayerDone):
                net(x + delta)
            outputs, self._outputs = self._outputs, []
            return outputs

        return call

    def stop_after_first_layer(self) -> AbstractContextManager[None]:
        """Inside, forward passes are left once the last first-layer call that sees the input has answered."""
        return _forward_hooks(self.modules, self._collect_output)

    def _collect_output(
        self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Tensor
    ) -> Tensor:
        if self._left.pop(0):
            self._outputs.append(output)
        if not any(self._left):
            raise _FirstLayerDone
        return output.detach()  # a costate already holds what reaches the loss through later first-layer modules


def find_first_layer(net: nn.Module, x: Tensor) -> FirstLayer:
    """The first layer of a network, as one forward of x shows it; leaves the network as it was."""
    calls: list[tuple[nn.Module, bool]] = []

    def cut(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> Any:
        """Note who is called on what depends on x, and cut its output off."""
        seen = (*inputs, *named.values())
        calls.append((module, any(isinstance(i, Tensor) and i.requires_grad for i in seen)))
        return output.detach() if isinstance(output, Tensor) else output

    # With the weights frozen and every parametric output cut off, only what sees x itself needs a gradient.
    with (
        frozen_parameters(net),
        eval_mode(net),
        _forward_hooks(_innermost_parametric_modules(net), cut),
        torch.enable_grad(),
    ):
        net(x.detach().clone().requires_grad_())
    modules = {module: None for module, sees in calls if sees}
    if not modules:
        raise UsageError("yopo found no layer with parameters that sees the input; use free-M or m+deat instead.")
    return FirstLayer(tuple(modules), tuple(sees for module, sees in calls if module in modules))


def _require_tensor(module: nn.Module, output: Any) -> Tensor:
    if not isinstance(output, Tensor):
        raise UsageError(f"yopo needs a first layer that answers with one tensor; {type(module).__name__} does not.")
    return output


def _innermost_parametric_modules(net: nn.Module) -> list[nn.Module]:
    """The innermost modules that hold parameters; a parametrised layer counts as one."""
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
