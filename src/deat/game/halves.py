"""A network's weights in half precision, cast all at once rather than one by one in every call."""

import torch
from torch import Tensor, nn

from deat.kernels.forked import join, take_beside

PLAIN = (nn.Conv2d, nn.Linear)
"""Layers whose weights autocast would cast, and that do nothing else with them."""


class Halves:
    """Half-precision copies of a network's large weights, by name: what a forward asks in their place.

    Gradients by the copies are handed back to the weights, in their own precision, as autocast would.
    """

    def __init__(self, net: nn.Module, dtype: torch.dtype) -> None:
        self._net = net
        self._whole = dict(plain_weights(net))
        self._half = {name: p.detach().to(dtype).requires_grad_(p.requires_grad) for name, p in self._whole.items()}
        for half in self._half.values():
            take_beside(half)
        self._still = {name: half.detach() for name, half in self._half.items()}
        self.fresh = True

    @torch.no_grad()
    def cast(self) -> None:
        """Copy the weights as they are now."""
        if not self.fresh and self._half:
            torch._foreach_copy_(list(self._still.values()), list(self._whole.values()))
        self.fresh = True

    def learning(self, owner: nn.Module) -> dict[str, Tensor]:
        """The copies, by the names that `owner`, which contains the network, gives to their weights."""
        halves = {id(p): self._half[name] for name, p in self._whole.items()}
        return {name: halves[id(p)] for name, p in owner.named_parameters() if id(p) in halves}

    def frozen(self) -> dict[str, Tensor]:
        """Every weight of the network, halved where it can be, to be differentiated by none."""
        return {name: p.detach() for name, p in self._net.named_parameters() if name not in self._half} | self._still

    @property
    def copies(self) -> dict[Tensor, Tensor]:
        """Each weight's copy."""
        return {p: self._half[name] for name, p in self._whole.items()}

    def tensors(self) -> list[Tensor]:
        """The copies."""
        return list(self._still.values())

    @torch.no_grad()
    def hand_back(self, keep: bool = False) -> None:
        """Add the copies' gradients to the weights' own, once all of them are there; or keep those that are alone."""
        join()
        new: tuple[list[Tensor], list[Tensor]] = ([], [])
        for p, half in zip(self._whole.values(), self._half.values(), strict=True):
            if half.grad is None or (keep and p.grad is None):
                continue
            if p.grad is not None:
                p.grad.add_(half.grad)
            else:
                p.grad = torch.empty_like(p)
                new[0].append(p.grad)
                new[1].append(half.grad)
            half.grad = None
        if new[0]:
            torch._foreach_copy_(*new)


def plain_weights(net: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters of plain layers that no other module shares, and whose gradients nobody waits for on their way."""
    every = [p for _, p in net.named_parameters(remove_duplicate=False)]
    times = {id(p): sum(q is p for q in every) for p in every}
    names = {id(p): name for name, p in net.named_parameters()}
    layers = [module for module in net.modules() if type(module) in PLAIN]
    held = [p for layer in layers for p in (layer._parameters.get("weight"), layer._parameters.get("bias"))]
    found = [p for p in held if p is not None and times[id(p)] == 1 and not _is_hooked(p)]
    return [(names[id(p)], p) for p in found]


def _is_hooked(p: nn.Parameter) -> bool:
    return bool(p._backward_hooks or p._post_accumulate_grad_hooks)
