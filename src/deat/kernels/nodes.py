"""Questions about the nodes of a network's graph."""

import inspect
import operator
from typing import Any

import torch
from torch import fx

IN_PLACE = (
    *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod),
    *(operator.ipow, operator.imatmul, operator.iand, operator.ior, operator.ixor, operator.setitem),
)


def can_wait(node: fx.Node, until: fx.Node) -> bool:
    """Whether it may as well run at a later node: in between nothing but counts changes in its place, and no mode."""
    while (node := node.next) is not until:
        if (writes(node) and not is_count(node)) or _switches(node):
            return False
    return True


def _switches(node: fx.Node) -> bool:
    """Whether gradients, autocasting or another mode are switched on or off."""
    return str(getattr(node.target, "__name__", "")).startswith(("_set_", "_enter_", "_exit_"))


def writes(node: fx.Node) -> bool:
    """Whether it changes a tensor in its place."""
    name = str(getattr(node.target, "__name__", node.target))
    return name.endswith("_") or node.target in IN_PLACE or "out" in node.kwargs or _is_told_to_write(node)


def _is_told_to_write(node: fx.Node) -> bool:
    """Whether a function is called with `inplace`, by that name or by position."""
    try:
        given = inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments  # type: ignore[arg-type]
    except (TypeError, ValueError):  # a method's name, or written in C
        return False
    return bool(given.get("inplace"))


def is_count(node: fx.Node) -> bool:
    """Whether it adds one to a batch norm's count of batches."""
    if (node.op, node.target, *node.args[1:]) != ("call_method", "add_", 1) or node.users:
        return False
    held = example(node.args[0])
    return held is not None and held.dtype == torch.int64 and held.dim() == 0


def only_user(node: Any) -> fx.Node | None:
    """Who asks for it, if one does."""
    users = list(node.users)
    return users[0] if len(users) == 1 else None


def example(node: Any) -> torch.Tensor | None:
    """A tensor like the one that it will be, if it is known to be one."""
    found = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return found if isinstance(found, torch.Tensor) else None
