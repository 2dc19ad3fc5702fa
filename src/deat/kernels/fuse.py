"""Finds batch norms in a network's graph, with the sums and the ReLU beside them, and makes each one call."""

import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch.nn import functional as F

from deat.kernels.nodes import can_wait, example, is_count, only_user, writes
from deat.kernels.normed import blank_sums, norm_relu
from deat.kernels.rewire import branch_off, replace_convolutions, replace_end, replace_losses

SUMS = (operator.add, torch.add, operator.iadd)
RELUS = (F.relu, torch.relu, torch.relu_, F.relu_)
RELU_METHODS = ("relu", "relu_")


def fused(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """A backend for torch.compile: batch norms become calls of our kernels and the rest runs as it is.

    A graph without any is handed on to torch's own compiler, and so is one with graphs inside it, such as those of
    checkpointed activations, which cannot run as it is.
    """
    return graph.forward if not _nests(graph) and fuse(graph) else _torchs_own(graph, inputs)


def convolved(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """A backend for a first layer alone: its convolution becomes a call of our kernels and the rest runs as it is."""
    if _nests(graph):
        return _torchs_own(graph, inputs)
    replace_convolutions(graph.graph)
    graph.graph.lint()
    graph.recompile()
    return graph.forward


def _nests(graph: fx.GraphModule) -> bool:
    return any(isinstance(node.target, HigherOrderOperator) for node in graph.graph.nodes)


def _torchs_own(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
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
    replace_convolutions(graph.graph)
    branch_off(graph.graph)
    replace_end(graph.graph)
    replace_losses(graph.graph)
    graph.graph.lint()
    graph.recompile()
    return len(norms)


def _fuse_one(graph: fx.Graph, norm: fx.Node) -> fx.Node:
    x, *rest = norm.args
    assert isinstance(x, fx.Node)
    summed = x if _is_sum(x) and all(user >= norm for user in x.users) and can_wait(x, norm) else None
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
    if all(user > found and not writes(user) for user in others):
        total.meta = dict(x.meta)
        for user in others:
            user.replace_input_with(x, total)


def _replace(old: fx.Node, new: fx.Node) -> None:
    new.meta = dict(old.meta)
    old.replace_all_uses_with(new)


def _count_together(graph: fx.Graph) -> None:
    """Batch norms count their batches, each with a launch of its own: let one launch do it for all."""
    counts = [node for node in graph.nodes if is_count(node)]
    if counts:
        times = Counter(node.args[0] for node in counts)  # one launch must not add to a count twice at once
        with graph.inserting_before(counts[-1]):
            graph.call_function(torch._foreach_add_, (list(times), list(times.values())))
    for node in counts:
        graph.erase_node(node)


def _is_sum(node: fx.Node) -> bool:
    """Whether it adds two tensors of one shape and type, neither of which is needed as it was before."""
    if node.op != "call_function" or node.target not in SUMS or node.kwargs or len(node.args) != 2:
        return False
    a, b = (example(term) for term in node.args)
    alike = a is not None and b is not None and a.shape == b.shape and a.dtype == b.dtype
    return alike and (node.target is not operator.iadd or _owns(node.args[0], node))


def _sum_behind(norm: fx.Node) -> fx.Node | None:
    """The sum of a batch norm and something else, with a ReLU behind it, if the batch norm can wait for it."""
    after = only_user(norm)
    if after is None or not _is_sum(after) or _relu_behind(after) is None:
        return None
    waits = can_wait(norm, after) and not _is_shared_until(norm, after)
    return after if after.args[0] is not after.args[1] and waits else None


def _is_shared_until(norm: fx.Node, after: fx.Node) -> bool:
    """Whether another batch norm before that node has the same running statistics, which know who came first."""
    mean: Any = norm.args[1] if len(norm.args) > 1 else norm.kwargs.get("running_mean")
    return isinstance(mean, fx.Node) and any(norm < user < after for user in mean.users)


def _owns(node: Any, user: fx.Node) -> bool:
    """Whether nobody but its user sees it, neither here nor outside."""
    return node.op != "placeholder" and only_user(node) is user


def _other(total: fx.Node | None, term: fx.Node) -> Any:
    """What a sum adds to a term."""
    return None if total is None else total.args[1] if total.args[0] is term else total.args[0]


def _relu_behind(node: fx.Node) -> fx.Node | None:
    after = only_user(node)
    return after if after is not None and _is_relu(after) else None


def _is_relu(node: fx.Node) -> bool:
    return node.target in (RELUS if node.op == "call_function" else RELU_METHODS if node.op == "call_method" else ())
