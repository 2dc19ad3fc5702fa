"""Finds batch norms in a network's graph, with the sums and the ReLU beside them, and makes each one call."""

import inspect
import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch.nn import functional as F

from deat.kernels import forked
from deat.kernels.normed import blank_sums, norm_relu
from deat.kernels.stem import CHANNELS, conv2d_of_few

SUMS = (operator.add, torch.add, operator.iadd)
RELUS = (F.relu, torch.relu, torch.relu_, F.relu_)
RELU_METHODS = ("relu", "relu_")
IN_PLACE = (
    *(operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod),
    *(operator.ipow, operator.imatmul, operator.iand, operator.ior, operator.ixor, operator.setitem),
)


def fused(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """A backend for torch.compile: batch norms become calls of our kernels and the rest runs as it is.

    A graph without any is handed on to torch's own compiler, and so is one with graphs inside it, such as those of
    checkpointed activations, which cannot run as it is.
    """
    nested = any(isinstance(node.target, HigherOrderOperator) for node in graph.graph.nodes)
    if not nested and fuse(graph):
        return graph.forward
    inductor: Callable[..., Any] = torch._dynamo.lookup_backend("inductor")(graph, inputs)
    return inductor


def fuse(graph: fx.GraphModule) -> int:
    """Fuse every batch norm in place; how many there were. A graph without any stays as it is."""
    norms = [node for node in graph.graph.nodes if node.target is F.batch_norm and node.args]
    if not norms:
        return 0
    calls = [_fuse_one(graph.graph, node) for node in norms]
    _make_room(graph.graph, calls)
    _count_together(graph.graph)
    _replace_convolutions(graph.graph)
    graph.graph.lint()
    graph.recompile()
    return len(norms)


def _fuse_one(graph: fx.Graph, norm: fx.Node) -> fx.Node:
    x, *rest = norm.args
    assert isinstance(x, fx.Node)
    summed = x if _is_sum(x) and all(user >= norm for user in x.users) and _can_wait(x, norm) else None
    sum_behind = _sum_behind(norm) if summed is None else None
    end = sum_behind or norm
    relu = _relu_behind(end)
    with graph.inserting_before(end):
        terms = summed.args if summed is not None else (x, None)
        kwargs = {**norm.kwargs, "beside": _other(sum_behind, norm), "relu": relu is not None}
        found = graph.call_function(norm_relu, (*terms, *rest), kwargs)
        y, total = (graph.call_function(operator.getitem, (found, i)) for i in range(2))
    _replace(relu or end, y)
    if summed is not None:
        _replace(summed, total)
    else:
        _lead_through(x, found, total)
    for old in (relu, sum_behind, norm, summed):
        if old is not None:
            graph.erase_node(old)
    if not total.users:
        graph.erase_node(total)
    found.meta = dict(x.meta)
    return found


def _make_room(graph: fx.Graph, calls: list[fx.Node]) -> None:
    """Zero every batch norm's sums at once, before the first of them."""
    first = min(calls)
    channels = [int(call.meta["example_value"].shape[1]) for call in calls]
    with graph.inserting_before(first):
        room = graph.call_function(blank_sums, (first.args[0], *channels))
        for i, call in enumerate(calls):
            sums = graph.call_function(operator.getitem, (room, i))
            call.kwargs = {**call.kwargs, "sums": sums}


def _lead_through(x: fx.Node, found: fx.Node, total: fx.Node) -> None:
    """Whoever else asks for x later asks for it behind the call, whose gradient then adds theirs by the way."""
    others = [user for user in x.users if user is not found and user.target is not F.batch_norm]
    if all(user > found and not _writes(user) for user in others):
        total.meta = dict(x.meta)
        for user in others:
            user.replace_input_with(x, total)


def _replace(old: fx.Node, new: fx.Node) -> None:
    new.meta = dict(old.meta)
    old.replace_all_uses_with(new)


def _count_together(graph: fx.Graph) -> None:
    """Batch norms count their batches, each with a launch of its own: let one launch do it for all."""
    counts = [node for node in graph.nodes if _is_count(node)]
    if counts:
        times = Counter(node.args[0] for node in counts)  # one launch must not add to a count twice at once
        with graph.inserting_before(counts[-1]):
            graph.call_function(torch._foreach_add_, (list(times), list(times.values())))
    for node in counts:
        graph.erase_node(node)


def _replace_convolutions(graph: fx.Graph) -> None:
    """Convolutions of a few channels run with more, of zeros; the others take their weights' gradients beside."""
    for node in list(graph.nodes):
        held = _example(node.args[0]) if node.target is torch.conv2d and node.args else None
        if held is not None and held.dim() == 4:
            node.target = conv2d_of_few if held.shape[1] < CHANNELS else forked.conv2d
            if node.target is conv2d_of_few:
                _standardise_within(graph, node)


def _standardise_within(graph: fx.Graph, conv: fx.Node) -> None:
    """Where (x - shift) / scale goes into a convolution of few channels alone, let that do it."""
    quotient: Any = conv.args[0]
    difference = quotient.args[0] if quotient.target is operator.truediv else None
    if not isinstance(difference, fx.Node) or difference.target is not operator.sub:
        return
    (x, shift), scale = difference.args, quotient.args[1]
    if not (_by_channel(shift, x) and _by_channel(scale, x) and _only_user(difference) and _only_user(quotient)):
        return
    if not _can_wait(difference, conv):
        return
    conv.args = (x, *conv.args[1:])
    conv.kwargs = {**conv.kwargs, "shift": shift, "scale": scale}
    for node in (quotient, difference):
        graph.erase_node(node)


def _by_channel(node: Any, images: Any) -> bool:
    """Whether it is a constant for each channel of some images, of their type."""
    a, x = _example(node), _example(images)
    if a is None or x is None or x.dim() != 4 or a.dtype != x.dtype or a.requires_grad:
        return False
    return tuple(a.shape[-3:]) == (x.shape[1], 1, 1) and a.numel() == x.shape[1] and a.is_contiguous()


def _is_count(node: fx.Node) -> bool:
    if (node.op, node.target, *node.args[1:]) != ("call_method", "add_", 1) or node.users:
        return False
    held = _example(node.args[0])
    return held is not None and held.dtype == torch.int64 and held.dim() == 0


def _is_sum(node: fx.Node) -> bool:
    """Whether it adds two tensors of one shape and type, neither of which is needed as it was before."""
    if node.op != "call_function" or node.target not in SUMS or node.kwargs or len(node.args) != 2:
        return False
    a, b = (_example(term) for term in node.args)
    alike = a is not None and b is not None and a.shape == b.shape and a.dtype == b.dtype
    return alike and (node.target is not operator.iadd or _owns(node.args[0], node))


def _sum_behind(norm: fx.Node) -> fx.Node | None:
    """The sum of a batch norm and something else, with a ReLU behind it, if the batch norm can wait for it."""
    after = _only_user(norm)
    if after is None or not _is_sum(after) or _relu_behind(after) is None:
        return None
    return after if after.args[0] is not after.args[1] and _can_wait(norm, after) else None


def _can_wait(node: fx.Node, until: fx.Node) -> bool:
    """Whether what it reads is the same at a later node: nothing changes in its place in between but counts."""
    while (node := node.next) is not until:
        if _writes(node) and not _is_count(node):
            return False
    return True


def _writes(node: fx.Node) -> bool:
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


def _owns(node: Any, user: fx.Node) -> bool:
    """Whether nobody but its user sees it, neither here nor outside."""
    return node.op != "placeholder" and _only_user(node) is user


def _other(total: fx.Node | None, term: fx.Node) -> Any:
    """What a sum adds to a term."""
    return None if total is None else total.args[1] if total.args[0] is term else total.args[0]


def _relu_behind(node: fx.Node) -> fx.Node | None:
    after = _only_user(node)
    return after if after is not None and _is_relu(after) else None


def _is_relu(node: fx.Node) -> bool:
    return node.target in (RELUS if node.op == "call_function" else RELU_METHODS if node.op == "call_method" else ())


def _only_user(node: Any) -> fx.Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 else None


def _example(node: Any) -> torch.Tensor | None:
    found = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return found if isinstance(found, torch.Tensor) else None
