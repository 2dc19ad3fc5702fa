"""Half-precision copies of weights, which forward passes use in place of the weights."""

import torch
from torch import Tensor, nn

from deat.engine.kernels.conv_streams import mark_for_side_stream, wait_for_gradients

CASTABLE_LAYERS = (nn.Conv2d, nn.Linear)
"""Layers whose weights autocast would cast, and that use them for nothing else."""


class HalfWeights:
    """Half-precision copies of a network's large weights, which forward passes use in place of the weights.

    The gradients with respect to the copies are added to the gradients of the weights, in the weights' own precision, as autocast
    does.

    Args:
        net: The network.
        dtype: The dtype of the copies.

    Attributes:
        is_current: Whether the copies equal the weights; `cast` copies them again if not.
    """

    def __init__(self, net: nn.Module, dtype: torch.dtype) -> None:
        self._net = net
        self._full_by_name = dict(castable_weights(net))
        self._half_by_name = {
            name: p.detach().to(dtype).requires_grad_(p.requires_grad) for name, p in self._full_by_name.items()
        }
        for half in self._half_by_name.values():
            mark_for_side_stream(half)
        self._detached_by_name = {name: half.detach() for name, half in self._half_by_name.items()}
        self.is_current = True

    @torch.no_grad()
    def cast(self) -> None:
        """Copy the weights, unless the copies are current."""
        if not self.is_current and self._half_by_name:
            torch._foreach_copy_(list(self._detached_by_name.values()), list(self._full_by_name.values()))
        self.is_current = True

    def trainable_copies(self, owner: nn.Module) -> dict[str, Tensor]:
        """Return the copies by the names of their weights in `owner`, a module that contains the network."""
        copies = {id(p): self._half_by_name[name] for name, p in self._full_by_name.items()}
        return {name: copies[id(p)] for name, p in owner.named_parameters() if id(p) in copies}

    def frozen(self) -> dict[str, Tensor]:
        """Return every weight of the network by name, detached, in half precision where there is a copy."""
        return {
            name: p.detach() for name, p in self._net.named_parameters() if name not in self._half_by_name
        } | self._detached_by_name

    @property
    def copies(self) -> dict[Tensor, Tensor]:
        """The copy of each weight."""
        return {p: self._half_by_name[name] for name, p in self._full_by_name.items()}

    def tensors(self) -> list[Tensor]:
        """Return the copies."""
        return list(self._detached_by_name.values())

    @torch.no_grad()
    def merge_gradients(self, keep_for_optimizer: bool = False) -> None:
        """Add the gradients of the copies to those of the weights, after those of the side stream have been computed.

        Args:
            keep_for_optimizer: Whether to leave the gradient of a copy where its weight has none; an optimiser that
                steps the copies reads it there.
        """
        wait_for_gradients()
        new_gradients: list[Tensor] = []
        half_gradients: list[Tensor] = []
        for p, half in zip(self._full_by_name.values(), self._half_by_name.values(), strict=True):
            if half.grad is None or (keep_for_optimizer and p.grad is None):
                continue
            if p.grad is not None:
                p.grad.add_(half.grad)
            else:
                p.grad = torch.empty_like(p)
                new_gradients.append(p.grad)
                half_gradients.append(half.grad)
            half.grad = None
        if new_gradients:
            torch._foreach_copy_(new_gradients, half_gradients)


def castable_weights(net: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """List the weights that may be replaced by half-precision copies.

    These are the parameters of plain layers that no other module shares and that have no gradient hooks.

    Args:
        net: The network.

    Returns:
        Name and parameter of each.
    """
    parameters = [p for _, p in net.named_parameters(remove_duplicate=False)]
    num_uses = {id(p): sum(q is p for q in parameters) for p in parameters}
    names = {id(p): name for name, p in net.named_parameters()}
    layers = [module for module in net.modules() if type(module) in CASTABLE_LAYERS]
    candidates = [p for layer in layers for p in (layer._parameters.get("weight"), layer._parameters.get("bias"))]
    castable = [p for p in candidates if p is not None and num_uses[id(p)] == 1 and not _has_gradient_hooks(p)]
    return [(names[id(p)], p) for p in castable]


def _has_gradient_hooks(p: nn.Parameter) -> bool:
    return bool(p._backward_hooks or p._post_accumulate_grad_hooks)
