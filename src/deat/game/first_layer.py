"""The first layer of any network: every parametric module that sees the input before any other.

YOPO steps delta through it alone. It is found by one traced forward, so it needs to know no network.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from deat.errors import UsageError
from deat.modes import evaluating

Hook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]


class _FirstLayerDone(Exception):
    """Leaves a forward pass once the last first-layer call has answered."""


@dataclass(frozen=True)
class FirstLayer:
    """The modules of the first layer, and which of their calls in a forward pass see the input itself."""

    modules: tuple[nn.Module, ...]
    sees_input: tuple[bool, ...]

    def outputs(self, net: nn.Module, x: Tensor) -> list[Tensor]:
        """The first layer's outputs on x; the rest of the network does not run."""
        with self.recorded(stop=True) as outputs, suppress(_FirstLayerDone):
            net(x)
        return outputs

    @contextmanager
    def recorded(self, stop: bool = False) -> Iterator[list[Tensor]]:
        """Collects the first layer's outputs of forwards run inside, keeping their gradients."""
        outputs: list[Tensor] = []
        calls = 0

        def collect(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> Tensor:
            """Keep the layer's output, and count its calls."""
            nonlocal calls
            if not isinstance(output, Tensor):
                raise UsageError(
                    f"yopo needs a first layer that answers with one tensor; {type(module).__name__} does not."
                )
            if self.sees_input[calls % len(self.sees_input)]:
                output.retain_grad()
                outputs.append(output)
            calls += 1
            if stop and len(outputs) == sum(self.sees_input):
                raise _FirstLayerDone
            # Cut off where it is replayed: a costate already holds what reaches the loss through later first-layer
            # modules. A copy where it is recorded: an in-place activation would move the costate past itself.
            return output.detach() if stop else output.clone()

        with _hooked(self.modules, collect):
            yield outputs


def find_first_layer(net: nn.Module, x: Tensor) -> FirstLayer:
    """The first layer of a network, as one forward of x shows it; leaves the network as it was."""
    calls: list[tuple[nn.Module, bool]] = []

    def cut(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> Any:
        """Note who is called on what depends on x, and cut its output off."""
        seen = (*inputs, *named.values())
        calls.append((module, any(isinstance(i, Tensor) and i.requires_grad for i in seen)))
        return output.detach() if isinstance(output, Tensor) else output

    # With the weights frozen and every parametric output cut off, only what sees x itself needs a gradient.
    with _untouched(net), _hooked(_parametric(net), cut), torch.enable_grad():
        net(x.detach().clone().requires_grad_())
    modules = {module: None for module, sees in calls if sees}
    if not modules:
        raise UsageError("yopo found no layer with parameters that sees the input; use free-M or m+deat instead.")
    return FirstLayer(tuple(modules), tuple(sees for module, sees in calls if module in modules))


def _parametric(net: nn.Module) -> list[nn.Module]:
    """The innermost modules that hold parameters; a parametrised layer counts as one."""
    return [m for m in net.modules() if is_parametrized(m) or (_owns(m) and not any(map(_owns, _inside(m))))]


def _owns(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _inside(module: nn.Module) -> Iterator[nn.Module]:
    modules = module.modules()
    next(modules)
    return modules


@contextmanager
def _hooked(modules: Sequence[nn.Module], hook: Hook) -> Iterator[None]:
    handles = [m.register_forward_hook(hook, with_kwargs=True) for m in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _untouched(net: nn.Module) -> Iterator[None]:
    """Eval mode and frozen weights, both restored."""
    learning = [p for p in net.parameters() if p.requires_grad]
    try:
        net.requires_grad_(False)
        with evaluating(net):
            yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)
